"""What /stats shows, as text. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from rabbitllm.base.terminal import counted, put_fact, size
from rabbitllm.generation.session import ChatAnswer
from rabbitllm.generation.work import PLACES, AnswerWork


@dataclass(frozen=True, slots=True)
class Totals:
    """All answers together.

    Attributes:
        answers: how many.
        tokens, prompt_tokens, kept_tokens, seconds, work: sums of what `ChatAnswer` has.
        further_tokens, further_seconds: generated after each first token, and how long that took.
    """

    answers: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    kept_tokens: int = 0
    seconds: float = 0.0
    further_tokens: int = 0
    further_seconds: float = 0.0
    work: AnswerWork = field(default_factory=AnswerWork)

    def plus(self, answer: ChatAnswer) -> Totals:
        """With one more."""
        return Totals(
            self.answers + 1,
            self.tokens + answer.tokens,
            self.prompt_tokens + answer.prompt_tokens,
            self.kept_tokens + answer.kept_tokens,
            self.seconds + answer.seconds,
            self.further_tokens + max(answer.tokens - 1, 0),
            self.further_seconds + (answer.seconds - answer.first if answer.tokens > 1 else 0.0),
            self.work.plus(answer.work),
        )

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first ones; None where there was no further one."""
        return self.further_tokens / self.further_seconds if self.further_tokens and self.further_seconds else None


@dataclass(frozen=True, slots=True)
class CacheState:
    """The KV cache as it is now.

    Attributes:
        kept: whether it is kept between answers.
        tokens: in it.
        nbytes: that it takes.
        context: tokens that the model has room for; None without a limit.
    """

    kept: bool
    tokens: int
    nbytes: int
    context: int | None


def show_stats(
    console: Console, last: ChatAnswer | None, totals: Totals, cache: CacheState, in_place: Mapping[str, int]
) -> None:
    """Print them.

    Args:
        console: where to.
        last: the last answer; None before the first.
        totals: of all answers.
        cache: as it is now.
        in_place: "device tier" -> bytes that each pass uses where they are.
    """
    if last is None:
        put_fact(console, "answers", "none yet")
    else:
        console.print(Text("last answer", "bold"))
        put_fact(console, "  first token", _duration(last.first))
        _show(console, last.tokens, last.rate, last.prompt_tokens, last.kept_tokens, last.work)
        if totals.answers > 1:
            console.print(Text(f"all {totals.answers:,} answers", "bold"))
            put_fact(console, "  time", _duration(totals.seconds))
            _show(console, totals.tokens, totals.rate, totals.prompt_tokens, totals.kept_tokens, totals.work)
    for place, nbytes in in_place.items():
        put_fact(console, "in place", f"{size(nbytes)} {place}, used by each pass without being moved")
    of = f" of {cache.context:,}" if cache.context is not None else ""
    held = f"{cache.tokens:,}{of} tokens, {size(cache.nbytes)}"
    put_fact(console, "KV cache", held if cache.kept else "not kept: of this kind of model it cannot go on exactly")


def _show(console: Console, tokens: int, rate: float | None, prompt: int, kept: int, work: AnswerWork) -> None:
    put_fact(console, "  generated", counted(tokens, "token") + (f", {rate:,.2f} a second" if rate else ""))
    put_fact(console, "  prompt", f"{counted(prompt, 'token')}: {kept:,} kept in the cache, {prompt - kept:,} computed")
    put_fact(console, "  passes", f"{work.passes:,}, with {counted(work.tokens, 'token')} altogether")
    moved = [f"{size(work.moved[stage])} {where}" for stage, where in PLACES.items() if stage in work.moved]
    put_fact(console, "  moved", ", ".join(moved) if moved else "nothing: all weights stay where they are used")
    if work.experts:
        found = ", ".join(f"{count:,} {where.removeprefix('experts ')}" for where, count in work.experts.items())
        put_fact(console, "  experts", found)


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
