"""What was said so far, as a record. Knows no tokenizers, no files and no terminal.

A conversation is a system prompt and exchanges, each a question with its answer: so roles always take turns, as most
chat templates demand, and a question that got no answer is not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SYSTEM = "system"
USER = "user"
ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and what came of the answer.

    Attributes:
        question: of the user.
        answer: of the model, as it came.
        stopped: whether the answer was stopped before its end.
    """

    question: str
    answer: str
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt and what was said since, oldest first.

    Attributes:
        system: None without one.
        exchanges: each with an answer.
    """

    system: str | None = None
    exchanges: tuple[Exchange, ...] = ()

    def with_system(self, system: str | None) -> Conversation:
        """The same exchanges below another system prompt; None or white space for none."""
        return replace(self, system=system if system and system.strip() else None)

    def with_exchange(self, exchange: Exchange) -> Conversation:
        """With one more at its end."""
        return replace(self, exchanges=(*self.exchanges, exchange))

    def without_oldest(self, count: int) -> Conversation:
        """Without so many of its first exchanges; without any if it has no more than that."""
        return replace(self, exchanges=self.exchanges[count:])

    def emptied(self) -> Conversation:
        """The system prompt alone."""
        return replace(self, exchanges=())

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """What chat templates take: role and content of everything said, and of a question that is yet to be answered.

        Args:
            question: the last message; None for what was said alone.
        """
        found = [{"role": SYSTEM, "content": self.system}] if self.system is not None else []
        for exchange in self.exchanges:
            found += [{"role": USER, "content": exchange.question}, {"role": ASSISTANT, "content": exchange.answer}]
        return found if question is None else [*found, {"role": USER, "content": question}]
