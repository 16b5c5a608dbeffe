"""Inputs of every kind, as lines that can be read twice."""

from __future__ import annotations

import datetime
import io
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rabbitllm.batch_jobs.spool import columns_of, opened
from rabbitllm.errors import InputError, MissingPackageError, OptionError

RECORDS = [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "ü"}]


def read(source: Any, columns: dict[str, str] | None = None) -> list[dict[str, Any]]:
    with opened(source, columns) as file:
        first = file.read()
        file.seek(0)
        assert file.read() == first
    return [json.loads(line) for line in first.splitlines()]


def test_a_file_of_lines_is_read_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in RECORDS))
    assert read(path) == read(str(path)) == RECORDS
    with opened(path) as file:
        assert file.name == str(path)


def test_lists_and_generators_and_what_no_json_knows() -> None:
    assert read(RECORDS) == RECORDS
    assert read(one for one in RECORDS) == RECORDS
    assert read([{"prompt": "x", "when": datetime.datetime.now(), "score": float("nan")}]) == [{"prompt": "x"}]


def test_columns_by_other_names(tmp_path: Path) -> None:
    assert read([{"question": "x", "prompt": "y", "key": 5}], {"prompt": "question", "id": "key"}) == [
        {"prompt": "x", "id": 5}
    ]
    path = tmp_path / "in.jsonl"
    path.write_text('{"question": "x"}\n\n{"question": "z"}\n')
    assert read(path, {"prompt": "question"}) == [{"prompt": "x"}, {"prompt": "z"}]
    with pytest.raises(InputError, match=r"Record 1 of the input has no 'title'; it has 'question'"):
        read(path, {"prompt": "title"})
    path.write_text('{"question": "x"}\nbad\n')
    with pytest.raises(InputError, match=r"Line 2 of .* is no JSON"):
        read(path, {"prompt": "question"})


def test_words_for_columns() -> None:
    assert columns_of(["prompt=question", "id=a=b"]) == {"prompt": "question", "id": "a=b"}
    assert columns_of([]) is None
    for wrong in ("prompt", "nonsense=x"):
        with pytest.raises(OptionError, match="does not say what a column is"):
            columns_of([wrong])


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    from pyarrow.parquet import write_table

    path = tmp_path / "in.parquet"
    messages = [[{"role": "user", "content": "x"}], [{"role": "user", "content": "y"}]]
    write_table(pyarrow.table({"id": [1, 2], "messages": messages, "label": [float("nan"), 0.5]}), path)
    assert read(path) == [{"id": number, "messages": said} for number, said in enumerate(messages, 1)]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="is no Parquet file that can be read"):
        read(path)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read(tmp_path / "nowhere.parquet")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match="pyarrow"):
        read(tmp_path / "in.parquet")


def test_a_data_set() -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    assert read(datasets.Dataset.from_list(RECORDS)) == RECORDS


def test_a_pipe_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = "".join(json.dumps(one) + "\n" for one in RECORDS)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw.encode())))
    assert read("-") == RECORDS
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(raw,))
    writer.start()
    assert read(pipe) == RECORDS
    writer.join()


def test_what_is_no_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read(tmp_path / "nowhere.jsonl")
    for wrong in (5, {"prompt": "x"}):
        with pytest.raises(InputError, match="The input is of type"):
            read(wrong)
    with pytest.raises(InputError, match="Record 2 of the input is of type str"):
        read([{"prompt": "x"}, "y"])


def test_no_room_for_what_cannot_be_read_in_place() -> None:
    class Full:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield {"prompt": "x"}
            raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match=f"cannot be kept in {tempfile.gettempdir()}"):
        read(Full())
