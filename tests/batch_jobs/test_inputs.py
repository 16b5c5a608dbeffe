"""An input gone through once: bad lines in place, ids once, a good order."""

from __future__ import annotations

import datetime
import gc
import io
import json
import os
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rabbitllm.batch_jobs import inputs as module
from rabbitllm.batch_jobs.inputs import InputScan, columns_of, opened, ordered, scanned
from rabbitllm.batch_jobs.items import Defaults, Generate, Refused
from rabbitllm.errors import InputError, MissingPackageError, OptionError


def of(*lines: bytes | dict[str, Any]) -> InputScan:
    raw = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    return scanned(io.BytesIO(raw), Defaults())


def test_invalid_lines_are_errors_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 64)
    scan = of(
        b"\xef\xbb\xbf" + b'{"prompt": "a"}',
        b"{bad",
        b"",
        b'{"prompt": "\xff"}',
        b'{"prompt": "' + b"x" * 200 + b'"}',
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"id": [], "prompt": "a"}',
        b'{"id": "last", "prompt": "b"}',
    )
    items = [scan.item(index) for index in range(len(scan))]
    assert [item.key for item in items] == [1, 2, 4, 5, 6, 7, 8, "last"]
    messages = [item.task.message if isinstance(item.task, Refused) else "" for item in items]
    assert messages[0] == messages[-1] == ""
    assert messages[1].startswith("Line 2 is not valid JSON")
    assert "byte 12 is not UTF-8" in messages[2]
    assert messages[3] == "Line 5 has more than 64 bytes."
    assert "NaN" in messages[4]
    assert "unpaired surrogate" in messages[5]
    assert "id is a list" in messages[6]
    assert isinstance(items[-1].task, Generate)


def test_lines_are_read_again_in_any_order() -> None:
    scan = of(*({"id": n, "prompt": f"p{n}"} for n in range(20)))
    for index in (7, 0, 19, 7):
        item = scan.item(index)
        assert (item.key, item.task.prompt) == (index, f"p{index}")  # type: ignore[union-attr]


def test_a_limit_of_any_size_is_scanned_and_ordered() -> None:
    large = 10**30
    body = {"method": "POST", "url": "/v1/completions"}
    tasks: list[dict[str, Any]] = [{"prompt": "a"}, {"tokens": [5]}, {"messages": [{"role": "user", "content": "a"}]}]
    calls = [body | {"custom_id": str(size), "body": {"prompt": "a", "max_tokens": size}} for size in (large, -large)]
    scan = of(*(task | {"max_tokens": large} for task in tasks), *calls, {"prompt": "a"})
    assert scan.ordered(range(len(scan)))[-1] == 4
    assert sorted(item.index for item in ordered([scan.item(index) for index in range(len(scan))])) == [*range(6)]
    assert len(scanned(io.BytesIO(b'{"prompt": "a"}'), Defaults(large))) == 1


def test_duplicate_ids_are_refused() -> None:
    with pytest.raises(InputError, match=r"Lines 2 and 5 of the input both have the id 'a'"):
        of(
            {"id": "b", "prompt": "x"},
            {"id": "a", "prompt": "x"},
            b"",
            {"prompt": "x"},
            {"custom_id": "a", "input": "x"},
        )
    with pytest.raises(InputError, match=r"Lines 1 and 2 of the input both have the id '2'"):
        of({"id": 2, "prompt": "x"}, {"prompt": "x"})
    of({"id": "2", "prompt": "x"}, {"prompt": "x"})  # a text is not a number


def test_an_input_without_lines_is_refused() -> None:
    for raw in (b"", b"\n \n"):
        with pytest.raises(InputError, match="no lines"):
            scanned(io.BytesIO(raw), Defaults())


def test_scan_keeps_few_bytes_a_line() -> None:
    raw = "".join(json.dumps({"id": f"line {n}", "prompt": f"{n} " * 200}) + "\n" for n in range(3000)).encode()
    file = io.BytesIO(raw)
    tracemalloc.start()
    try:
        scan = scanned(file, Defaults())
        gc.collect()  # garbage is not kept
        used, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(scan) == 3000
    assert used < 100 * len(scan)
    assert peak < len(raw) // 4


def test_the_digest_is_of_all_bytes() -> None:
    assert of({"prompt": "a"}).digest == of({"prompt": "a"}).digest != of({"prompt": "b"}).digest
    assert of({"prompt": "a", "label": 1}).digest != of({"prompt": "a", "label": 2}).digest


def test_order_is_by_kind_prefix_and_length() -> None:
    shared = "s" * 300
    scan = of(
        {"id": "embed", "input": "x"},
        {"id": "short", "prompt": "a"},
        {"id": "shared 1", "prompt": shared + "1"},
        {"id": "score", "context": "x", "continuation": "y"},
        {"id": "long", "prompt": "b" * 900},
        {"id": "bad"},
        {"id": "shared 2", "prompt": shared + "22 and more"},
    )
    order = scan.ordered(range(len(scan)))
    keys = [scan.item(index).key for index in order]
    assert keys == ["bad", "long", "short", "shared 2", "shared 1", "score", "embed"]
    assert [item.key for item in ordered([scan.item(index) for index in range(len(scan))])] == keys
    assert scan.ordered([]) == []
    assert scan.ordered([3, 1]) == [1, 3]


RECORDS = [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "ü"}]


def read(source: Any, columns: dict[str, str] | None = None) -> list[dict[str, Any]]:
    with opened(source, columns) as file:
        first = file.read()
        file.seek(0)
        assert file.read() == first
    return [json.loads(line) for line in first.splitlines()]


def test_json_lines_are_read_in_place(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    assert read(path) == read(str(path)) == RECORDS
    with opened(path) as file:
        assert file.name == str(path)


def test_lists_generators_and_arrays() -> None:
    assert read(RECORDS) == RECORDS
    assert read(record for record in RECORDS) == RECORDS
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
    with pytest.raises(InputError, match=r"Line 2 of .* is not valid JSON"):
        read(path, {"prompt": "question"})


def test_parsed_columns() -> None:
    assert columns_of(["prompt=question", "id=a=b"]) == {"prompt": "question", "id": "a=b"}
    assert columns_of([]) is None
    for wrong in ("prompt", "nonsense=x"):
        with pytest.raises(OptionError, match="is not a mapping of columns"):
            columns_of([wrong])


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    from pyarrow.parquet import write_table

    path = tmp_path / "in.parquet"
    messages = [[{"role": "user", "content": "x"}], [{"role": "user", "content": "y"}]]
    write_table(pyarrow.table({"id": [1, 2], "messages": messages, "label": [float("nan"), 0.5]}), path)
    assert read(path) == [{"id": number, "messages": message} for number, message in enumerate(messages, 1)]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="is not a readable Parquet file"):
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
    raw = "".join(json.dumps(record) + "\n" for record in RECORDS)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw.encode())))
    assert read("-") == RECORDS
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(raw,))
    writer.start()
    assert read(pipe) == RECORDS
    writer.join()


def test_invalid_inputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        read(tmp_path / "nowhere.jsonl")
    for wrong in (5, {"prompt": "x"}):
        with pytest.raises(InputError, match="The input is of type"):
            read(wrong)
    with pytest.raises(InputError, match="Record 2 of the input is of type str"):
        read([{"prompt": "x"}, "y"])


def test_full_disk_refuses_a_spooled_input() -> None:
    class Full:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield {"prompt": "x"}
            raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match=f"cannot be stored in {tempfile.gettempdir()}"):
        read(Full())
