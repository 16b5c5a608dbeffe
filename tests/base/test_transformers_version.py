"""Which versions of transformers are newer than the tested ones, and errors for parts that have changed."""

from __future__ import annotations

from importlib import metadata

import pytest

from rabbitllm.base.transformers_version import TESTED, check_call, checked_parts, newer_than_tested
from rabbitllm.errors import MissingPackageError
from rabbitllm.version import TRANSFORMERS

MAJOR, MINOR = map(int, TRANSFORMERS[1].split("."))


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        (f"{TRANSFORMERS[0]}.0", False),
        (f"{TRANSFORMERS[1]}.0", False),
        (f"{TRANSFORMERS[1]}.7", False),
        (f"{MAJOR}.{MINOR + 1}.0", True),
        (f"{MAJOR}.{MINOR + 1}.0.dev0", True),
        (f"{MAJOR + 1}.0.0", True),
    ],
)
def test_a_release_after_the_tested_one_is_newer(monkeypatch: pytest.MonkeyPatch, version: str, newer: bool) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert newer_than_tested() is newer


def take(key: str, *, prefix: str = "") -> None:
    """A function with a signature."""


def test_calls_that_a_function_takes() -> None:
    with checked_parts():
        check_call(take, "key")
        check_call(take, "key", prefix="prefix")


@pytest.mark.parametrize("arguments", [(), ("key", "prefix")])
def test_a_call_that_a_function_does_not_take(arguments: tuple[str, ...]) -> None:
    message = "has changed a part that RabbitLLM uses: TypeError: take: "
    with pytest.raises(MissingPackageError, match=message) as error, checked_parts():
        check_call(take, *arguments)
    assert TESTED in error.value.remedy


def test_an_import_of_a_part_that_is_missing() -> None:
    with pytest.raises(MissingPackageError, match="cannot import name 'dumped'"), checked_parts():
        from json import dumped  # type: ignore[attr-defined]  # noqa: F401
