"""The benchmark beside llama.cpp, with a small file; `llama-bench` runs too where it is built for AVX2."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import psutil
import pytest
from gguf import GGUFReader

from benchmarks.decode import instructions
from benchmarks.decode.instructions import AVX2, BUSY, NONE, OURS, PEER, InstructionsCase, SpeedRun
from benchmarks.lib import llama
from benchmarks.lib.checkpoint import make_checkpoint
from benchmarks.lib.measure import Spread
from benchmarks.lib.process import PeerError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmarks read /proc")

FOUND = shutil.which("llama-bench")
LLAMA = os.environ.get("RABBITLLM_TEST_LLAMA") or (str(Path(FOUND).parent) if FOUND else None)
"""Folder of `llama-bench`."""
MORE_THAN_A_START = 0.3
"""Processor seconds that a process which does nothing never takes."""


def test_a_file_of_a_checkpoint_without_a_tokenizer_has_made_up_words(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "tiny", "LlamaConfig")
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    file = llama.write_file(checkpoint, tmp_path / "small.gguf", "Q8_0")
    assert GGUFReader(file).get_field("tokenizer.ggml.model") is not None


@pytest.mark.long
def test_a_small_file_with_avx2(tmp_path: Path) -> None:
    file = llama.write_file(make_checkpoint(tmp_path, "tiny", "LlamaConfig"), tmp_path / "small.gguf", "Q8_0")
    work = ["--work-dir", str(tmp_path / "w"), "--results", str(tmp_path / "r")]
    size = ["--scale", "tiny", "--turns", "1", "--tokens", "3", "--prompt-tokens", "16", "--threads", "1"]
    peer = ["--llama-avx2", LLAMA] if LLAMA else []
    given = ["--models", f"small={file}", "--schemes", NONE, "q4_0", "--instructions", AVX2]
    assert instructions.main([*given, *work, *size, *peer]) == 0
    results = json.loads((tmp_path / "r.json").read_text())
    rows = {(scheme, runner) for scheme in (NONE, "q4_0") for runner in ((OURS, BUSY, PEER) if LLAMA else (OURS, BUSY))}
    assert {run["row"] for run in results["runs"]} == {f"small {scheme} AVX2 {runner}" for scheme, runner in rows}
    assert all(run["error"] is None for run in results["runs"])
    assert all(run["token_seconds"] > 0 < run["prompt_seconds"] for run in results["runs"])
    assert not any(Path(tmp_path, "w", "instructions-run").glob("*"))


def test_ratios_are_of_the_same_model_scheme_and_instructions() -> None:
    case = InstructionsCase(OURS, "m", "q8_0", AVX2)
    peer, other = (InstructionsCase(PEER, "m", scheme, AVX2) for scheme in ("q8_0", "4bit"))
    runs = [SpeedRun(case.name, 0, token_seconds=0.02, prompt_seconds=0.001)]
    runs += [SpeedRun(peer.name, 0, token_seconds=0.01, prompt_seconds=0.002), SpeedRun(other.name, 0)]
    assert instructions.speed_beside(runs, case, lambda run: run.token_seconds) == Spread(0.5, 0.5, 0.5)
    busy = InstructionsCase(BUSY, "m", "q8_0", AVX2)
    runs += [SpeedRun(busy.name, 0, token_seconds=0.05, prompt_seconds=0.002)]
    table = instructions.tabulate(runs, [case, peer, busy], 1)
    assert table.rows[0][2:6] == ("50.0 (50.0-50.0)", "0.50 (0.50-0.50)", "1000 (1000-1000)", "2.00 (2.00-2.00)")
    assert table.rows[1][3] == ""
    assert [row[6] for row in table.rows] == ["", "", "2.50 (2.50-2.50)"]


def test_a_process_on_each_core() -> None:
    """Each of them computes; how soon depends on what else the machine does."""
    begun = {child.pid for child in psutil.Process().children()}
    end = time.monotonic() + 300
    with instructions.busy_cores():
        children = [child for child in psutil.Process().children() if child.pid not in begun]
        while min(child.cpu_times().user for child in children) < MORE_THAN_A_START and time.monotonic() < end:
            time.sleep(0.02)
        assert min(child.cpu_times().user for child in children) >= MORE_THAN_A_START
        cores = [child.cpu_affinity() for child in children]
        assert sorted(cores) == [[core] for core in sorted(os.sched_getaffinity(0))]
    assert not any(child.is_running() for child in children)


def test_a_program_that_fails(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"llama-bench failed: .*No such file"):
        instructions.bench(tmp_path / "llama-bench", tmp_path / "file", 16, 3, 1)
