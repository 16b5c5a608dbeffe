"""`rabbitllm run`: one prompt to a model, and its answer; also by several processes with some of the layers each."""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from rabbitllm.auto_model import LoadRequest, load
from rabbitllm.base.options import Hosts
from rabbitllm.base.plain_json import fields_of
from rabbitllm.base.terminal import counted, harmless, put_fact, size
from rabbitllm.errors import OptionError
from rabbitllm.generation.media import MediaFile
from rabbitllm.generation.reasoning import Thinking, Thoughts, thoughts_note
from rabbitllm.generation.request import FinishReason, ModelLimits, Prompt, Result
from rabbitllm.generation.template import SYSTEM, USER, ChatTemplate, PromptRefused
from rabbitllm.telemetry.passes import BETWEEN_LAYERS, COMPUTE, DEQUANTIZE, PROMPT, READ_WAIT, UPLOAD_WAIT, PassSums

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

WAIT_SECONDS = 1.5
"""Time after which waiting for the pipe is reported on stderr."""
_NO_SYSTEM = "Remove --system, or put the instruction into the prompt."


def decode_argument(text: str | None) -> str | None:
    """Text of the command line, read as UTF-8 where the locale has another encoding or none; None stays None."""
    if text is None or text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text):
        return text
    return os.fsencode(text).decode("utf-8", "replace")


def join_prompt(argument: str | None, piped: str | None) -> str:
    """Join the piped text and the argument, which is usually a question about it, by an empty line.

    Raises:
        OptionError: both are missing or blank.
    """
    parts = [part for part in (piped.strip("\n") if piped is not None else None, decode_argument(argument)) if part]
    if not any(part.strip() for part in parts):
        raise OptionError(
            "There is no prompt.", 'Pass one, e.g. rabbitllm run MODEL "What is a rabbit?", or pipe one to stdin.'
        )
    return "\n\n".join(parts)


def piped_text() -> str | None:
    """The text piped or redirected into this process, or None. Prints a note to stderr if it has to wait."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # no stdin, or a replacement by a test
        return None
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        return None
    waiting = "reading the prompt from stdin until it is closed …"
    note = threading.Timer(WAIT_SECONDS, print, (waiting,), {"file": sys.stderr, "flush": True})
    note.daemon = True
    note.start()
    try:
        return sys.stdin.buffer.read().decode("utf-8", "replace")
    finally:
        note.cancel()


def prompt_of(
    model: StreamedModel,
    text: str,
    system: str | None = None,
    files: Sequence[MediaFile] = (),
    thinking: Thinking = Thinking(),  # noqa: B008  immutable
    *,
    raw: bool = False,
) -> tuple[Prompt, Thoughts | None]:
    """A prompt of text, pictures and sounds, which come before the text; and how the reasoning after it is marked.

    Args:
        model: a model with its `tokenizer`.
        text: message of the user; with `raw` it has the model's own placeholders for pictures and sounds.
        system: system prompt, or None.
        files: the pictures and sounds.
        thinking: whether the model thinks, and how much.
        raw: do not use the chat template.

    Raises:
        OptionError: no tokenizer; a system prompt or `thinking` without a chat template that reads it; the template or
            the processor refuses the messages; or the prompt has no tokens.
        MediaError: a file cannot be used, or the model takes none of its kind.
    """
    template = ChatTemplate(model)
    is_raw = raw or not (files or template.is_there)
    if is_raw and system is not None:
        why = "--raw uses no chat template" if raw else "This model has no chat template"
        raise OptionError(f"{why}, so a system prompt is not possible.", _NO_SYSTEM)
    if raw and thinking != Thinking():
        raise OptionError("--raw uses no chat template, so thinking cannot be set.", "Remove --raw, or that option.")
    variables = template.thinking(thinking)
    parts: list[dict[str, Any]] = [{"type": file.kind, "file": file} for file in files]
    messages: list[dict[str, Any]] = [{"role": SYSTEM, "content": system}] if system is not None else []
    messages.append({"role": USER, "content": [*parts, {"type": "text", "text": text}] if files else text})
    try:
        prompt = template.raw(text, files) if is_raw else template.prompt(messages, **variables)
    except PromptRefused as error:
        remedy = _NO_SYSTEM if system is not None else "Use --raw, which uses no chat template."
        if error.by_processor:
            remedy = "Use other pictures, or a shorter prompt."
            if raw:
                holder = getattr(model.processor, "image_token", "…")
                remedy = f"--raw needs one placeholder ({holder}) for each picture in the prompt."
        refused = "a system prompt" if system is not None and not error.by_processor else "this prompt"
        raise OptionError(
            f"The model's {error.program} refuses {refused}: {harmless(str(error), 300)}.", remedy
        ) from error
    if not prompt.ids:
        raise OptionError("The prompt has no tokens.", "Use a longer prompt.")
    return prompt, None if is_raw else template.thoughts(prompt.ids)


_STAGES = {
    COMPUTE: "computing",
    READ_WAIT: "waiting for the disk",
    UPLOAD_WAIT: "waiting for copies",
    DEQUANTIZE: "dequantizing",
    BETWEEN_LAYERS: BETWEEN_LAYERS,
}
_FINISH = {FinishReason.STOP: "end", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "interrupted"}


def put_statistics(
    console: Console, result: Result, load_seconds: float, sums: Mapping[str, PassSums], sampling: str
) -> None:
    """Print how tokens were chosen, the time to the first token, the decode rate, and the mean pass of each kind."""
    put_fact(console, "sampling", sampling)
    put_fact(console, "load", f"{load_seconds:.2f} s")
    put_fact(console, "prompt", counted(result.prompt_tokens, "token"))
    if result.first_seconds is not None:
        put_fact(console, "first token", f"after {result.first_seconds:.2f} s")
    rate = result.tokens_per_second
    speed = f", {rate:.2f} a second after the first" if rate is not None else ""
    thoughts = f", {result.reasoning_tokens:,} of them thoughts" if result.reasoning_tokens else ""
    put_fact(console, "answer", f"{counted(len(result.tokens), 'token')}{thoughts} in {result.seconds:.2f} s{speed}")
    if result.work.drafts is not None:
        put_fact(console, "drafts", result.work.drafts.words())
    if result.forced_tokens:
        put_fact(console, "grammar", f"{counted(result.forced_tokens, 'forced token')} without a pass")
    for pass_kind, total in sums.items():
        further = max(len(result.tokens) - 1, 0) / total.passes
        if pass_kind == PROMPT or further <= 1:
            put_fact(console, "prompt" if pass_kind == PROMPT else "each token", _pass_of(total))
        else:  # a draft model
            put_fact(console, "each pass", f"{further:.1f} tokens in {_pass_of(total)}")


def _pass_of(total: PassSums) -> str:
    """The mean pass of a kind: its time, the shares of its stages, and the bytes read."""
    mean, seconds = total.wall / total.passes, total.caller_seconds
    shares = {name: seconds.get(stage, 0.0) / mean for stage, name in _STAGES.items()}
    shown = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    read = round(total.disk_bytes / total.passes)
    return f"{mean:.3f} s: {shown}, {size(read) if read else 'nothing'} read"


def finish_note(
    result: Result, max_tokens: int, limits: ModelLimits | None = None, *, raw: bool = False, less_thinking: str = ""
) -> Text | None:
    """A remark on how the answer ended; None for a normal end.

    Args:
        result: the answer.
        max_tokens: its limit of tokens.
        limits: bounds of the model.
        raw: whether an existing chat template was not used.
        less_thinking: see `ChatTemplate`.
    """
    match result.finish:
        case FinishReason.STOP if result.text:
            return None
        case FinishReason.STOP if result.reasoning:
            note = "the model ended after its thoughts: the answer is empty"
        case FinishReason.STOP:
            advice = "; without --raw, the prompt goes through the chat template" if raw else ""
            note = f"the first token was an end token: the answer is empty{advice}"
        case FinishReason.CANCELLED:
            note = f"interrupted after {counted(len(result.tokens), 'token')}"
        case _:
            limit, is_full = "the limit of --max-new-tokens", False
            context = limits.context if limits is not None else None
            if limits is not None and context is not None and result.prompt_tokens + max_tokens >= context:
                whose = "the" if limits.is_set else "the model's"
                is_full = True
                limit = f"where {whose} context of {context:,} tokens ends"
            note = f"stopped after {counted(max_tokens, 'token')}, {limit}"
            if result.is_cut_off_in_thoughts:
                note = thoughts_note(max_tokens, less_thinking, is_full=is_full)
    return Text(note, "yellow")


def answer_record(model: str, result: Result, load_seconds: float, where: Mapping[str, Any]) -> dict[str, Any]:
    """The answer as a dict for `json.dumps`; times in seconds.

    Args:
        model: name of the model.
        result: the answer.
        load_seconds: time to load the model, including its split.
        where: how it was run: device, dtype, compression, split directory.
    """
    return {
        "model": model,
        **fields_of(result, "text", "reasoning"),
        "tokens": list(result.tokens),
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.tokens),
        "reasoning_tokens": result.reasoning_tokens,
        "finish": _FINISH[result.finish],
        "load_seconds": load_seconds,
        "first_token_seconds": result.first_seconds,
        **fields_of(result, "seconds", "tokens_per_second"),
        **where,
    }


def hosts_for(
    workers: int, address: str | None, model: str, console: Console, environment: Mapping[str, str] = os.environ
) -> Hosts | None:
    """The processes that compute a model together; None if this one computes it alone.

    Args:
        workers: number of workers to wait for; 0 to use torchrun's environment if there is one.
        address: address of this process for the workers.
        model: name of the model and options for the workers, as words of a command line.
        console: console for the command to start a worker.
        environment: environment variables of this process.

    Raises:
        OptionError: an address without workers, or workers without an address.
    """
    if bool(workers) != (address is not None):
        raise OptionError(
            "--workers and --address must be used together.", "Example: --workers 1 --address 192.168.1.5:29500."
        )
    if address is None:
        return Hosts.of_torchrun(environment)

    def announce(reached: str) -> None:
        start = f"rabbitllm worker {model} --join {reached}"
        console.print(f"waiting for {counted(workers, 'worker')}: {start}", soft_wrap=True, markup=False)

    return Hosts(address, workers, announce=announce)


def local_device(device: str | None, hosts: Hosts | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The device of this process; those that torchrun started on one machine get a GPU each."""
    local = environment.get("LOCAL_RANK", "")
    if device is not None or hosts is None or hosts.rank is None or not local.isdigit():
        return device
    import torch

    return f"cuda:{local}" if int(local) < torch.cuda.device_count() else None


def work(request: LoadRequest, console: Console) -> None:
    """Compute a span of layers until the first process ends.

    Args:
        request: the model and the hosts.
        console: console for messages.

    Raises:
        RabbitLLMError: as `load` does; or another process ended unexpectedly.
    """
    worker: Any = load(request, console)
    span = worker.span
    console.print(f"ready: layers {span.begin + 1} to {span.end}, of {len(worker.names)} hosts")
    console.print(str(worker.model.placement), markup=False)
    worker.work()
    console.print(f"the first process has ended; {worker.passes:,} passes")
