"""A fixture for tests of what drafts do: their number does not depend on times. How it is chosen: `test_width.py`."""

from __future__ import annotations

from typing import Any

import pytest

from rabbitllm.generation._width import Width

TOKENS = 10


@pytest.fixture(autouse=True)
def always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass has a draft of `TOKENS` tokens, if the source proposes so many."""
    draft_always(monkeypatch)


def draft_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same outside tests."""

    def choose(width: Any, most: int, lacks: int = 0, rows: int = 1, sequences: int = 1) -> int:
        return max(min(most, TOKENS), 0)

    monkeypatch.setattr(Width, "choose", choose)
    monkeypatch.setattr(Width, "goes_on", lambda width, sure: sure >= 0.4)
    monkeypatch.setattr(Width, "deepens", lambda width, right, depth: right >= 0.2)
    monkeypatch.setattr(Width, "worth", lambda width, probabilities: min(len(probabilities), 2 * TOKENS))
