"""Single tokens as text and as bytes, as lists of log probabilities need them.

A token may be a single byte of a character. Its text is then U+FFFD, as a decoder gives it; its bytes are exact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from rabbitllm.generation.streams import UNFINISHED

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"
"""A space, in SentencePiece vocabularies."""


class Spelling:
    """Spells single tokens.

    Args:
        tokenizer: the model's tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, tuple[int, ...]]] = {}

    def of(self, token: int) -> tuple[str, tuple[int, ...]]:
        """The text and the bytes of a token."""
        if token not in self._known:
            if len(self._known) > 1 << 16:
                self._known.clear()
            self._known[token] = self._spell(token)
        return self._known[token]

    def _spell(self, token: int) -> tuple[str, tuple[int, ...]]:
        name = self._tokenizer.convert_ids_to_tokens(token)
        text = str(self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if not isinstance(name, str):
            return text, tuple(text.encode())
        byte = _BYTE.fullmatch(name)
        if byte is not None:
            value = int(byte[1], 16)
            return (chr(value) if value < 0x80 else UNFINISHED), (value,)
        if name.startswith(SPACE) and not text.startswith(" "):  # a decoder drops the first space
            text = " " + text
        if UNFINISHED in text and all(character in bytes_of_characters() for character in name):
            return text, tuple(bytes_of_characters()[character] for character in name)
        return text, tuple(text.encode())


@cache
def bytes_of_characters() -> Mapping[str, int]:
    """The characters by which byte-level vocabularies write bytes: printable ones stand for themselves, the others are
    U+0100 and up in their order (as published with GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + at): value for at, value in enumerate(others)}
