"""Checkpoints that can be put back as they were, the call that splits them, and what must be true at any moment.

    scene = scene_in_folder(tmp_path, Route(compression="4bit"))
    ...                     # make `scene.call` and let it fail
    scene.check()           # nothing is lost, and nothing half-made looks whole
    scene.call.make()
    assert scene.state() == scene.finished

The routes are data, so that every test of failures can go over all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import torch

from rabbitllm.base import progress
from rabbitllm.formats.safetensors_file import read_header
from rabbitllm.quant.schemes import DOUBLE, NF4_STATE
from rabbitllm.splitter import journal
from rabbitllm.splitter.plan import SplitPlan
from rabbitllm.storage.durable import PART_SUFFIX, Step
from rabbitllm.store.manifest import MANIFEST_NAME
from rabbitllm.store.stored_form import WAITING_SCALES
from tests.support.builders import SINGLE_NAME, cut, llama_tensors, read_tensors, write_shards
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.splitting import Call, contents, occupied
from tests.support.ticks import counts, observe_ticks

REPO = "acme/tiny"
COMPRESSIONS = (None, "4bit")
TRANSFERS = ("file", "stream")
"""How shards come from a hub on the sequential route: values of `shard_transfer`."""


@dataclass(frozen=True)
class Route:
    """One way from a checkpoint to a split directory."""

    hub: bool = False
    sequential: bool = True
    compression: str | None = None
    transfer: str = TRANSFERS[0]
    delete_original: bool = False

    def __str__(self) -> str:
        words = ["hub" if self.hub else "local", "sequential" if self.sequential else "standard", self.compression]
        if self.hub and self.sequential:
            words.append(self.transfer)
        return "-".join([*(str(word) for word in words), *(["delete"] if self.delete_original else [])])

    def call(self, source: str, **where: str) -> Call:
        """The call that takes this route."""
        call = Call(
            source, compression=self.compression, sequential=self.sequential, delete_original=self.delete_original
        )
        if self.hub and self.sequential:
            where["shard_transfer"] = self.transfer
        return dataclasses.replace(call, **where)  # type: ignore[arg-type]


def routes(
    *,
    hub: Iterable[bool] = (False, True),
    sequential: Iterable[bool] = (True, False),
    compressions: Iterable[str | None] = COMPRESSIONS,
    delete: Iterable[bool] = (False,),
) -> list[Route]:
    """Every combination; each transfer once more where there is one."""
    return [
        Route(is_hub, in_turn, compression, transfer, deletes)
        for is_hub, in_turn, compression, deletes in itertools.product(hub, sequential, compressions, delete)
        for transfer in (TRANSFERS if is_hub and in_turn else TRANSFERS[:1])
    ]


@dataclass(frozen=True)
class Span:
    """Bytes of a layer file that come from one shard, those of a tensor's part."""

    file: str
    begin: int
    end: int
    tensor: str
    part: str


OF_SCALES = (".4bit.nested_absmax", ".4bit.absmax", NF4_STATE)
"""What is made of all scales of a tensor at 4bit-double, when the last of them is there."""


def _scales(tensor: torch.Tensor) -> bytes:
    """Those that bitsandbytes gives the tensor as a whole."""
    from bitsandbytes import functional

    _, state = functional.quantize_4bit(tensor, blocksize=64, quant_type="nf4")
    return bytes(state.absmax.numpy())


class Truth:
    """What an undisturbed split of a checkpoint makes, and from which shard each byte of it comes.

    Args:
        original: a sound copy of the checkpoint.
        made: the split directory that was made of one.
    """

    def __init__(self, original: Path, split: Path) -> None:
        self.shards = {path.name: path.read_bytes() for path in sorted(original.glob("*.safetensors"))}
        self.layers = {path.name: path.read_bytes() for path in split.glob("*.safetensors")}
        self.spans: dict[str, list[Span]] = {shard: [] for shard in self.shards}
        holder = {tensor.name: shard for shard in self.shards for tensor in read_header(original / shard).tensors}
        for file in self.layers:
            for part in read_header(split / file).tensors:
                tensor = max((name for name in holder if f"{part.name}.".startswith(f"{name}.")), key=len)
                span = Span(file, part.offset, part.offset + part.nbytes, tensor, part.name.removeprefix(tensor))
                self.spans[holder[tensor]].append(span)
        doubled = {span.tensor for spans in self.spans.values() for span in spans if span.part in OF_SCALES[:1]}
        self.scales = {name: _scales(tensor) for name, tensor in read_tensors(original).items() if name in doubled}

    def check(self, split: Path, source: Path | None) -> None:
        """Make sure that no layer file has wrong bytes, and that every tensor is to be had.

        Args:
            split: the directory of the split, in whatever state, or nothing.
            source: the folder of the shards; None for a hub, which keeps them.
        """
        named = {path.name: path.read_bytes() for path in split.glob("*.safetensors")}
        wrong = [name for name, data in named.items() if data != self.layers.get(name)]
        assert not wrong, f"{wrong} have their names, and not their bytes"
        if (split / MANIFEST_NAME).exists():
            assert named.keys() == self.layers.keys(), f"the manifest is there, and only {sorted(named)}"
            return
        earlier = journal.replay(split)
        used = earlier.used if earlier is not None else frozenset()
        for shard, data in self.shards.items():
            if shard in used:
                assert earlier is not None
                lost = {span.file for span in self.spans[shard] if not self._has(split, span, earlier.plan)}
                assert not lost, f"{shard} is said to be used up, and {sorted(lost)} have not all of it"
            elif source is not None:
                assert (source / shard).exists(), f"{shard} is gone, and the journal does not say that it is used up"
                assert (source / shard).read_bytes() == data

    def _has(self, split: Path, span: Span, plan: SplitPlan) -> bool:
        for name in (span.file, span.file + PART_SUFFIX):
            if (split / name).exists():
                with (split / name).open("rb") as file:
                    file.seek(span.begin)
                    is_there = file.read(span.end - span.begin) == self.layers[span.file][span.begin : span.end]
                return is_there or self._waits(split, span, plan)
        return False

    def _waits(self, split: Path, span: Span, plan: SplitPlan) -> bool:
        """Whether the scales of which bytes will be made are in the layer's scratch file."""
        if span.tensor not in self.scales or span.part not in OF_SCALES:
            return False
        layout = next(layout for layout in plan.layouts.values() if layout.file_name == span.file)
        if not (split / layout.scratch_name).exists():
            return False
        with (split / layout.scratch_name).open("rb") as file:
            file.seek(layout.scratch_offsets[span.tensor + WAITING_SCALES])
            return file.read(len(self.scales[span.tensor])) == self.scales[span.tensor]


class Scene:
    """A checkpoint that can be put back as it was, the call that splits it, and what that call makes undisturbed.

    Args:
        call: the call.
        original: a sound copy of the checkpoint; for a hub, what it serves.
        folder: everything that the call may change: the checkpoint's folder, or the Hugging Face home.
    """

    def __init__(self, call: Call, original: Path, folder: Path) -> None:
        self.call = call
        self.original = original
        self.folder = folder
        self.hub = bool(call.hub_url)
        self.reset()
        self.at_start = occupied(folder)
        self.kinds: list[str] = []
        self.peak = 0
        with observe_ticks(self._note_step), progress.listening(self._note_event):
            self.made = call.make()
        self.truth = Truth(original, self.made)
        self.finished = self.state()

    def _note_step(self, step: Step) -> None:
        if counts(step):
            self.kinds.append(step.kind)

    def _note_event(self, event: progress.Event) -> None:
        if isinstance(event, progress.SplitStarted):
            self.peak = event.peak_bytes

    @property
    def steps(self) -> int:
        """How many steps that count the undisturbed call takes."""
        return len(self.kinds)

    def count(self, kinds: tuple[str, ...]) -> int:
        """How many of its steps are of these kinds."""
        return sum(kind in kinds for kind in self.kinds)

    def reset(self) -> None:
        """Put everything back as it was before any call."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if not self.hub:
            shutil.copytree(self.original, self.folder)

    def state(self) -> dict[str, bytes]:
        """Every file, the finished split's and the source's, but for what a hub cache keeps to itself."""
        own = (".locks/", "/trees/", "hub/CACHEDIR.TAG")  # the last is left empty where the disk is full
        return {name: data for name, data in contents(self.folder).items() if not any(part in name for part in own)}

    def ours(self, files: Mapping[str, bytes]) -> dict[str, bytes]:
        """Those that are not in the user's hub cache, where huggingface_hub writes by its own rules."""
        return {name: data for name, data in files.items() if not (self.hub and name.startswith("hub/"))}

    def check(self) -> None:
        """Make sure that nothing is lost and nothing half-made looks whole; true at any moment."""
        self.truth.check(self.made, None if self.hub else self.folder)

    def finish(self) -> None:
        """Make the call once more, and make sure that it leaves what an undisturbed one leaves."""
        assert self.call.make() == self.made
        assert_same(self.state(), self.finished)


def assert_same(files: Mapping[str, bytes], expected: Mapping[str, bytes]) -> None:
    """Compare files without showing their bytes."""
    assert sorted(files) == sorted(expected)
    assert [name for name in expected if files[name] != expected[name]] == []


def sample(count: int, wanted: int) -> list[int]:
    """Numbers below ``count``, spread evenly, the first and the last among them; all of them if so many are wanted."""
    if wanted >= count:
        return list(range(count))
    return sorted({round(number * (count - 1) / (wanted - 1)) for number in range(wanted)})


def one_step_in(parts: int, count: int, *case: object) -> range:
    """Every `parts`-th number below `count`, beginning where a digest of the case says: cases try different ones."""
    return range(crc32(repr(case).encode()) % parts, count, parts)


def scene_in_folder(
    root: Path,
    route: Route,
    tensors: Mapping[str, torch.Tensor] | None = None,
    others: Mapping[str, bytes] | None = None,
) -> Scene:
    """A checkpoint of three shards in a folder below ``root``; ``others`` are further files of it."""
    original = _write(root / "original", tensors or _tensors(route), others)
    model = root / "local" / "model"
    return Scene(route.call(str(model)), original, model)


def scene_of_one_file(root: Path, route: Route) -> Scene:
    """A checkpoint of one file, which is its own index: when it is used up, nothing of it is left."""
    original = write_shards(root / "original", {SINGLE_NAME: llama_tensors(layers=2)}, index=False)
    model = root / "single" / "model"
    return Scene(route.call(str(model)), original, model)


def scene_on_hub(
    hub: LocalHub,
    environment: HubEnvironment,
    served: Path,
    route: Route,
    tensors: Mapping[str, torch.Tensor] | None = None,
    others: Mapping[str, bytes] | None = None,
) -> Scene:
    """The same checkpoint on a hub that serves the folder ``served``; its log is emptied afterwards."""
    original = _write(served / REPO, tensors or _tensors(route), others)
    call = route.call(REPO, hub_url=environment.url, hub_home=str(environment.home))
    scene = Scene(call, original, environment.home)
    hub.forget_requests()
    return scene


def _tensors(route: Route) -> dict[str, torch.Tensor]:
    """Small ones; so many that compression touches them."""
    if route.compression == DOUBLE:
        return llama_tensors(layers=2, hidden=192, vocabulary=200)
    return llama_tensors(layers=2)


def _write(folder: Path, tensors: Mapping[str, torch.Tensor], others: Mapping[str, bytes] | None) -> Path:
    write_shards(folder, cut(tensors, 3))
    for name, content in (others or {}).items():
        (folder / name).write_bytes(content)
    return folder
