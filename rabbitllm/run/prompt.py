"""The prompt of `rabbitllm run`: from the argument and a pipe, as text or through the chat template, as ids."""

from __future__ import annotations

import os
import stat
import sys
import threading
from typing import Any

from rabbitllm.errors import OptionError
from rabbitllm.generation.template import has_template, template_ids

WAIT_SECONDS = 1.5
"""Time after which waiting for the pipe is reported on stderr."""
_NO_TEMPLATE = "Leave --system out, or put the instruction into the prompt."


def joined(argument: str | None, piped: str | None) -> str:
    """Join the piped text and the argument, which is usually a question about it, by an empty line.

    Raises:
        OptionError: both are missing or blank.
    """
    parts = [part for part in (piped.strip("\n") if piped is not None else None, argument) if part]
    if not any(part.strip() for part in parts):
        raise OptionError(
            "There is no prompt.", 'Give one: rabbitllm run MODEL "What is a rabbit?"; or pipe one into it.'
        )
    return "\n\n".join(parts)


def piped_text() -> str | None:
    """The text piped or redirected into this process, or None. Prints a note to stderr if it has to wait."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # no stdin, or a replacement by a test
        return None
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind)):
        return None
    note = threading.Timer(WAIT_SECONDS, _say_waiting)
    note.daemon = True
    note.start()
    try:
        return sys.stdin.buffer.read().decode("utf-8", "replace")
    finally:
        note.cancel()


def _say_waiting() -> None:
    print("reading the prompt from the pipe, until it ends …", file=sys.stderr, flush=True)


def prompt_ids(tokenizer: Any, prompt: str, system: str | None = None, *, raw: bool = False) -> Any:
    """The ids of a prompt, int64 of shape (1, tokens).

    Args:
        tokenizer: tokenizer of the model.
        prompt: message of the user.
        system: system prompt, or None.
        raw: do not use the chat template.

    Raises:
        OptionError: no tokenizer; a system prompt without a chat template; the template rejects the messages; or the
            prompt has no tokens.
    """
    if tokenizer is None:
        raise OptionError(
            "This model has no tokenizer, so text cannot be made of it.",
            "Put its tokenizer files into the folder that has its config.json.",
        )
    if raw or not has_template(tokenizer):
        if system is not None:
            why = "--raw leaves the chat template out" if raw else "This model has no chat template"
            raise OptionError(f"{why}, so there is no place for a system prompt.", _NO_TEMPLATE)
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    else:
        ids = _through_template(tokenizer, prompt, system)
    if not ids.shape[-1]:
        raise OptionError("The prompt has no tokens.", "Give a longer one.")
    return ids


def _through_template(tokenizer: Any, prompt: str, system: str | None) -> Any:
    import torch

    def refused(why: str) -> OptionError:
        what = "a system prompt" if system is not None else "this"
        return OptionError(
            f"The model's chat template does not take {what}: {why}.",
            _NO_TEMPLATE if system is not None else "--raw does without it.",
        )

    said = [{"role": "system", "content": system}] if system is not None else []
    said.append({"role": "user", "content": prompt})
    return torch.tensor([template_ids(tokenizer, said, refused)], dtype=torch.int64)
