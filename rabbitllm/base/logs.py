"""Sends the package's log records to stderr or a file, by the environment: `RABBITLLM_LOG=LEVEL` or `LEVEL:FILE`.

Without that variable nothing is set up, as usual for a library: warnings appear by Python's own rules, and a program
that sets up logging receives the records of the logger "rabbitllm" like any other.
"""

from __future__ import annotations

import functools
import logging
import sys
from pathlib import Path
from typing import Any

VARIABLE = "RABBITLLM_LOG"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
SHORT_FORMAT = "%(asctime)s %(message)s"
TIME = "%H:%M:%S"
FILE_TIME = "%Y-%m-%d %H:%M:%S"


def set_up(value: str) -> None:
    """Set up logging by the variable; an invalid value is reported on stderr, and otherwise ignored.

    Args:
        value: of the variable: "debug", "info", "warning" or "error"; after a colon a file, which is appended to.
    """
    level, _, file = value.partition(":")
    name = level.strip().lower()
    if name not in LEVELS:
        print(
            f"{VARIABLE}={value} has no effect: it takes {', '.join(LEVELS)}, and after a colon a file.",
            file=sys.stderr,
        )
        return
    try:
        handler = _handler(file.strip())
    except OSError as error:
        print(f"{VARIABLE}={value}: {file.strip()} cannot be written to ({error.strerror}).", file=sys.stderr)
        handler = _handler("")
    logger = logging.getLogger("rabbitllm")
    for old in [old for old in logger.handlers if getattr(old, "of_the_environment", False)]:
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
    logger.setLevel(LEVELS[name])
    logger.propagate = False  # else a program that logs to stderr too would print everything twice


def show(name: str) -> None:
    """Print the records of one of the package's loggers on stderr from INFO on, unless the environment sets up logging.

    Args:
        name: of the logger.
    """
    logger = logging.getLogger(name)
    if any(getattr(old, "of_the_environment", False) for old in logging.getLogger("rabbitllm").handlers):
        return
    if not any(isinstance(old, _ToStderr) for old in logger.handlers):
        handler = _ToStderr()
        handler.setFormatter(logging.Formatter(SHORT_FORMAT, TIME))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


@functools.cache
def warn_once(logger: logging.Logger, text: str, *arguments: object) -> None:
    """Log a warning, unless the same was logged before; the arguments must be hashable."""
    logger.warning(text, *arguments)


def _handler(file: str) -> logging.Handler:
    handler: Any = logging.FileHandler(Path(file).expanduser(), encoding="utf-8") if file else _ToStderr()
    handler.setFormatter(logging.Formatter(FORMAT, FILE_TIME if file else TIME))
    handler.of_the_environment = True
    return handler  # type: ignore[no-any-return]


class _ToStderr(logging.StreamHandler[Any]):
    """Writes to the current `sys.stderr`, which may change after this was created."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        raise AttributeError("this handler follows sys.stderr")
