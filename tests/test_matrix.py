"""The tool that runs tests under several instruction sets: what it asks for, and what it makes of the outcome."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rabbitllm.quant import _vectors
from rabbitllm.quant._kernel_interface import PAIRS
from tools import matrix
from tools.matrix import SETS, Cell, InstructionSet, cpu_flags, environment_of, main, read_report, run_cell

FLAGS = "processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: avx512f\n"
KERNELS = "tests/quant/test_products.py::test_many_rows_are_not_grouped"
CODES = "tests/engine/test_double.py::test_products_from_codes"


@pytest.mark.long
def test_a_model_without_vectors_and_with_several_threads(capsys: pytest.CaptureFixture[str]) -> None:
    """The smallest part of the matrix: no kernel of the package, and torch's for SSE alone."""
    assert main(["--set", "sse4", "--threads", "2", CODES, KERNELS]) == 0
    assert capsys.readouterr().out == "sse4       2 threads      1 passed    0 failed\n"


@pytest.mark.skipif(_vectors.lanes() < 8, reason="emulated on AVX2")
def test_kernels_for_pairs_of_bfloat16_run_here() -> None:
    """By emulation: the smaller of the two, since the other takes minutes to compile."""
    kernels = "tests/quant/test_coded.py::test_every_kernel_that_this_processor_can_run"
    cell = run_cell(SETS[-1], 1, [f"{kernels}[{width}-fp8 F32 128x128]" for width in (16, PAIRS)])
    assert (cell.set_name, cell.passed, cell.failed) == ("emulated", 2, ())


@pytest.mark.long
def test_what_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("import pytest\n@pytest.mark.bits\ndef test_x(): assert False\ndef test_y(): pass\n")
    assert main(["--set", "sse4", "--threads", "1", str(test)]) == 1
    row, name = capsys.readouterr().out.splitlines()
    assert row == "sse4       1 threads      0 passed    1 failed"
    assert name.strip().endswith("test_it.py::test_x")


@pytest.mark.long
def test_nothing_to_run_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_y(): pass\n")
    assert main(["--set", "sse4", "--threads", "1", str(tmp_path)]) == 1


def test_sets_that_this_machine_lacks_are_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "cpu_flags", lambda text: frozenset({"avx2"}))
    monkeypatch.setattr(matrix, "run_cell", lambda one, threads, tests, everything: Cell(one.name, threads, 3, ()))
    assert main([]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in said if "threads" in line] == [["sse4", "1"], ["sse4", "2"], ["sse4", "4"]]
    assert "avx2       not here: this processor has no fma" in said
    assert "best       not here: this processor has no avx512_bf16" in said


def test_flags_of_a_processor() -> None:
    assert cpu_flags(FLAGS) == {"fpu", "avx2", "fma"}
    assert cpu_flags("") == frozenset()


def test_the_environment_of_a_cell() -> None:
    found = environment_of(InstructionSet("some", (), {"ATEN_CPU_CAPABILITY": "avx2"}), 4)
    assert found["ATEN_CPU_CAPABILITY"] == "avx2"
    assert found["RABBITLLM_TEST_THREADS"] == found["OMP_NUM_THREADS"] == found["MKL_NUM_THREADS"] == "4"
    assert found["NUMBA_CACHE_DIR"].endswith("some")
    assert os.environ["PATH"] == found["PATH"]


def test_outcomes_in_a_report() -> None:
    report = """<testsuites><testsuite>
      <testcase classname="tests.a.test_b" name="test_c[1]"/>
      <testcase classname="tests.a.test_b" name="test_d"><skipped/></testcase>
      <testcase classname="tests.a.test_b" name="test_e"><failure/></testcase>
      <testcase classname="tests.a.test_b" name="test_f"><error/></testcase>
    </testsuite></testsuites>"""
    names = ("tests/a/test_b.py::test_e", "tests/a/test_b.py::test_f")
    assert read_report("avx2", 2, report) == Cell("avx2", 2, 1, names)
