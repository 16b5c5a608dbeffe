"""Files in torch's format from before 1.6 that claim what is not so; `parts` makes one that torch itself loads."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rabbitllm.errors import UnsafePickleError
from tests.attacks import pickles
from tests.attacks.attack import Attack, listed
from tests.support.torch_files import FOUR, Call, StorageOf, pickled, tensor

ATTACKS: list[Attack] = []
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


attack = functools.partial(listed, ATTACKS)


@attack(r"its storages end at byte \d+, and it has \d+")
def last_byte_missing() -> bytes:
    return parts()[:-1]


@attack(r"its storages end at byte \d+, and it has \d+")
def bytes_behind_the_last_storage() -> bytes:
    return parts(suffix=b"more")


@attack("storage 0 has 5 elements; its pickle says 4")
def storage_of_more_elements_than_its_pickle_says() -> bytes:
    return parts(storages=[struct.pack("<q", 5) + FOUR])


@attack("storage 0 has -1 elements; its pickle says 4")
def storage_of_less_than_no_elements() -> bytes:
    return parts(storages=[struct.pack("<q", -1) + FOUR])


@attack("its storages end at byte 4,398,046,511,")
def storage_larger_than_the_file() -> bytes:
    return parts({"w": tensor(storage(elements=1 << 40), 0, (1 << 40,), (1,))})


@attack("as a storage's size; expected a natural number", UnsafePickleError)
def storage_of_a_size_beyond_64_bits() -> bytes:
    return parts({"w": tensor(storage(elements=1 << 70), 0, (4,), (1,))})


@attack("makes 4,294,967,296 elements of a storage that has 4", UnsafePickleError)
def stride_0_giant() -> bytes:
    return parts({"w": tensor(storage(), 0, (1 << 16, 1 << 16), (0, 0))})


@attack("it lists 2 storages that are not the 1 it refers to")
def storage_that_belongs_to_no_tensor() -> bytes:
    return parts(keys=("0", "1"), storages=[struct.pack("<q", 4) + FOUR] * 2)


@attack("it lists 0 storages that are not the 1 it refers to")
def storage_that_is_not_listed() -> bytes:
    return parts(keys=(), storages=[])


@attack("it lists 2 storages that are not the 1 it refers to")
def storage_listed_twice() -> bytes:
    return parts(keys=("0", "0"), storages=[struct.pack("<q", 4) + FOUR] * 2)


@attack("the keys of its storages are not a list of text")
def keys_that_are_no_list() -> bytes:
    return parts(keys={"0": 1})


@attack("the keys of its storages are not a list of text")
def keys_that_are_no_text() -> bytes:
    return parts(keys=(0,))


@attack("names storage 0 again, with another type or size", UnsafePickleError)
def one_storage_of_two_types() -> bytes:
    return parts({"w": tensor(storage()), "v": tensor(storage(kind=torch.IntStorage))})


@attack("refers to a part of a storage, as torch wrote it before 0.4", UnsafePickleError)
def part_of_a_storage() -> bytes:
    return parts({"w": tensor(storage(view=("1", 0, 2)))}, keys=("0",))


@attack("expected type, key, location, size and view of a storage", UnsafePickleError)
def storage_as_a_zip_has_it() -> bytes:
    return parts({"w": tensor(StorageOf("storage", torch.FloatStorage, "0", "cpu", 4))})


@attack("names the global 'torch.nn.modules.linear' 'Linear', which is not on the list", UnsafePickleError)
def whole_module() -> bytes:
    return parts(StorageOf("module", torch.nn.Linear, "linear.py", "class Linear: ..."))


@attack("its version is the number 1002; expected 1001")
def another_version() -> bytes:
    return parts(version=1002)


@attack("was not written on a little-endian machine")
def big_endian() -> bytes:
    return parts(machine={**MACHINE, "little_endian": False})


@attack("was not written on a little-endian machine")
def machine_that_says_nothing() -> bytes:
    return parts(machine=[])


@attack("names the global 'os' 'system'|names the global 'posix' 'system'", UnsafePickleError)
def call_where_the_machine_is_described() -> bytes:
    import os

    return parts(machine=Call(os.system, "true"))


@attack("names the global 'torch' 'FloatStorage'", UnsafePickleError)
def storage_among_the_keys() -> bytes:
    return parts(keys=[storage()])


@attack("refers to the text 'mine'; expected plain values", UnsafePickleError)
def reference_among_the_keys() -> bytes:
    return parts(keys=[_Bare("mine")])


@attack("refers to the text 'mine'; expected type, key, location, size and view of a storage", UnsafePickleError)
def reference_that_is_none() -> bytes:
    return parts({"w": tensor(_Bare("mine"))})


@attack("The pickle of .* is invalid at byte")
def ends_inside_a_pickle() -> bytes:
    return parts()[:200]


@attack("holds a list of 1; expected a dict of tensors")
def no_dict() -> bytes:
    return parts([tensor(storage())])


def in_the_value(inner: Attack) -> Attack:
    """The same pickle as the value of such a file."""

    def build(marker: Path) -> bytes:
        return parts(raw=inner.build(marker))

    build.__name__ = f"{inner.name} as the value"
    return Attack(build, inner.error, inner.message)


ATTACKS += [in_the_value(inner) for inner in pickles.ATTACKS if inner.live]
