"""Which content is shown, when lines are due, and a real terminal with several writers at once."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from rabbitllm.base.terminal import Row
from rabbitllm.display import region as module
from rabbitllm.display.region import LINE_SECONDS, MAX_LINE_SECONDS, LinePace, Region
from tests.support.screen import Screen, TerminalStream, run_on_terminal

ROOT = Path(__file__).parent.parent.parent


class TextContent:
    """Content of one text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def rows(self, width: int) -> Sequence[Row]:
        return [((self.text, ""),)]

    def line(self) -> str:
        return self.text


def as_terminal(monkeypatch: pytest.MonkeyPatch) -> TerminalStream:
    terminal = TerminalStream()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    return terminal


def test_last_claim_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, region = as_terminal(monkeypatch), Region()
    outer = region.claim(TextContent("outer"))
    assert stream.screen(80) == ["outer"]
    inner = region.claim(TextContent("inner"))
    assert stream.screen(80) == ["inner"]
    inner.release("inner is done")
    assert stream.screen(80) == ["inner is done", "outer"]
    inner.release()
    outer.release()
    assert stream.screen(80) == ["inner is done"]
    region.claim(TextContent("again")).release()
    assert stream.screen(80) == ["inner is done"]


def test_claims_released_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, region = as_terminal(monkeypatch), Region()
    first, second = region.claim(TextContent("first")), region.claim(TextContent("second"))
    first.release("first is done")
    assert stream.screen(80) == ["first is done", "second"]
    second.release()
    assert stream.screen(80) == ["first is done"]


def test_thread_ends_with_the_last_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.005)
    stream, region = as_terminal(monkeypatch), Region()
    content = TextContent("one")
    claim = region.claim(content)
    content.text = "two"
    end = time.monotonic() + 600
    while stream.screen(80) != ["two"]:
        assert time.monotonic() < end
        time.sleep(0.005)
    claim.release()
    while any(thread.name == "live" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.005)


def test_pace_of_lines_slows_down() -> None:
    pace = LinePace(100.0)
    times = [second for second in range(100, 100 + 3 * 3600) if pace.is_due(second)]
    gaps = [then - second for second, then in itertools.pairwise(times)]
    assert times[0] == 100 + LINE_SECONDS
    assert set(gaps[:90]) == {LINE_SECONDS}
    assert gaps == sorted(gaps)
    assert gaps[-1] == MAX_LINE_SECONDS
    assert len(times) < 600


def test_closed_stream_raises_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, region = as_terminal(monkeypatch), Region()
    claim = region.claim(TextContent("one"))
    stream.close()
    claim.release("done")


def program(body: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(body)]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "JPY_PARENT_PID"}
    return kept | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "OMP_NUM_THREADS": "1"} | more


CROWD = """
    import logging, sys, threading, warnings
    logging.basicConfig(format="%(message)s")  # its handler holds stderr from before there are rows
    from rabbitllm.display import region
    region.REFRESH_SECONDS = 0.001

    class TextContent:
        count = 0
        def rows(self, width):
            self.count += 1
            return [((f"row {self.count} ".ljust(width, "-"), "bold"),), (("second row", "dim"),)]

    claim = region.THE_REGION.claim(TextContent())

    def talk(name):
        for number in range(100):
            logging.warning("%s %d: %s", name, number, "long " * 30 + "end")
    threads = [threading.Thread(target=talk, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for number in range(50):
        sys.stdout.write(f"token{number} ")
        sys.stdout.flush()
    print()
    for thread in threads:
        thread.join()
    warnings.warn("a warning of Python's")
    claim.release("all is done")
    print("after")
"""


@pytest.mark.parametrize("columns", [60, 120])
def test_many_writers_on_a_real_terminal(columns: int) -> None:
    """Three threads that log, tokens, and our rows: every line comes out whole, and no row stays."""
    shown = Screen(columns).feed(run_on_terminal(program(CROWD), columns, environment())).shown
    text = "".join(line.ljust(columns) for line in shown)
    for name in "abc":
        places = [text.find(f"{name} {index}: {'long ' * 30}end") for index in range(100)]
        assert places == sorted(places)
        assert places[0] >= 0
    assert not [line for line in shown if line.startswith(("row ", "second row"))]
    assert shown[-2:] == ["all is done", "after"]
    assert len([line for line in shown if line.endswith("UserWarning: a warning of Python's")]) == 1


def test_exiting_process_leaves_no_rows() -> None:
    body = """
        from rabbitllm.display.region import THE_REGION
        class TextContent:
            def rows(self, width):
                return [(("row", ""),)]
        THE_REGION.claim(TextContent())
        print("last words")
    """
    assert Screen(80).feed(run_on_terminal(program(body), 80, environment())).shown == ["last words"]


def test_forked_child_writes_undisturbed() -> None:
    body = """
        import os, time, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads, since Python 3.12
        from rabbitllm.display.region import THE_REGION
        class TextContent:
            def rows(self, width):
                return [(("row", ""),)]
        claim = THE_REGION.claim(TextContent())
        THE_REGION._lock.acquire()  # as another thread may hold it
        child = os.fork()
        if child == 0:
            print("from the child", flush=True)
            claim.release("never said")
            os._exit(0)
        os.waitpid(child, 0)
        THE_REGION._lock.release()
        claim.release()
    """
    assert Screen(80).feed(run_on_terminal(program(body), 80, environment())).shown == ["from the child"]


def test_ctrl_c_leaves_no_rows() -> None:
    body = """
        import os, signal
        from rabbitllm.base import progress
        from rabbitllm.display.split_display import shown
        try:
            with shown():
                progress.tell(progress.SplitStarted("m", ("a",), 10**9, 10**9, 0, 0))
                os.kill(os.getpid(), signal.SIGINT)
                signal.pause()
        except KeyboardInterrupt:
            print("interrupted")
    """
    assert Screen(80).feed(run_on_terminal(program(body), 80, environment())).shown == ["interrupted"]


def test_closed_terminal_does_not_end_the_process(tmp_path: Path) -> None:
    """As when a connection breaks and the program was started to survive that."""
    leader, follower = os.openpty()
    body = f"""
        import signal, time
        from pathlib import Path
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        from rabbitllm.display import region
        region.REFRESH_SECONDS = 0.001
        class TextContent:
            count = 0
            def rows(self, width):
                self.count += 1
                return [((f"row {{self.count}}", ""),)]
        said = TextContent()
        claim = region.THE_REGION.claim(said)
        while said.count < 5000 and not Path({str(tmp_path / "closed")!r}).exists():
            time.sleep(0.001)
        before = said.count
        while said.count < before + 20:
            time.sleep(0.001)
        claim.release("done")
        region.THE_REGION.claim(said).release()
        Path({str(tmp_path / "done")!r}).touch()
    """
    command = program(body)
    running = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment())
    os.close(follower)
    assert b"row" in os.read(leader, 4096)
    os.close(leader)
    (tmp_path / "closed").touch()
    running.wait(600)
    assert (tmp_path / "done").exists()


def test_files_get_no_escape_sequences() -> None:
    body = """
        import time
        from rabbitllm.display import region
        region.REFRESH_SECONDS, region.LINE_SECONDS = 0.001, 0.01
        class TextContent:
            count = 0
            def line(self):
                self.count += 1
                return "a plain line"
        said = TextContent()
        claim = region.THE_REGION.claim(said)
        while said.count < 3:
            time.sleep(0.001)
        claim.release("the last one")
    """
    done = subprocess.run(program(body), capture_output=True, text=True, env=environment(), check=True)
    lines = done.stderr.splitlines()
    assert set(lines[:-1]) == {"a plain line"}
    assert lines[-1] == "the last one"
    assert done.stdout == ""
