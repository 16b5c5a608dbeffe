"""JSON that is read, and JSON that is refused."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from rabbitllm.errors import InvalidIndexError
from rabbitllm.formats import bounded
from rabbitllm.formats.bounded import read_json
from tests.attacks.json_files import ACCEPTED_BY_PYTHON, HOSTILE, LEGAL


@pytest.mark.parametrize(
    ("raw", "content"),
    [(b"{}", {}), (b' \n{"a": {"b": [1, 2.5, null, true]}}\n', {"a": {"b": [1, 2.5, None, True]}}), *LEGAL.values()],
)
def test_read(tmp_path: Path, raw: bytes, content: object) -> None:
    (tmp_path / "f.json").write_bytes(raw)
    assert read_json(tmp_path / "f.json") == content


@pytest.mark.parametrize("case", HOSTILE)
def test_refused(tmp_path: Path, case: str) -> None:
    raw, message = HOSTILE[case]
    path = tmp_path / "f.json"
    path.write_bytes(raw)
    with pytest.raises(InvalidIndexError, match=message) as refused:
        read_json(path)
    assert "f.json" in refused.value.problem
    assert refused.value.remedy
    assert len(str(refused.value)) < 600


def test_refused_json_that_python_accepts() -> None:
    read = set()
    for case, (raw, _) in HOSTILE.items():
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(raw.decode("utf-8"))
            read.add(case)
    assert read == ACCEPTED_BY_PYTHON


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f.json")
    with pytest.raises(InvalidIndexError, match=r"f\.json is not a JSON file: it is not a regular file"):
        read_json(tmp_path / "f.json")


def test_largest_published_index_is_read(tmp_path: Path) -> None:
    """Twice as many entries as any that is published."""
    name = "language_model.model.layers.%d.mlp.experts.%d.down_proj.weight_packed"
    weight_map = {name % divmod(n, 384): "model-00001-of-00062.safetensors" for n in range(300_000)}
    (tmp_path / "f.json").write_text(json.dumps({"weight_map": weight_map}))
    assert len(read_json(tmp_path / "f.json")["weight_map"]) == 300_000


def test_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    with path.open("wb") as stream:
        stream.truncate(bounded.MAX_BYTES + 1)  # a hole: it takes no disk
    with pytest.raises(
        InvalidIndexError, match=r"not a JSON file: it has 41,943,041 bytes; at most 41,943,040 are read"
    ):
        read_json(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "f.json")
