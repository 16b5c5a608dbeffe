"""In a real kernel: one output that is replaced, and lines in Kaggle's commit runs. Needs ipykernel and nbclient."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parent.parent.parent
CELL = f"""
    import sys, time
    sys.path.insert(0, {str(ROOT)!r})
    from rabbitllm.base import progress
    from rabbitllm.display import region
    from rabbitllm.display.split_display import shown
    region.REFRESH_SECONDS = 0.02
    region.NOTEBOOK_SECONDS = region.LINE_SECONDS = region.SHARE_BETWEEN_LINES = 0
    show, shows = region.Region._show, []
    region.Region._show = lambda claims: (show(claims), shows.append(claims))
    with shown():
        progress.tell(progress.SplitStarted("m", ("a", "b"), 10**10, 3 * 10**9, 0, 0, (5 * 10**9,) * 2, 8))
        for number in range(1, 6):
            progress.tell(progress.BytesDone("a", 10**9, f"layers.{{number}}"))
            before = len(shows)
            while len(shows) < before + 2:
                time.sleep(0.001)
        print("something else")
        progress.tell(progress.SplitDone("x", 8, 3 * 10**9, 3.0, 4 * 10**9))
"""
LAST = "split into 8 layer files, 2.79 GB, in 3.0 s; peak disk 3.73 GB"


def run_cell() -> tuple[list[Any], list[dict[str, Any]]]:
    """The outputs that stay, and every message of outputs on the way."""
    messages: list[dict[str, Any]] = []

    class Client(nbclient.NotebookClient):  # type: ignore[misc,name-defined]
        def process_message(self, msg: dict[str, Any], *args: Any) -> Any:
            messages.append(msg)
            return super().process_message(msg, *args)

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(CELL))])
    Client(notebook, kernel_name="python3", timeout=600).execute()
    return notebook.cells[0].outputs, messages


def test_notebook_output_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE", raising=False)
    outputs, messages = run_cell()
    shown = [output for output in outputs if output["output_type"] == "display_data"]
    assert [output["data"]["text/plain"] for output in shown] == [LAST]
    assert [output["text"] for output in outputs if output["output_type"] == "stream"] == ["something else\n"]
    updates = [msg["content"]["data"]["text/plain"] for msg in messages if msg["msg_type"] == "update_display_data"]
    assert any("layers.3" in text and "30 %" in text for text in updates)
    assert len({msg["content"]["transient"]["display_id"] for msg in messages if "display" in msg["msg_type"]}) == 1


def test_lines_in_a_batch_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    outputs, _ = run_cell()
    lines = [line for output in outputs if output["name"] == "stderr" for line in output["text"].splitlines()]
    assert lines[-1] == LAST
    assert len(lines) > 3
    assert all(line.startswith("splitting ") for line in lines[:-1])
