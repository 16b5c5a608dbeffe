"""`rabbitllm run`: its prompt as ids, from the argument and a pipe, and statistics of the answer."""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from rabbitllm.base.terminal import counted, harmless, put_fact, size
from rabbitllm.errors import OptionError
from rabbitllm.generation.request import Answer, FinishReason, Prompt
from rabbitllm.generation.template import has_template, template_ids
from rabbitllm.telemetry.passes import COMPUTE, DEQUANTIZE, NOTHING, PROMPT, READ_WAIT, UPLOAD_WAIT, PassSums

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rabbitllm.engine.streamed_model import StreamedModel
    from rabbitllm.generation.media import MediaFile

WAIT_SECONDS = 1.5
"""Time after which waiting for the pipe is reported on stderr."""
_NO_TEMPLATE = "Remove --system, or put the instruction into the prompt."


def joined(argument: str | None, piped: str | None) -> str:
    """Join the piped text and the argument, which is usually a question about it, by an empty line.

    Raises:
        OptionError: both are missing or blank.
    """
    parts = [part for part in (piped.strip("\n") if piped is not None else None, argument) if part]
    if not any(part.strip() for part in parts):
        raise OptionError(
            "There is no prompt.", 'Pass one, e.g. rabbitllm run MODEL "What is a rabbit?", or pipe one to stdin.'
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
    print("reading the prompt from stdin until it is closed …", file=sys.stderr, flush=True)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str, system: str | None = None, *, raw: bool = False) -> Any:
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
            "This model has no tokenizer, so the prompt cannot be tokenized.",
            "Put its tokenizer files into the folder with its config.json.",
        )
    if raw or not has_template(tokenizer):
        if system is not None:
            why = "--raw uses no chat template" if raw else "This model has no chat template"
            raise OptionError(f"{why}, so a system prompt is not possible.", _NO_TEMPLATE)
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    else:
        ids = _through_template(tokenizer, prompt, system)
    if not ids.shape[-1]:
        raise OptionError("The prompt has no tokens.", "Use a longer prompt.")
    return ids


def prompt_with_media(
    model: StreamedModel, text: str, system: str | None, files: Sequence[MediaFile], *, raw: bool
) -> Prompt:
    """A prompt with pictures or sounds, which come before its text.

    Args:
        model: a model with its `processor`.
        text: message of the user; with `raw` it has the model's placeholders.
        system: system prompt, or None.
        files: the pictures and sounds.
        raw: do not use the chat template.

    Raises:
        OptionError: the template rejects the messages; or a system prompt without a chat template.
        MediaError: a file cannot be used, or the model takes none of its kind.
    """
    from rabbitllm.generation.media import media_prompt, raw_media_prompt

    if raw:
        if system is not None:
            raise OptionError("--raw uses no chat template, so a system prompt is not possible.", _NO_TEMPLATE)
        return raw_media_prompt(model, text, files)

    def refused(error: Exception) -> OptionError:
        return OptionError(
            f"The model's processor refuses this: {harmless(str(error), 300)}.",
            "Use other pictures, or a shorter prompt.",
        )

    parts: list[dict[str, Any]] = [{"type": file.kind, "file": file} for file in files]
    said: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    return media_prompt(model, [*said, {"role": "user", "content": [*parts, {"type": "text", "text": text}]}], refused)


def _through_template(tokenizer: PreTrainedTokenizerBase, prompt: str, system: str | None) -> Any:
    import torch

    def refused(error: Exception) -> OptionError:
        what = "a system prompt" if system is not None else "this"
        return OptionError(
            f"The model's chat template refuses {what}: {harmless(str(error))}.",
            _NO_TEMPLATE if system is not None else "--raw uses no chat template.",
        )

    said = [{"role": "system", "content": system}] if system is not None else []
    said.append({"role": "user", "content": prompt})
    return torch.tensor([template_ids(tokenizer, said, refused)], dtype=torch.int64)


_STAGES = {READ_WAIT: "waiting for the disk", UPLOAD_WAIT: "waiting for copies", DEQUANTIZE: "dequantizing"}
_NAMES = {True: "prompt", False: "each token"}
_FINISH = {FinishReason.STOP: "end", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "interrupted"}


def put_statistics(console: Console, answer: Answer, load_seconds: float, sums: Mapping[str, PassSums]) -> None:
    """Print the time to the first token, the decode rate, and the mean pass of each kind."""
    put_fact(console, "load", f"{load_seconds:.2f} s")
    put_fact(console, "prompt", counted(answer.prompt_tokens, "token"))
    if answer.first_seconds is not None:
        put_fact(console, "first token", f"after {answer.first_seconds:.2f} s")
    rate = answer.tokens_per_second
    speed = f", {rate:.2f} a second after the first" if rate is not None else ""
    put_fact(console, "answer", f"{counted(len(answer.tokens), 'token')} in {answer.seconds:.2f} s{speed}")
    for kind, total in sums.items():
        put_fact(console, _NAMES[kind == PROMPT], _where(total))


def _where(total: PassSums) -> str:
    """The mean pass of a kind: its time, the shares of its stages, and the bytes read."""
    mean = total.wall / total.passes
    spent = {name: total.stages.get(stage, NOTHING).busy_seconds for stage, name in _STAGES.items()}
    computing = total.stages.get(COMPUTE, NOTHING).busy_seconds
    parts = {"computing": computing, **spent}
    shares = [f"{name} {seconds / total.wall:.0%}" for name, seconds in parts.items() if seconds / total.wall >= 0.005]
    rest = 1 - sum(parts.values()) / total.wall
    shares += [f"between layers {rest:.0%}"] if rest >= 0.005 else []
    read = total.disk_bytes / total.passes
    return f"{mean:.3f} s: {', '.join(shares)}, {size(round(read)) if read else 'nothing'} read"


def how_it_ended(answer: Answer, max_tokens: int, *, raw: bool = False) -> Text | None:
    """A remark on how the answer ended; None for a normal end.

    Args:
        answer: the answer.
        max_tokens: its limit of tokens.
        raw: whether an existing chat template was not used.
    """
    if answer.finish is FinishReason.STOP and not answer.text:
        advice = " without --raw, the prompt goes through the chat template" if raw else ""
        return Text(f"the first token was an end token: the answer is empty{';' * bool(advice)}{advice}", "yellow")
    if answer.finish is FinishReason.STOP:
        return None
    if answer.finish is FinishReason.CANCELLED:
        return Text(f"interrupted after {counted(len(answer.tokens), 'token')}", "yellow")
    return Text(f"stopped after {counted(max_tokens, 'token')}, the limit of --max-new-tokens", "yellow")


def answer_record(model: str, answer: Answer, load_seconds: float, where: Mapping[str, Any]) -> dict[str, Any]:
    """The answer as a dict for `json.dumps`; times in seconds.

    Args:
        model: name of the model.
        answer: the answer.
        load_seconds: time to load the model, including its split.
        where: how it was run: device, dtype, compression, split directory.
    """
    return {
        "model": model,
        "text": answer.text,
        "tokens": list(answer.tokens),
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": len(answer.tokens),
        "finish": _FINISH[answer.finish],
        "load_seconds": load_seconds,
        "first_token_seconds": answer.first_seconds,
        "seconds": answer.seconds,
        "tokens_per_second": answer.tokens_per_second,
        **where,
    }
