"""transformers' renaming of a checkpoint's keys, for checkpoints of tens of thousands of them.

What comes out is what transformers' own functions give for each key. They take some 40 microseconds for one; experts,
which are all that is so many, differ in their number alone, and share what is found for the first two of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_EXPERT = re.compile(r"(.*?\bexperts\.)[0-9]+(\..+)")

Renamed = tuple[str, str | None]
"""The name in the model, and the source pattern of the converter that it is for, if there is one."""


def in_load_order(names: Iterable[str]) -> list[str]:
    """Checkpoint keys in the order in which transformers loads them."""
    from transformers.core_model_loading import dot_natural_key

    keys: dict[str, Any] = {}

    def key(name: str) -> list[Any]:  # what is between dots is judged by itself, and most of it is known
        found = []
        for piece in name.split("."):
            known = keys.get(piece)
            if known is None:
                known = keys[piece] = dot_natural_key(piece)[0]
            found.append(known)
        return found

    return sorted(names, key=key)


class KeyRenaming:
    """Where keys go in a model.

    Args:
        renamings, converters: of the model, as transformers has them.
        prefix: the model's `base_model_prefix`.
        expected: the model's own names.
    """

    def __init__(
        self, renamings: list[Any], converters: list[Any], prefix: str, expected: Mapping[str, torch.Tensor]
    ) -> None:
        self._transforms = renamings, converters
        self._prefix = prefix
        self._expected = expected
        self._experts: dict[tuple[str, str], list[Renamed]] = {}

    def __call__(self, name: str) -> Renamed:
        """The model's name of a key; that which comes out may be none of the model's."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return self._renamed(name)
        # should one expert go elsewhere, the others would be too few for their parameter, which is refused
        found = self._experts.setdefault(match.groups(), [])  # type: ignore[arg-type]
        if len(found) == 2 and found[0] == found[1]:
            return found[0]
        renamed = self._renamed(name)
        found[:] = [*found, renamed][-2:]
        return renamed

    def _renamed(self, name: str) -> Renamed:
        from transformers.core_model_loading import rename_source_key

        target, pattern = rename_source_key(name, *self._transforms, self._prefix, self._expected)
        if target not in self._expected and name in self._expected:  # it was no name to rename, it may need the prefix
            target, pattern = rename_source_key(name, [], [], self._prefix, self._expected)
        return target, pattern
