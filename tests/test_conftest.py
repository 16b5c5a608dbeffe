"""What every test finds, and in which order files of tests go to the processes that run them."""

from __future__ import annotations

import importlib.util
import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import BITS, FIRST, put_in_order
from tests.support.after_import import after_import
from tests.support.fresh_process import python
from tests.support.one_thread import THREADS

HERE = Path(__file__).parent


def test_tests_that_need_no_large_library_import_none() -> None:
    files = "base.test_collection", "checkpoints.test_naming", "storage.test_folders", "telemetry.test_passes"
    code = f"import sys, tests.conftest, {', '.join(f'tests.{file}' for file in files)}\nprint(*sys.modules)"
    run = python(code)
    assert not {"torch", "transformers", "numba", "bitsandbytes"} & {*run.stdout.split()}


def test_what_a_developer_has_set_is_not_for_tests(tmp_path: Path) -> None:
    names = ("RABBITLLM_HOME", "RABBITLLM_LOG", "RABBITLLM_API_KEY")
    run = python(
        "import os, tests.conftest\nprint(*os.environ)", env={**os.environ, **dict.fromkeys(names, str(tmp_path))}
    )
    assert not {*names} & {*run.stdout.split()}


def test_settings_come_with_an_import() -> None:
    import hypothesis
    import torch

    assert (torch.get_num_threads(), hypothesis.settings.get_current_profile_name()) == (THREADS, "ci")


def test_a_module_is_loaded_as_ever_before_its_settings_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    (tmp_path / "watched_module.py").write_text("VALUE = 5")
    monkeypatch.syspath_prepend(tmp_path)
    after_import("watched_module", lambda module: seen.append(module.VALUE))
    assert importlib.util.find_spec("watched_module") is not None
    assert seen == []
    module = importlib.import_module("watched_module")
    after_import("watched_module", lambda module: seen.append(module.__loader__))
    assert seen == [5, module.__loader__]
    assert inspect.getsource(module).strip() == "VALUE = 5"


def test_files_that_go_first_or_compare_bits_are_there() -> None:
    assert [name for name in (*FIRST, *BITS) if not (HERE / name).is_file()] == []


@pytest.mark.parametrize("listed", ["quick.txt", "depends_on_transformers.txt"])
def test_lists_of_tests_name_tests_that_are_there(listed: str) -> None:
    for line in (HERE / listed).read_text().splitlines():
        file, _, name = line.partition("::")
        assert not name or f"\ndef {name}(" in (HERE / file).read_text(), line
        assert (HERE / file).is_file(), line


def test_the_quick_ones_have_a_file_of_every_room() -> None:
    rooms = {path.name for path in HERE.iterdir() if path.is_dir() and [*path.glob("test_*.py")]}
    quick = {line.split("/")[0] for line in (HERE / "quick.txt").read_text().splitlines()}
    assert rooms - quick == {"support", "frozen", "ecosystem", "examples", "benchmarks"}


def test_long_files_first_then_those_with_many_tests() -> None:
    few, many, first = HERE / "b.py", HERE / "c.py", HERE / FIRST[0]
    items: list[Any] = [SimpleNamespace(path=path, name=n) for path in (few, many, first) for n in range(3)]
    items += [SimpleNamespace(path=many, name=3), SimpleNamespace(path=HERE / "a.py", name=0)]
    put_in_order(items)
    assert [(one.path, one.name) for one in items] == [
        *((first, n) for n in range(3)),
        *((many, n) for n in range(4)),
        *((few, n) for n in range(3)),
        (HERE / "a.py", 0),
    ]
