"""The installed version of transformers, and errors for parts of it that have changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from packaging.version import Version

from rabbitllm.base.terminal import error_line
from rabbitllm.errors import MissingPackageError
from rabbitllm.version import TRANSFORMERS

TESTED = f"transformers~={TRANSFORMERS[1]}.0"
"""The newest tested version, as pip reads it."""


def version_of(package: str) -> str | None:
    """The installed version of a package, which is not imported; None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed_version() -> str:
    """The installed version of transformers, which is not imported."""
    return metadata.version("transformers")


def newer_than_tested() -> bool:
    """Whether the installed version is newer than the tested ones."""
    return Version(installed_version()).release[:2] > Version(TRANSFORMERS[1]).release


@contextmanager
def checked_parts() -> Iterator[None]:
    """A context for imports of private parts of transformers, and for `check_call`.

    Raises:
        MissingPackageError: a part is missing, or is called otherwise.
    """
    try:
        yield
    except (ImportError, AttributeError, TypeError) as error:
        raise changed_part(error) from error


def changed_part(error: Exception) -> MissingPackageError:
    """The error for a part that has changed, by the error that shows it."""
    return MissingPackageError(
        f"transformers {installed_version()} has changed a part that RabbitLLM uses: {error_line(error)}",
        f'Install a tested version: pip install "{TESTED}".',
    )


def check_call(function: Callable[..., Any], *args: str, **kwargs: str) -> None:
    """Check that a function takes these arguments, which stand for values.

    Raises:
        TypeError: it does not.
    """
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{function.__qualname__}: {error}") from None
