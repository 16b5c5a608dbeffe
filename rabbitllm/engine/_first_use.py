"""Reads resident weights before the first pass, and compares them with their checksums before their first use.

Parameters that are views of mapped files are read when they are touched, a few pages at a time, while the processor
waits. A background thread reads them earlier, in the order of a pass, in larger pieces and into huge pages: the first
token of a model that was not in the page cache took 0.6 of the time. If they are in the page cache, this costs almost
nothing. Behind them come experts that are all resident: from huge pages a token of a model of 17 GB took 0.87 to 0.94
of its time, and a first text needs most of them. They are compared with their checksums there, too: texts that met
experts which were not yet took up to twice as long.

Other threads compute checksums of the bytes of units. The module that uses mapped bytes first has a hook that waits
for the comparison, and is removed when all of them are compared. (Bytes that are read into a buffer are compared there:
`span_reader.py`.)
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from rabbitllm.base.forks import DaemonThread, Workers, fail_unfinished, fulfil, in_child
from rabbitllm.base.options import usable_cores
from rabbitllm.base.rounding import round_up
from rabbitllm.engine import span_reader
from rabbitllm.engine._embedding_rows import check_rows
from rabbitllm.engine._expert_pool import routed
from rabbitllm.engine.expert_source import ExpertSource
from rabbitllm.engine.span_reader import FileSpan
from rabbitllm.engine.units import UnitSource
from rabbitllm.errors import ForkedError, RabbitLLMError
from rabbitllm.storage.files import HUGE_PAGE, PositionalFile, expect_random_reads, map_now
from rabbitllm.store.checksums import GROUP_BYTES, LayerChecks
from rabbitllm.store.layer_store import StoredTensor, WeightFiles

PIECE_BYTES, EXPERTS_BYTES = 4 << 20, 16 << 20
_LEFT = OSError, ValueError, MemoryError, RabbitLLMError
"""Errors of reading ahead that are left to the pass: of missing, truncated or damaged files."""


class ReadAhead:
    """Reads in background threads while this object, or its owner, exists.

    Args:
        units: runs of bytes of each unit, in the order of a pass.
        store: provides the files.
        checks: compares the bytes with their checksums; None for no comparison.
        experts: runs of bytes to be read after the units; nothing waits for their comparison.
        owner: the model.

    Attributes:
        threads: the background threads.
    """

    def __init__(
        self,
        units: Mapping[str, Sequence[FileSpan]],
        store: WeightFiles,
        checks: LayerChecks | None = None,
        experts: Sequence[FileSpan] = (),
        owner: object | None = None,
    ) -> None:
        stop, unused = threading.Event(), threading.Event()
        weakref.finalize(self if owner is None else owner, stop.set)
        weakref.finalize(self, unused.set)  # hooks of a layer keep it without its model
        checkers, ready = usable_cores() // 2 if checks is not None else 0, SimpleQueue[tuple[str, Any] | None]()
        work = [DaemonThread(_prefetch, "read-ahead", units, store, ready, checkers, experts, checks, stop)]
        self._checked: dict[str, Future[None]] = {}
        self._units, self._checks = units, checks
        if checks is not None:
            self._checked = {unit: Future() for unit in units}
            for _ in range(checkers):
                work.append(DaemonThread(_check, "checksums", ready, checks, self._checked, unused))
        self.threads = tuple(work)
        in_child(self._fail_unfinished)
        for thread in work:
            thread.start()

    def wait_for(self, unit: str) -> None:
        """Wait until a unit's bytes are compared with their checksums.

        Raises:
            IncompleteSplitError: a checksum differs.
            OSError: the bytes cannot be read.
        """
        if unit not in self._checked:
            return
        try:
            self._checked[unit].result()
        except ForkedError:
            assert self._checks is not None
            _compare(self._units[unit], self._checks, threading.Event())
            self._checked.pop(unit, None)

    def _fail_unfinished(self) -> None:
        fail_unfinished(self._checked.values())


def read_none_around(sources: Iterable[UnitSource], store: WeightFiles) -> None:
    """Have the system read nothing around mapped units until they are read whole: experts, or rows, that are not needed
    and whose pages would evict others."""
    for span in (span for source in sources for span in source.spans):
        expect_random_reads(store.mapped(span.file).whole(), span.offset, span.offset + span.nbytes)


def _prefetch(
    units: Mapping[str, Sequence[FileSpan]],
    store: WeightFiles,
    ready: SimpleQueue[tuple[str, Any] | None],
    checkers: int,
    experts: Sequence[FileSpan],
    checks: LayerChecks | None,
    stop: threading.Event,
) -> None:
    for unit, spans in units.items():
        # what compares the bytes waits for this without end
        with contextlib.suppress(*_LEFT):
            for span in spans if not stop.is_set() else ():
                end = span.offset + span.nbytes
                with PositionalFile(store.path(span.file)) as file:
                    file.read_in_huge_pages(span.offset, span.nbytes)
                    for offset in range(span.offset, end, PIECE_BYTES):
                        file.will_need(offset, min(PIECE_BYTES, end - offset))
                map_now(store.mapped(span.file).whole(), span.offset, end)
        ready.put((unit, spans))  # only now: pages that are touched first are small
    for _ in range(checkers):
        ready.put(None)
    for span in experts:
        with contextlib.suppress(*_LEFT):
            memory, end = store.mapped(span.file).whole(), span.offset + span.nbytes
            pieces = [span.offset, *range(round_up(span.offset, HUGE_PAGE), end, EXPERTS_BYTES), end]
            with PositionalFile(store.path(span.file)) as file:
                for first, last in itertools.pairwise(pieces):
                    if stop.is_set():
                        return
                    file.read_in_huge_pages(first, last - first)
            for first, last in itertools.pairwise(pieces):
                if stop.is_set():
                    return
                map_now(memory, first, last)  # only now, as above
                if checks is not None and checks.by_block(span.file):
                    checks.stored(span.file, [(first, last - first)])


def _check(
    ready: SimpleQueue[tuple[str, Any] | None],
    checks: LayerChecks,
    results: Mapping[str, Future[None]],
    stop: threading.Event,
) -> None:
    for unit, spans in iter(ready.get, None):
        fulfil(results[unit], _compare, spans, checks, stop)


def _compare(spans: Sequence[FileSpan], checks: LayerChecks, stop: threading.Event) -> None:
    for span in spans:
        offset, end = span.offset, span.offset + span.nbytes
        while offset < end and not stop.is_set():
            piece = min(end, (offset // GROUP_BYTES + 1) * GROUP_BYTES) - offset
            checks.stored(span.file, [(offset, piece)])
            offset += piece


def wait_before(module: nn.Module, compared: Callable[[], None]) -> None:
    """Call `compared`, which raises if a unit's bytes are damaged, before its module computes for the first time."""

    def before(module: nn.Module, args: Any) -> None:
        compared()
        handle.remove()

    handle = module.register_forward_pre_hook(before)


def check_rows_before(embedding: nn.Module, stored: StoredTensor, checks: LayerChecks) -> None:
    """Compare the rows that an embedding looks up, before each lookup."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        ids = args[0] if args else next(iter(kwargs.values()))  # the name of a forward's first argument differs
        is_ids, count = isinstance(ids, torch.Tensor) and not ids.is_floating_point(), stored.shape[0]
        rows = torch.unique(ids.cpu()) if is_ids else torch.arange(count, device="cpu")
        check_rows([(stored, rows[(rows >= 0) & (rows < count)])], checks)  # others are left to the embedding
        if all(checks.is_done(part.file) for part in stored.parts):
            handle.remove()

    handle = embedding.register_forward_pre_hook(before, with_kwargs=True)


def check_experts_before(source: ExpertSource, checks: LayerChecks, thread: Workers, unchecked: set[int]) -> None:
    """Compare the experts that a mapped module uses, while it computes with them; those that were not stay in a set."""
    unchecked |= set(range(source.experts))
    files = {span.file for span in source.ranges}
    pending = list[Future[set[int]]]()

    def compare(experts: set[int]) -> set[int]:
        span_reader.compare(checks, (span for expert in sorted(experts) for span in source.spans(expert)))
        return experts

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if all(map(checks.is_done, files)):  # `ReadAhead` was first
            unchecked.clear()
        wait(pending)  # left by an interrupted pass
        pending.clear()
        use = routed(args, kwargs)
        chosen = unchecked.copy() if use is None else unchecked & use
        if chosen:
            pending.append(thread.submit(compare, chosen))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        while pending:
            unchecked.difference_update(pending.pop().result())
        if not unchecked:
            for handle in handles:
                handle.remove()

    after.__dict__["unchecked"] = unchecked
    handles = [
        source.module.register_forward_pre_hook(before, with_kwargs=True),
        source.module.register_forward_hook(after),
    ]


def unchecked_in(module: nn.Module) -> set[int] | None:
    """The experts of a module that `check_experts_before` is to compare yet; None if it compares none there."""
    return next((hook.unchecked for hook in module._forward_hooks.values() if hasattr(hook, "unchecked")), None)


def only_checks(module: nn.Module) -> bool:
    """Whether no hook but those of `check_experts_before` sees what a module computes."""
    hooks = itertools.chain(module._forward_hooks.values(), module._forward_pre_hooks.values())
    return all(getattr(hook, "__module__", None) == __name__ for hook in hooks)
