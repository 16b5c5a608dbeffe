"""The state of a source before a split: its headers, its split directories, their journals and manifests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rabbitllm import prepare
from rabbitllm.base.options import ShardPolicy, SplitOptions
from rabbitllm.base.terminal import listed, size
from rabbitllm.checkpoints.checkpoint import NO_TOKENIZER, Checkpoint, SourceIdentity, lacks_tokenizer
from rabbitllm.checkpoints.config import experts_a_token, layers_before_heads, quantized_as, why_no_heads
from rabbitllm.checkpoints.naming import predicts_further
from rabbitllm.errors import InvalidIndexError, NotEnoughSpaceException
from rabbitllm.quant.schemes import COMPRESSIONS
from rabbitllm.splitter import journal
from rabbitllm.splitter.bit_allocation import with_choice
from rabbitllm.splitter.plan import SplitPlan, recompressed
from rabbitllm.splitter.request import SplitRequest, disk_budget_of, located, plan_split
from rabbitllm.store.manifest import AUTO, JOURNAL_NAME, SPLITS, Manifest, is_finished, is_fitted, read_manifest


@dataclass
class SourceScan:
    """A source and its split directories, found and read once.

    Attributes:
        spec: the model as it was named.
        options: the caller's.
        source: the result of `prepare.find`; where only finished splits are left of a model, with the config of one.
        refused: why loading would refuse a split, by compression; filled in before `feasible` is used.
    """

    spec: prepare.ModelSpec
    options: SplitOptions
    refused: dict[str | None, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """
        Raises:
            RabbitLLMError: there is no such model.
        """
        self.source = prepare.find(self.spec, only_look=True)
        if self.checkpoint is None and not self.source.finished and self.manifests:
            home = self.folders[next(iter(self.manifests))]
            self.source = dataclasses.replace(self.source, config_folder=home, finished=True)

    @cached_property
    def folders(self) -> dict[str | None, Path]:
        """The split directories, existing or not, by compression; a single one if only a finished split exists."""
        if self.source.repository is None and self.source.local is None:
            folder = self.source.split_folder
            manifest = read_manifest(folder)
            return {manifest.compression if manifest is not None else self.spec.compression: folder}
        folders = {c: prepare.folder_at(self.source, self.spec, c) for c in (*COMPRESSIONS, *SPLITS)}
        named = (*COMPRESSIONS, AUTO, self.options.compression)
        return {
            c: folder
            for c, folder in folders.items()
            if c in named or is_finished(folder) or (folder / JOURNAL_NAME).exists()
        }

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The weights; None if only finished splits are left of them."""
        return prepare.open_weights(self.source, self.folders.values())

    @cached_property
    def manifests(self) -> dict[str | None, Manifest | None]:
        """The manifests of complete splits, by compression; None for one of RabbitLLM 1.1's."""
        local, entry = self.source.local, self.source.entry
        finished = {c: folder for c, folder in self.folders.items() if prepare.is_complete(folder, local, entry)}
        return {c: read_manifest(folder) for c, folder in finished.items()}

    @cached_property
    def journals(self) -> dict[str | None, journal.Replay]:
        """The journals of unfinished splits, by compression."""
        unfinished = {c: folder for c, folder in self.folders.items() if c not in self.manifests}
        for folder in unfinished.values():
            prepare.refuse_half_repaired(folder, only_partial=True)
        journals = {c: journal.replay(folder) for c, folder in unfinished.items()}
        return {c: earlier for c, earlier in journals.items() if earlier is not None}

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The source's config; empty if it is absent or damaged."""
        try:
            return prepare.config_of(self.source.config_folder, self.checkpoint)
        except InvalidIndexError:
            return {}

    @cached_property
    def quantized(self) -> str | None:
        """The quantization of the published weights; None for plain ones."""
        return quantized_as(self.config)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons for which `from_pretrained` would refuse the source, and what a split of it leaves out."""
        warnings = []
        for shard in self.base.shards if self.base is not None else ():
            if shard.left_out:
                warnings.append(f"the split leaves out of {shard.name}: {listed(map(str, shard.left_out), 3)}")
                if self.base is not None and shard.is_kept(self.base.source, ShardPolicy.DELETE_USED):
                    warnings[-1] += "; it is kept where shards are deleted"
        if self._mtp_layers:
            nbytes = size(sum(self.base.layouts[layer].size for layer in self._mtp_layers if self.base is not None))
            why = why_no_heads(self.config)
            used = f"is not used: {why}" if why else "is used by --draft mtp only"
            warnings.append(f"{listed(self._mtp_layers, 3)} ({nbytes}, multi-token prediction) {used}")
        if self.checkpoint is not None and lacks_tokenizer(self.checkpoint.sidecar_sizes(), self.config):
            warnings.append(f"the checkpoint has {NO_TOKENIZER}")
        if self.config:
            return tuple(warnings)
        state = "cannot be read" if (self.source.config_folder / "config.json").exists() else "is missing"
        return (
            f"config.json {state}: from_pretrained cannot load this model; this estimate assumes Llama's layer names.",
            *warnings,
        )

    @cached_property
    def _mtp_layers(self) -> tuple[str, ...]:
        """The layers that predict further tokens: named so, or behind the last layer of the model."""
        layers, count = self.base.layouts if self.base is not None else (), layers_before_heads(self.config)
        return tuple(layer for layer in layers if predicts_further(layer, count))

    @property
    def commit(self) -> str | None:
        """The pinned commit of a repository, or the one that local splits were made from."""
        if self.source.repository is not None:
            return self.source.repository.commit
        sources = [self.base.source] if self.base is not None else []
        sources += [manifest.source for manifest in self.manifests.values() if manifest is not None]
        return sources[0].commit if sources else None

    @cached_property
    def base(self) -> SplitPlan | None:
        """The uncompressed plan, from headers or, if shards are gone, from a journal; None if neither is left."""
        if self._gone is None and self.checkpoint is not None:
            return plan_split(self.request(None))
        return next((recompressed(earlier.plan, None) for earlier in self.journals.values()), None)

    @cached_property
    def plans(self) -> dict[str | None, SplitPlan]:
        """The plans that were or would be carried out at each applicable compression, even if no longer possible."""
        base = self.base
        applies = [c for c in self.folders if c is None or self.quantized is None]
        plans = {} if base is None else {c: recompressed(base, c) if c else base for c in applies if c != AUTO}
        if AUTO in applies and isinstance(self._mixed, SplitPlan):
            plans[AUTO] = self._mixed
        begun = {c: earlier.plan for c, earlier in self.journals.items()}
        if self.checkpoint is not None:
            begun = {c: located(plan, self.checkpoint) for c, plan in begun.items()}
        return plans | begun

    @cached_property
    def _mixed(self) -> SplitPlan | str | None:
        """The plan at "auto", as it was or would be carried out; or why there is none."""
        if self.base is None:
            return None
        manifest = self.manifests.get(AUTO)
        if manifest is not None:
            return recompressed(self.base, AUTO, manifest.chosen)
        if self.checkpoint is None or AUTO in self.journals:
            return None
        request = self.request(AUTO)
        try:
            disk_budget = disk_budget_of(request, recompressed(self.base, AUTO))
            return with_choice(self.base, disk_budget, request.options, experts_a_token(self.config))
        except NotEnoughSpaceException as error:
            return f"{error.problem} {error.remedy}".rstrip(".")

    def fitted(self, compression: str | None) -> bool:
        """Whether scales of 4bit are fitted to their blocks, in an existing split or by the present options."""
        if compression in self.manifests:
            manifest = self.manifests[compression]
            return manifest is not None and is_fitted(manifest.quantizer)
        earlier = self.journals.get(compression)
        return is_fitted(earlier.quantizer) if earlier is not None else self.options.fit_scales

    @cached_property
    def feasible(self) -> dict[str | None, SplitPlan]:
        """The `plans` that are not carried out yet and can be."""
        return {c: plan for c, plan in self.plans.items() if c not in self.manifests and self.obstacle(c) is None}

    def used(self, compression: str | None) -> frozenset[str]:
        """Return the shards that an unfinished split has used up."""
        earlier = self.journals.get(compression)
        return earlier.used if earlier is not None else frozenset()

    def is_here(self, shard: str) -> bool:
        """Whether a shard is on this machine."""
        if self.source.repository is not None:
            return self.source.repository.cached(shard) is not None
        return self.source.local is not None and (self.source.local / shard).exists()

    def obstacle(self, compression: str | None) -> str | None:
        """Return why a split at this compression can be neither used, begun nor finished; None if one is possible."""
        if compression in self.manifests:
            manifest = self.manifests[compression]
            if manifest is None:
                return None
            if manifest.compression != compression:
                return f"the finished split is at compression {manifest.compression}"
            return self._of_another("finished", manifest.source)
        if compression is not None and self.quantized is not None:
            return f"the weights are already quantized ({self.quantized})"
        if compression in self.refused:
            return f"loading would fail: {self.refused[compression].rstrip('.')}"
        earlier = self.journals.get(compression)
        if compression == AUTO and earlier is None and isinstance(self._mixed, str):
            return self._mixed
        if earlier is None or self.checkpoint is None:
            return self._gone
        if (why := self._of_another("unfinished", earlier.plan.source)) is not None:
            return why
        if self.source.repository is not None:
            return None
        waiting = [shard.name for shard in earlier.plan.shards if shard.name not in earlier.used]
        missing = [shard for shard in waiting if not self.is_here(shard)]
        return f"{len(missing)} of the {len(waiting)} shards it still needs are missing" if missing else None

    @cached_property
    def _gone(self) -> str | None:
        """Why no plan can be made from headers; None if one can."""
        if self.checkpoint is None:
            return "its shards are missing"
        if self.source.repository is not None:
            return None  # shards that a repository lacks raise an error elsewhere
        shards = self.checkpoint.index.shards
        missing = [shard for shard in shards if not self.is_here(shard)]
        return f"{len(missing)} of its {len(shards)} shards are missing" if missing else None

    @cached_property
    def _identity(self) -> SourceIdentity | None:
        """The identity of the present source; None if nothing of it is left to compare."""
        if self.checkpoint is None:
            return None
        if self._gone is None and self.base is not None:
            return self.base.source
        metadata = (self.checkpoint.metadata(shard) for shard in self.checkpoint.index.shards)
        return self.checkpoint.identity(fact for fact in metadata if fact is not None)

    def _of_another(self, state: str, identity: SourceIdentity) -> str | None:
        """Why a split, in this state, of this source is no split of the present source; None if it is."""
        why = identity.differs_from(self._identity) if self._identity is not None else None
        return f"the {state} split is of another source: {why}" if why is not None else None

    def request(self, compression: str | None, shards: ShardPolicy = ShardPolicy.KEEP) -> SplitRequest:
        """Return the request for the split that `from_pretrained` would make."""
        assert self.checkpoint is not None
        options = dataclasses.replace(self.options, compression=compression, shards=shards)
        return SplitRequest(self.checkpoint, self.folders[compression], self.config, options)
