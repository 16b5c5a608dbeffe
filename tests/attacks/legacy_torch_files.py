"""Files in torch's format from before 1.6 that claim what is not so; `parts` makes one that torch itself loads."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.attacks import pickles
from tests.attacks.attack import Attack, unsafe
from tests.support.torch_files import FOUR, Call, StorageOf, pickled, tensor

NUMBER = 0x1950A86A20F9469CFC6C
MACHINE = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}


def storage(
    key: Any = "0", elements: Any = 4, kind: Any = torch.FloatStorage, place: Any = "cpu", view: Any = None
) -> StorageOf:
    """A reference to a storage as torch made it."""
    return StorageOf("storage", kind, key, place, elements, view)


def parts(
    value: Any = None,
    *,
    version: Any = 1001,
    machine: Any = MACHINE,
    keys: Any = ("0",),
    storages: Sequence[bytes] = (struct.pack("<q", 4) + FOUR,),
    suffix: bytes = b"",
    raw: bytes | None = None,
) -> bytes:
    """Such a file, of `{"w": four numbers}` where nothing is overridden; `raw` is the pickle of the value itself."""
    saved = pickled({"w": tensor(storage())} if value is None else value) if raw is None else raw
    head = pickled(NUMBER) + pickled(version) + pickled(machine)
    return head + saved + pickled(list(keys) if isinstance(keys, tuple) else keys) + b"".join(storages) + suffix


class _Bare(StorageOf):
    """Pickles as a reference that is no tuple."""

    def __init__(self, identity: str) -> None:
        self.identity = identity  # type: ignore[assignment]


def in_the_value(inner: Attack, marker: Path) -> bytes:
    """The same pickle as the value of such a file."""
    return parts(raw=inner.build(marker))


ATTACKS = [
    Attack("last byte missing", r"its storages end at byte \d+, and it has \d+", parts()[:-1]),
    Attack("bytes behind the last storage", r"its storages end at byte \d+, and it has \d+", parts(suffix=b"more")),
    Attack(
        "storage of more elements than its pickle says",
        "storage 0 has 5 elements; its pickle says 4",
        parts(storages=[struct.pack("<q", 5) + FOUR]),
    ),
    Attack(
        "storage of less than no elements",
        "storage 0 has -1 elements; its pickle says 4",
        parts(storages=[struct.pack("<q", -1) + FOUR]),
    ),
    Attack(
        "storage larger than the file",
        "its storages end at byte 4,398,046,511,",
        parts({"w": tensor(storage(elements=1 << 40), 0, (1 << 40,), (1,))}),
    ),
    unsafe(
        "storage of a size beyond 64 bits",
        "as a storage's size; expected a natural number",
        parts({"w": tensor(storage(elements=1 << 70), 0, (4,), (1,))}),
    ),
    unsafe(
        "stride 0 giant",
        "makes 4,294,967,296 elements of a storage that has 4",
        parts({"w": tensor(storage(), 0, (1 << 16, 1 << 16), (0, 0))}),
    ),
    Attack(
        "storage that belongs to no tensor",
        "it lists 2 storages that are not the 1 it refers to",
        parts(keys=("0", "1"), storages=[struct.pack("<q", 4) + FOUR] * 2),
    ),
    Attack(
        "storage that is not listed", "it lists 0 storages that are not the 1 it refers to", parts(keys=(), storages=[])
    ),
    Attack(
        "storage listed twice",
        "it lists 2 storages that are not the 1 it refers to",
        parts(keys=("0", "0"), storages=[struct.pack("<q", 4) + FOUR] * 2),
    ),
    Attack("keys that are no list", "the keys of its storages are not a list of text", parts(keys={"0": 1})),
    Attack("keys that are no text", "the keys of its storages are not a list of text", parts(keys=(0,))),
    unsafe(
        "one storage of two types",
        "names storage 0 again, with another type or size",
        parts({"w": tensor(storage()), "v": tensor(storage(kind=torch.IntStorage))}),
    ),
    unsafe(
        "part of a storage",
        "refers to a part of a storage, as torch wrote it before 0.4",
        parts({"w": tensor(storage(view=("1", 0, 2)))}, keys=("0",)),
    ),
    unsafe(
        "storage as a zip has it",
        "expected type, key, location, size and view of a storage",
        parts({"w": tensor(StorageOf("storage", torch.FloatStorage, "0", "cpu", 4))}),
    ),
    unsafe(
        "whole module",
        "names the global 'torch.nn.modules.linear' 'Linear', which is not on the list",
        parts(StorageOf("module", torch.nn.Linear, "linear.py", "class Linear: ...")),
    ),
    Attack("another version", "its version is the number 1002; expected 1001", parts(version=1002)),
    Attack(
        "big endian", "was not written on a little-endian machine", parts(machine={**MACHINE, "little_endian": False})
    ),
    Attack("machine that says nothing", "was not written on a little-endian machine", parts(machine=[])),
    unsafe(
        "call where the machine is described",
        "names the global 'os' 'system'|names the global 'posix' 'system'",
        parts(machine=Call(os.system, "true")),
    ),
    unsafe("storage among the keys", "names the global 'torch' 'FloatStorage'", parts(keys=[storage()])),
    unsafe("reference among the keys", "refers to the text 'mine'; expected plain values", parts(keys=[_Bare("mine")])),
    unsafe(
        "reference that is none",
        "refers to the text 'mine'; expected type, key, location, size and view of a storage",
        parts({"w": tensor(_Bare("mine"))}),
    ),
    Attack("ends inside a pickle", "The pickle of .* is invalid at byte", parts()[:200]),
    Attack("no dict", "holds a list of 1; expected a dict of tensors", parts([tensor(storage())])),
    *(
        replace(inner, name=f"{inner.name} as the value", content=partial(in_the_value, inner), live=False)
        for inner in pickles.ATTACKS
        if inner.live
    ),
]
