"""The meaning of exit codes, the same for all commands."""

from __future__ import annotations

from rabbitllm.base import interrupts

SUCCESS = 0
ERROR = 1
"""A `RabbitLLMError`, or a negative answer: a damaged split, a demo that failed, a dry run that does not fit, a batch
whose lines all failed."""
USAGE = 2
"""Arguments that do not exist, exclude each other or have an invalid value (an `OptionError`)."""
INTERRUPTED = interrupts.INTERRUPTED
"""Ctrl-C, by the convention of shells."""
BROKEN_PIPE = 141
"""The reader of the output has ended (`| head`), by the convention of shells."""

EPILOG = """\
MODEL is a repository (organisation/name or hf://organisation/name), a folder, a file of weights or a split directory. \
`rabbitllm COMMAND --help` shows options and examples.

Exit codes:
  0    success
  1    error, or a negative result
  2    wrong arguments
  130  interrupted (Ctrl-C)
  141  output closed (`| head`)"""
