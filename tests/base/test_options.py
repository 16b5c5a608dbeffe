"""What a caller may pass, what it means, and what is said about the rest."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.base.options import (
    RunOptions,
    ShardPolicy,
    SplitOptions,
    arguments_checked,
    expand,
    parse_max_memory,
    parse_size,
)
from rabbitllm.errors import OptionError, RabbitLLMError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (57, 57),
        ("57", 57),
        ("57B", 57),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("57GiB", 57 * 2**30),
        ("60GB", 60 * 10**9),
        ("15 GB", 15 * 10**9),
        ("  1.5 MiB ", 3 * 2**19),
        ("0.5TB", 5 * 10**11),
        ("2tib", 2**41),
        ("3gb", 3 * 10**9),
        ("3gib", 3 * 2**30),
        ("50G", 50 * 10**9),
        ("50 gi", 50 * 2**30),
        ("512M", 512 * 10**6),
    ],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text, "max_disk") == size


@pytest.mark.parametrize(
    "text", [-1, True, 1.5, None, "", "GiB", "-5GB", "5 parsecs", "1e9", "5P", "5GB free", "0x10", "1,5GB", b"5GB", [5]]
)
def test_invalid_sizes(text: Any) -> None:
    with pytest.raises(OptionError) as refused:
        parse_size(text, "max_disk")
    assert f"max_disk={text!r} is not a size" in str(refused.value)
    assert "'50GB'" in str(refused.value)
    assert isinstance(refused.value, ValueError)
    assert isinstance(refused.value, RabbitLLMError)


@given(st.integers(min_value=0, max_value=2**60))
def test_bytes_are_parsed_exactly(size: int) -> None:
    assert parse_size(size, "x") == parse_size(f"{size / 2**10}KiB" if size < 2**50 else size, "x") == size


def test_limits_of_memory() -> None:
    limits = parse_max_memory({0: "15GiB", "1": 10, "cuda:2": "1KB", "cpu": "24GiB"})
    assert limits == {"cuda:0": 15 * 2**30, "cuda:1": 10, "cuda:2": 1000, "cpu": 24 * 2**30}
    assert parse_max_memory(None) is None
    assert parse_max_memory({}) == {}


@pytest.mark.parametrize("key", ["disk", "cuda", "cuda:", "cuda:x", "gpu0", "", "CPU", -1])
def test_limit_of_an_unknown_device(key: Any) -> None:
    with pytest.raises(OptionError) as refused:
        parse_max_memory({key: 5})
    assert f"max_memory names the device {key!r}" in str(refused.value)


def test_limit_without_a_device() -> None:
    wrong: Any = "24GiB"
    with pytest.raises(OptionError, match=r"(?s)'24GiB' names no device.*\{'cpu': '24GiB'\}, or \{0: "):
        parse_max_memory(wrong)


def test_invalid_limit_names_its_device() -> None:
    with pytest.raises(OptionError, match=r"max_memory\['cpu'\]='lots' is not a size"):
        parse_max_memory({"cpu": "lots"})


@arguments_checked({"device_map": "Use device."}, ["delete_original"])
def called(model: str, compression: str = "", *, delete_original: bool = False, device: str = "cpu") -> str:
    return f"{model} {compression} {device}"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("compresion", "Did you mean 'compression'?"),
        ("device_map", "Use device."),
        ("delete_orignal", "Its documentation lists the arguments."),
        ("zzz", "Its documentation lists the arguments."),
    ],
)
def test_unknown_argument_gets_advice(name: str, advice: str) -> None:
    with pytest.raises(TypeError) as refused:
        called("x", **{name: True})  # type: ignore[arg-type]
    assert str(refused.value) == f"called() got an unexpected keyword argument '{name}'. {advice}"


def test_known_arguments_pass() -> None:
    assert called("x", "4bit", device="cuda") == "x 4bit cuda"


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert expand("~/models") == Path("/somewhere/models")
    assert expand(Path("models")) == Path("models")
    with pytest.raises(OptionError, match="there is no such home folder"):
        expand("~a-user-that-is-not-here/models")


@pytest.mark.parametrize("options", [SplitOptions(), RunOptions()])
def test_options_are_frozen(options: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.profiling = True


def test_shard_policy_of_arguments() -> None:
    for sequential, delete, keep in itertools.product([False, True], repeat=3):
        policy = ShardPolicy.of(sequential=sequential, delete_original=delete, keep_fetched=keep)
        assert (policy.deletes_used, policy.deletes_rest) == (sequential, delete)
        assert policy.takes_one_at_a_time == (sequential or not keep)
        assert policy.deletes_original == (sequential or delete)


def test_default_is_the_standard_route_and_keeps_the_original() -> None:
    options = SplitOptions()
    assert (options.shards, options.compression) == (ShardPolicy.KEEP, None)
