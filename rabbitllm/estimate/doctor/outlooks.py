"""Estimates of the short list's models on this machine: disk use by their sizes, generation as in a plan."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rabbitllm.estimate.doctor.models import Published
from rabbitllm.estimate.doctor.places import CACHE, SPLITS
from rabbitllm.estimate.doctor.records import AtCompression, ModelEstimate, Need
from rabbitllm.splitter.split_estimate import ROUTES, STANDARD
from rabbitllm.storage.folders import Folder

if TYPE_CHECKING:
    from rabbitllm.estimate.doctor.speeds import Bench

MIN_FREE_BYTES = 1000**3
"""Bytes of a disk to keep free, as in a split by default."""
_SHARDS = {"sequential_ahead": 2, "sequential_file": 1, "sequential_stream": 0}


def on_disk(model: Published, folders: Iterable[Folder]) -> ModelEstimate:
    """Return a model's disk use at each compression and on each route, without generation.

    Args:
        model: the model.
        folders: those of splits and of the hub cache are used.
    """
    outline = model.outline
    places = {use: folder for folder in folders for use in folder.uses}
    found = tuple(
        AtCompression(compression, output, tuple(_need(name, model, output, places) for name in ROUTES))
        for compression in outline.compressions
        for output in [outline.output_bytes(compression)]
    )
    return ModelEstimate(model.repository, model.parameters, outline.checkpoint_bytes, found, model.quantized)


def _need(route: str, model: Published, output: int, places: Mapping[str, Folder]) -> Need:
    splits, cache = places.get(SPLITS), places.get(CACHE)
    downloads = model.outline.checkpoint_bytes if route == STANDARD else 0
    created = output + _SHARDS.get(route, 0) * model.largest_shard_bytes
    if splits is None:
        return Need(route, created + downloads, 0)
    if cache is None or cache.disk == splits.disk:
        missing = created + downloads + MIN_FREE_BYTES - splits.room
    else:
        lacking = downloads + MIN_FREE_BYTES - cache.room if downloads else 0
        missing = max(created + MIN_FREE_BYTES - splits.room, lacking)
    return Need(route, created + downloads, max(missing, 0))


def with_times(model: Published, outlook: ModelEstimate, bench: Bench, every: bool = False) -> ModelEstimate:
    """Return the same estimate with times of generation; a problem at one compression is recorded there.

    Args:
        model: the model.
        outlook: of it, from `on_disk`.
        bench: the machine to measure on.
        every: also for compressions for which the disk has no room.
    """
    timed = (_timed(model, one, bench) if every or one.route is not None else one for one in outlook.at)
    return dataclasses.replace(outlook, at=tuple(timed))


def _timed(model: Published, one: AtCompression, bench: Bench) -> AtCompression:
    from rabbitllm.estimate.stretched import predict_outline

    with tempfile.TemporaryDirectory(prefix="rabbitllm-doctor-") as work:
        try:
            _, found = predict_outline(
                model.outline, one.compression, bench.folder, bench.machine, bench.files, Path(work)
            )
        except Exception as error:  # one failed estimate must not end the list
            return dataclasses.replace(one, problem=str(error).split("\n")[0] or type(error).__name__)
    return dataclasses.replace(one, generation=found)


def smallest_need(outlooks: Sequence[ModelEstimate]) -> int:
    """Return the least bytes of disk with which any model of the list can be split."""
    return min((need.disk_bytes for found in outlooks for one in found.at for need in one.needs), default=0)
