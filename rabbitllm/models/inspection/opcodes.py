"""The pickles of a file as lists of opcodes, for people to look at. Nothing of them is run, built or imported.

A file that is refused is what one wants to look at most, so what the strict readers refuse is still listed as far as it
can be told: a zip that is not as torch writes it by Python's own reader (which may see another file in it than torch
does), a pickle that is cut off up to where it is.
"""

from __future__ import annotations

import itertools
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from rabbitllm.errors import CheckpointError
from rabbitllm.formats.pickle_reader import MAX_LISTED, MAX_PICKLE_BYTES, list_opcodes
from rabbitllm.formats.recognise import Weights
from rabbitllm.formats.torch_zip import PICKLE, pickle_of
from rabbitllm.models.inspection.records import Opcode, Pickle, Pickles

MAX_PICKLES = 8
"""A torch file from before 1.6 has five in a row, a TorchScript archive two."""
HAVE_PICKLES = (Weights.TORCH_ZIP, Weights.TORCH_LEGACY, Weights.PICKLE)
_OPENS = {"MARK"}
_CLOSES = {
    *("TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS", "ADDITEMS", "FROZENSET", "INST", "OBJ", "POP_MARK"),
}


def list_pickles(path: Path, kind: Weights) -> Pickles:
    """Every pickle of a local file.

    Args:
        path: the file.
        kind: what it is; one of `HAVE_PICKLES`.
    """
    if kind is Weights.TORCH_ZIP:
        return Pickles(tuple(_listed(data, name) for name, data in _pickles_of_zip(path)))
    with path.open("rb") as stream:
        data = stream.read(MAX_PICKLE_BYTES)
    return Pickles(tuple(_one_after_the_other(data, path.name, 5 if kind is Weights.TORCH_LEGACY else 1)))


def _pickles_of_zip(path: Path) -> list[tuple[str, bytes]]:
    try:
        return [(PICKLE, pickle_of(path))]
    except CheckpointError:
        return list(_by_pythons_reader(path))


def _by_pythons_reader(path: Path) -> Iterator[tuple[str, bytes]]:
    """The pickles of any zip; each within the limit, whatever it claims to become."""
    try:
        with zipfile.ZipFile(path) as archive:
            wanted = (entry for entry in archive.infolist() if entry.filename.endswith(".pkl"))
            for entry in itertools.islice(wanted, MAX_PICKLES):
                with archive.open(entry) as stream:
                    yield entry.filename, stream.read(MAX_PICKLE_BYTES)
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, RuntimeError, NotImplementedError, EOFError):
        return  # its reader has said what is wrong with it


def _one_after_the_other(data: bytes, name: str, most: int) -> Iterator[Pickle]:
    at = 0
    for number in range(min(most, MAX_PICKLES)):
        listed = _listed(data[at:], f"{name}, pickle {number + 1}" if most > 1 else name, at)
        yield listed
        if listed.stopped is not None:
            return
        at = listed.opcodes[-1].position + 1


def _listed(data: bytes, name: str, begin: int = 0) -> Pickle:
    """A pickle's opcodes up to its STOP; positions count from `begin` bytes before it."""
    opcodes: list[Opcode] = []
    depth, stopped = 0, None
    try:
        for opcode in list_opcodes(data, name):
            depth -= depth > 0 and opcode.name in _CLOSES
            opcodes.append(Opcode(begin + opcode.position, depth, opcode.name, opcode.argument))
            depth += opcode.name in _OPENS
    except CheckpointError as error:
        stopped = error.problem
    if stopped is None and len(opcodes) == MAX_LISTED and opcodes[-1].name != "STOP":
        stopped = f"More than {MAX_LISTED:,} opcodes are not listed."
    return Pickle(name, len(data), tuple(opcodes), stopped)
