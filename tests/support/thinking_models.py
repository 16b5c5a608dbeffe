"""A model that thinks before it answers, unless its chat template is told that it need not."""

from __future__ import annotations

from pathlib import Path

from tests.support.scripted import scripted_checkpoint

QUESTION = "<go>"
THOUGHT, ANSWER = "Why do they greet me?", "Hello there!"
REASONING_TOKENS = 3
"""The thought and its marks."""
MARKS = ("<think>", "</think>")
LINES = ((QUESTION, "<think>", THOUGHT, "</think>", ANSWER), ("<quick>", ANSWER))
TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {{ message.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<quick>{% endif %}"
)
KEEPING = TEMPLATE.replace("{{ message.content }}", "{{ message.reasoning_content or '' }}{{ message.content }}")
"""It reads the reasoning of earlier answers."""
EFFORT = TEMPLATE.replace("enable_thinking is defined and not enable_thinking", "reasoning_effort == 'low'")
CHANNEL_LINE = (
    *(QUESTION, "<|channel|>", "analysis", "<|message|>", THOUGHT, "<|end|>", "<|start|>", "assistant"),
    f"<|channel|>final<|message|>{ANSWER}",
)
"""As gpt-oss writes; the marks of the last message are in an ordinary token, since each token has one successor."""
CHANNEL_MARKS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")


def thinker(folder: Path, template: str = TEMPLATE) -> Path:
    """A checkpoint whose marks are special tokens."""
    return scripted_checkpoint(folder, LINES, template, MARKS)


def channel_thinker(folder: Path) -> Path:
    """The same in gpt-oss's channels; its template reads an effort."""
    return scripted_checkpoint(folder, (CHANNEL_LINE, ("<quick>", ANSWER)), EFFORT, CHANNEL_MARKS)
