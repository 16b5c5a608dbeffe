"""An immutable record of a conversation.

A conversation is a system prompt and exchanges, each a question with its answer. So roles always alternate, as most
chat templates require; a question without an answer is not part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SYSTEM = "system"
USER = "user"
ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question and its answer, which may be incomplete.

    Attributes:
        question: text of the user.
        answer: text of the model.
        stopped: whether the answer was stopped before its end.
    """

    question: str
    answer: str
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt and the exchanges since, oldest first.

    Attributes:
        system: the system prompt, or None.
        exchanges: the exchanges, oldest first.
    """

    system: str | None = None
    exchanges: tuple[Exchange, ...] = ()

    def with_system(self, system: str | None) -> Conversation:
        """The same exchanges below another system prompt; None or white space for none."""
        return replace(self, system=system if system and system.strip() else None)

    def with_exchange(self, exchange: Exchange) -> Conversation:
        """A copy with one more exchange at its end."""
        return replace(self, exchanges=(*self.exchanges, exchange))

    def without_oldest(self, count: int) -> Conversation:
        """A copy without its first `count` exchanges."""
        return replace(self, exchanges=self.exchanges[count:])

    def emptied(self) -> Conversation:
        """The system prompt alone."""
        return replace(self, exchanges=())

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """Messages for a chat template: dicts with `role` and `content`.

        Args:
            question: a question without an answer, appended as the last message; None for none.
        """
        found = [{"role": SYSTEM, "content": self.system}] if self.system is not None else []
        for exchange in self.exchanges:
            found += [{"role": USER, "content": exchange.question}, {"role": ASSISTANT, "content": exchange.answer}]
        return found if question is None else [*found, {"role": USER, "content": question}]
