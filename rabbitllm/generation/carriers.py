"""Members of a pass whose rows go through the model as those of one text: who they are, and how many go together.

What one such forward computes is `packed.py`'s, and how it meets those that go through the layers by themselves is
`joint_pass.py`'s. Switches to no member.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rabbitllm.generation.members import Member, call_of
from rabbitllm.generation.packed import PackedForward, PackedSequence
from rabbitllm.generation.packed_cache import NotPackable
from rabbitllm.generation.picking import grouped

logger = logging.getLogger(__name__)


class Carrier:
    """Takes several members' texts through the model, as one; the work of a member where there are others to meet.

    Args:
        forward: computes them.
        members: who is carried.
        texts: that they bring.

    Attributes:
        members: as given.
        caches: of the texts.
        outputs: of each text, once it has ended without error.
        error: what ended it else.
    """

    def __init__(self, forward: PackedForward, members: Sequence[Member], texts: Sequence[PackedSequence]) -> None:
        self._forward = forward
        self._texts = texts
        self.members = members
        self.outputs: list[Any] = []
        self.error: BaseException | None = None

    @property
    def caches(self) -> list[Any]:
        return [text.cache for text in self._texts]

    def __call__(self) -> None:
        """Go through the model."""
        try:
            self.outputs = self._forward(self._texts)
        except BaseException as error:
            self.error = error


class Carrying:
    """Finds carriers for the members of each pass, as long as the model allows it.

    Args:
        forward: computes texts as one; None for a model whose texts all go by themselves.
        max_rows: of a carrier, if it has more than one text; None for no limit.
    """

    def __init__(self, forward: PackedForward | None, max_rows: int | None) -> None:
        self._forward = forward
        self._max_rows = max_rows

    def carriers(self, members: Sequence[Member]) -> list[Carrier]:
        """Of those whose calls one forward can compute, in their order; the others are in none."""
        if self._forward is None:
            return []
        calls = [(member, call_of(member)) for member in members]
        read = [(member, self._forward.read(call.args, call.kwargs)) for member, call in calls]
        known = [(member, text) for member, text in read if text is not None]
        sound = self._forward.fitting([text for _, text in known]) if known else []
        carried = [one for one, good in zip(known, sound, strict=True) if good]
        groups = grouped([text.ids.shape[1] for _, text in carried], self._max_rows)
        return [
            Carrier(self._forward, [member for member, _ in carried[group]], [text for _, text in carried[group]])
            for group in groups
        ]

    def attending(self, carriers: int) -> AbstractContextManager[None]:
        """What has to be around the forwards of so many carriers, which go on by turns."""
        return self._forward.attending() if self._forward is not None and carriers > 1 else nullcontext()

    def end(self, why: NotPackable) -> None:
        """Make no more carriers."""
        logger.warning("From now on each text goes through the layers by itself: %s.", why)
        self._forward = None
