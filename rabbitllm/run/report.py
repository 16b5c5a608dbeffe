"""Statistics of an answer, as text on stderr and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from rabbitllm.base.terminal import counted, put_fact, size
from rabbitllm.generation.answer import END, INTERRUPTED, Answer
from rabbitllm.telemetry.passes import PROMPT, PassSums
from rabbitllm.telemetry.totals import COMPUTE, DEQUANTIZE, NOTHING, READ_WAIT, UPLOAD_WAIT

_STAGES = {READ_WAIT: "waiting for the disk", UPLOAD_WAIT: "waiting for copies", DEQUANTIZE: "dequantizing"}
_NAMES = {True: "prompt", False: "each token"}


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
    if answer.finish == END and not answer.text:
        advice = " without --raw the prompt goes through the chat template" if raw else ""
        return Text(f"the first token ended the text: the answer is empty{';' * bool(advice)}{advice}", "yellow")
    if answer.finish == END:
        return None
    if answer.finish == INTERRUPTED:
        return Text(f"interrupted after {counted(len(answer.tokens), 'token')}", "yellow")
    return Text(f"cut off after {counted(max_tokens, 'token')}; --max-new-tokens allows more", "yellow")


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
        "finish": answer.finish,
        "load_seconds": load_seconds,
        "first_token_seconds": answer.first_seconds,
        "seconds": answer.seconds,
        "tokens_per_second": answer.tokens_per_second,
        **where,
    }
