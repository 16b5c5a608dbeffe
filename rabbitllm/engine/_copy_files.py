"""Copies for `draft="self"` on the disk: made at the first start, in files beside the layer files of the split.

A file has the copy of one unit, or of the experts of one module, and is laid out like a layer file. Its name has a
digest of all that decides its content, so that of another split is not found, and the CRC-32 of its bytes. As each file
is whole once it has its name, a start makes what is lacking, and no more.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import torch

from rabbitllm.base.forks import Workers
from rabbitllm.base.terminal import size
from rabbitllm.errors import RabbitLLMError
from rabbitllm.formats.safetensors_file import TensorToWrite, encode_header, view_bytes
from rabbitllm.formats.tensor_spec import TensorSpec, torch_dtype
from rabbitllm.storage import durable
from rabbitllm.storage.durable import PART_SUFFIX
from rabbitllm.storage.files import PositionalFile, page_aligned
from rabbitllm.storage.folder_lock import alone
from rabbitllm.storage.folders import require_room
from rabbitllm.store.checksums import crc32
from rabbitllm.store.layer_file import COPIES_NAME, LAYER_SUFFIX, in_order
from rabbitllm.store.layer_store import WeightFiles

logger = logging.getLogger(__name__)

VERSION = 1
"""Of the content of the files; to be raised if encoders make other bits."""
READERS = 4
"""Files that are read at once."""
POLL_SECONDS = 0.1

CopyBytes: TypeAlias = dict[str, torch.Tensor]
"""Name -> blocks, or a tensor as it is used."""


@dataclass(frozen=True)
class CopyJob:
    """The copy of one unit, or of the experts of one module.

    Attributes:
        name: of it in the model.
        kind: the type of the blocks.
        forms: of all tensors that it consists of.
        about: what else decides their content, in text.
        make: encodes it.
    """

    name: str
    kind: str
    forms: tuple[TensorToWrite, ...]
    about: str
    make: Callable[[], CopyBytes]

    @cached_property
    def ordered(self) -> list[TensorToWrite]:
        """The tensors in the order of its file."""
        return in_order(self.forms)

    @property
    def nbytes(self) -> int:
        """Bytes of its file, but the header."""
        return sum(form.nbytes for form in self.forms)

    def fits(self, weights: CopyBytes) -> bool:
        """Whether these are plain tensors of the forms that a file can give back."""
        forms = {form.name: (torch_dtype(form.dtype), form.shape) for form in self.forms}
        plain = all(type(weight) is torch.Tensor for weight in weights.values())
        return plain and {name: (weight.dtype, tuple(weight.shape)) for name, weight in weights.items()} == forms


def kept_or_made(jobs: Sequence[CopyJob], store: WeightFiles) -> list[CopyBytes]:
    """The copies of all jobs: from files of the split, or made, and then written to these if that is possible.

    Without a split that has checksums, and where nothing can be written, all are made in memory.
    """
    manifest = getattr(store, "manifest", None)
    if manifest is None:
        return [job.make() for job in jobs]
    sums = [(layer.file, layer.size, layer.crc32, (layer.blocks or b"").hex()) for layer in manifest.layers]
    files = _CopyFiles(store.folder / COPIES_NAME, repr((VERSION, sums)))
    copies = files.read(jobs)
    if len(copies) < len(jobs):
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(files.locked())
                copies |= files.read(job for job in jobs if job.name not in copies)  # another process made some
                nbytes = sum(job.nbytes for job in jobs if job.name not in copies)
                require_room(files.folder, nbytes, "Keeping the copies for draft='self'")
                if nbytes:
                    logger.warning("Copies for draft='self' are made and kept in %s: %s.", files.folder, size(nbytes))
            except (OSError, RabbitLLMError) as error:
                stack.close()  # others need not wait
                files.give_up(error)
            for job in jobs:
                if job.name not in copies:
                    copies[job.name] = job.make()
                    files.write(job, copies[job.name])
    return [copies[job.name] for job in jobs]


class _CopyFiles:
    """The files of a folder.

    Args:
        folder: the folder, which may be missing.
        source: what the weights are, in text.
    """

    def __init__(self, folder: Path, source: str) -> None:
        self.folder = folder
        self._source = hashlib.sha256(source.encode())
        self._writes = True

    def give_up(self, error: Exception) -> None:
        """Write nothing from now on, and say why."""
        self._writes = False
        problem = error.problem if isinstance(error, RabbitLLMError) else str(error)
        logger.warning("Copies for draft='self' are in memory alone, and each start makes them again: %s", problem)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """A context in which no other process, or thread, makes copies in this folder; the folder exists."""
        durable.make_folder(self.folder)
        waits = False
        while (lock := alone(self.folder)) is None:
            if not waits:
                logger.warning("Waiting for another process, which makes the copies in %s.", self.folder)
            waits = True
            time.sleep(POLL_SECONDS)
        with lock:
            yield

    def read(self, jobs: Iterable[CopyJob]) -> dict[str, CopyBytes]:
        """The copies, by name, of which there is an intact file."""
        readers = Workers(READERS, "copies")
        try:
            reads = {job.name: readers.submit(self._read, job) for job in jobs}
            return {name: weights for name, read in reads.items() if (weights := read.result()) is not None}
        finally:
            readers.shutdown()

    def write(self, job: CopyJob, weights: CopyBytes) -> None:
        """Write a copy, durably, in place of those with blocks of its type that were made of other weights."""
        if not self._writes or not job.fits(weights):
            return
        pieces: list[bytes | memoryview] = [encode_header(job.ordered)[0]]
        pieces += [weights[form.name].reshape(-1).view(torch.uint8).numpy().data for form in job.ordered if form.nbytes]
        crc = 0
        for piece in pieces:
            crc = crc32(piece, crc)
        path = self.folder / f"{self._stem(job)}.{crc:08x}{LAYER_SUFFIX}"
        part = path.with_name(path.name + PART_SUFFIX)
        try:
            for stale in self.folder.glob(f"{glob.escape(f'{job.name}.{job.kind}.')}*"):
                durable.remove(stale)
            with contextlib.closing(durable.GrowingFile(part, sum(map(len, pieces)), write_back=True)) as file:
                offset = 0
                for piece in pieces:
                    file.write_at(memoryview(piece), offset)
                    offset += len(piece)
                file.sync()
            durable.publish(part, path)
        except OSError as error:
            durable.remove_scratch(part)
            self.give_up(error)

    def _stem(self, job: CopyJob) -> str:
        digest = self._source.copy()
        digest.update(repr((job.name, job.kind, job.forms, job.about)).encode())
        return f"{job.name}.{job.kind}.{digest.hexdigest()[:32]}"

    def _read(self, job: CopyJob) -> CopyBytes | None:
        """The copy in an intact file; None if there is none. Nothing of a file is believed, but the bytes of blocks."""
        header, offsets = encode_header(job.ordered)
        whole = memoryview(b"")
        for path in self.folder.glob(f"{glob.escape(self._stem(job))}.*{LAYER_SUFFIX}"):
            nbytes = len(header) + job.nbytes
            with contextlib.suppress(OSError), PositionalFile(path) as file:
                if file.size() == nbytes:
                    whole = whole or page_aligned(nbytes)
                    intact = file.read_into(whole, 0) == nbytes and whole[: len(header)] == header
                    if intact and path.name.endswith(f".{crc32(whole):08x}{LAYER_SUFFIX}"):
                        specs = [
                            TensorSpec(form.name, form.dtype, form.shape, path.name, offset, form.nbytes)
                            for form, offset in zip(job.ordered, offsets, strict=True)
                        ]
                        return {s.name: view_bytes(whole[s.offset : s.offset + s.nbytes], s) for s in specs}
            logger.warning("%s is damaged, and is made again.", path)
        return None
