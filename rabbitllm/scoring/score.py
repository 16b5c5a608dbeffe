"""Scores texts in passes that they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rabbitllm.scoring.records import Room, Scored, ScoredText

ROOM = Room()


def score(model: Any, texts: Sequence[ScoredText], room: Room = ROOM) -> Iterator[Scored]:
    """Results of texts, each as soon as it is known, in any order.

    Args:
        model: as `AutoModel.from_pretrained` returns it.
        texts: any number.
        room: what may be taken for them.
    """
    raise NotImplementedError
