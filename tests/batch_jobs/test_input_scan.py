"""An input gone through once: bad lines in place, ids once, a good order."""

from __future__ import annotations

import io
import json
import tracemalloc
from typing import Any

import pytest

from rabbitllm.batch_jobs import input_scan as module
from rabbitllm.batch_jobs.input_scan import InputScan, surveyed
from rabbitllm.batch_jobs.items import Defaults, Generate, Refused
from rabbitllm.batch_jobs.order import ordered
from rabbitllm.errors import InputError


def of(*lines: bytes | dict[str, Any]) -> InputScan:
    raw = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    return surveyed(io.BytesIO(raw), Defaults())


def test_bad_lines_are_errors_in_place_with_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 64)
    found = of(
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
    items = [found.item(index) for index in range(len(found))]
    assert [item.key for item in items] == [1, 2, 4, 5, 6, 7, 8, "last"]
    said = [item.asked.message if isinstance(item.asked, Refused) else "" for item in items]
    assert said[0] == said[-1] == ""
    assert said[1].startswith("Line 2 is no JSON")
    assert "byte 12 is no UTF-8" in said[2]
    assert said[3] == "Line 5 has more than 64 bytes."
    assert "NaN" in said[4]
    assert "half of a character" in said[5]
    assert "id is a list" in said[6]
    assert isinstance(items[-1].asked, Generate)


def test_lines_are_read_again_as_they_were_in_any_order() -> None:
    found = of(*({"id": number, "prompt": f"p{number}"} for number in range(20)))
    for index in (7, 0, 19, 7):
        item = found.item(index)
        assert (item.key, item.asked.given) == (index, f"p{index}")  # type: ignore[union-attr]


def test_an_id_twice_is_refused_and_names_the_lines() -> None:
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
    of({"id": "2", "prompt": "x"}, {"prompt": "x"})  # a text is no number


def test_an_input_without_lines_is_refused() -> None:
    for raw in (b"", b"\n \n"):
        with pytest.raises(InputError, match="no lines"):
            surveyed(io.BytesIO(raw), Defaults())


def test_what_is_kept_of_a_line_is_some_tens_of_bytes() -> None:
    raw = "".join(json.dumps({"id": f"line {n}", "prompt": f"{n} " * 200}) + "\n" for n in range(3000)).encode()
    file = io.BytesIO(raw)
    tracemalloc.start()
    try:
        found = surveyed(file, Defaults())
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 3000
    assert held < 100 * len(found)
    assert peak < len(raw) // 4


def test_the_digest_is_of_all_bytes() -> None:
    assert of({"prompt": "a"}).digest == of({"prompt": "a"}).digest != of({"prompt": "b"}).digest
    assert of({"prompt": "a", "label": 1}).digest != of({"prompt": "a", "label": 2}).digest


def test_the_order_is_by_kind_then_what_begins_alike_then_the_longest_first() -> None:
    shared = "s" * 300
    found = of(
        {"id": "embed", "input": "x"},
        {"id": "short", "prompt": "a"},
        {"id": "shared 1", "prompt": shared + "1"},
        {"id": "score", "context": "x", "continuation": "y"},
        {"id": "long", "prompt": "b" * 900},
        {"id": "bad"},
        {"id": "shared 2", "prompt": shared + "22 and more"},
    )
    order = found.ordered(range(len(found)))
    keys = [found.item(index).key for index in order]
    assert keys == ["bad", "long", "short", "shared 2", "shared 1", "score", "embed"]
    assert [item.key for item in ordered([found.item(index) for index in range(len(found))])] == keys
    assert found.ordered([]) == []
    assert found.ordered([3, 1]) == [1, 3]
