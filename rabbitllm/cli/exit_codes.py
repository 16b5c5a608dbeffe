"""What the exit code of a command means; the same for all of them."""

from __future__ import annotations

SUCCESS = 0
ERROR = 1
"""A `RabbitLLMError`, or a negative answer: a damaged split, a demo that failed, a dry run that does not fit."""
USAGE = 2
"""Arguments that do not exist, do not go together or have no possible value (an `OptionError`)."""
INTERRUPTED = 130
"""Ctrl-C, as shells count it."""
BROKEN_PIPE = 141
"""The reader of the output is gone (`| head`), as shells count it."""

EPILOG = (
    "MODEL is a repository (organisation/name or hf://organisation/name), a folder, a file of weights or a split "
    "directory. Exit codes: 0 done, 1 an error or a negative answer, 2 wrong arguments, 130 interrupted, 141 the "
    "reader of the output is gone."
)
