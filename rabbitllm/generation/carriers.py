"""Groups the members of a pass that are packed into one forward.

`packed.py` computes such a forward, and `joint_pass.py` lets it take turns with members that go through the layers by
themselves.
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
    """Takes the sequences of several members through the model, packed; runs as a member itself if a pass has others.

    Args:
        forward: computes the packed sequences.
        members: the members that are packed.
        texts: the sequence of each member.

    Attributes:
        members: see above.
        caches: KV caches of the sequences.
        outputs: output of each sequence, once the forward has succeeded.
        error: the error that ended the forward, if any.
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
        forward: computes packed sequences; None for a model that cannot pack any.
        max_rows: maximum rows of a carrier with more than one sequence; None for no limit.
    """

    def __init__(self, forward: PackedForward | None, max_rows: int | None) -> None:
        self._forward = forward
        self._max_rows = max_rows

    def carriers(self, members: Sequence[Member]) -> list[Carrier]:
        """Carriers of the members whose calls can be packed, in their order; the other members are in none."""
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
        """The context for the forwards of so many carriers, which take turns."""
        return self._forward.attending() if self._forward is not None and carriers > 1 else nullcontext()

    def end(self, why: NotPackable) -> None:
        """Make no more carriers."""
        logger.warning("From now on each text goes through the layers by itself: %s.", why)
        self._forward = None
