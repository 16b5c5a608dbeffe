"""What was said, as a record."""

from __future__ import annotations

from rabbitllm.chat.conversation import Conversation, Exchange

FIRST, SECOND = Exchange("Hello?", "Hello."), Exchange("More?", "A lo", stopped=True)


def test_messages_take_turns() -> None:
    talk = Conversation("Be brief.").with_exchange(FIRST).with_exchange(SECOND)
    assert [message["role"] for message in talk.messages("And?")] == [
        *("system", "user", "assistant", "user", "assistant", "user"),
    ]
    assert [message["content"] for message in talk.messages()] == ["Be brief.", "Hello?", "Hello.", "More?", "A lo"]
    assert Conversation().messages("And?") == [{"role": "user", "content": "And?"}]


def test_forgetting_keeps_the_system_prompt() -> None:
    talk = Conversation("Be brief.", (FIRST, SECOND, FIRST))
    assert talk.without_oldest(1) == Conversation("Be brief.", (SECOND, FIRST))
    assert talk.without_oldest(7) == talk.emptied() == Conversation("Be brief.")


def test_a_blank_system_prompt_is_none() -> None:
    assert Conversation("Be brief.").with_system(" \n").system is None
    assert Conversation().with_system("Rhyme.").system == "Rhyme."
