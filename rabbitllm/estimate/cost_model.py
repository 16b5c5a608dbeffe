"""The bytes of a pass over a model, from its load plan; measures nothing.

Records of an estimate, and the work of a pass with units and with experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rabbitllm.base.grouping import grouped
from rabbitllm.checkpoints.config import picked_by
from rabbitllm.engine.placement import HOOKED, Copies, Placement, Tier, TierContent
from rabbitllm.engine.published_codes import CodedRecipe
from rabbitllm.quant.turned import TurnedMatrix

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from rabbitllm.engine.expert_source import ExpertSource
    from rabbitllm.engine.load_plan import LoadPlan
    from rabbitllm.engine.units import ParameterEntry, UnitSource

PROMPT_TOKENS = 16
"""Length of the prompt whose answer's first token is estimated."""


@dataclass(frozen=True, slots=True)
class Speed:
    """A rate that was measured on this machine: its description, and bytes per second."""

    what: str
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts that compute on one device, of all layers together; bytes as stored.

    Attributes:
        device: the device.
        tier: as in `engine.placement.Tier`: "by routing" if they are streamed, else all are resident.
        count: number of experts.
        used: number of them that a token uses.
        stored_bytes: of all.
        used_bytes: of those that a token uses.
        kept_bytes: of those that are kept on the device.
        host_bytes: of those that are kept in pinned host memory.
        read_bytes: bytes that a token reads, if all experts are used equally.
        copied_bytes: bytes that a token copies from host memory, in the same case.
    """

    device: str
    tier: str
    count: int
    used: int
    stored_bytes: int
    used_bytes: int
    kept_bytes: int
    host_bytes: int
    read_bytes: int
    copied_bytes: int


DRAFTED = {1.5: 1, 2.0: 2, 3.0: 4, 5.0: 8}
"""Tokens a pass -> tokens that are drafted for each, of which half are assumed to be right."""


@dataclass(frozen=True, slots=True)
class DraftedPass:
    """A pass that checks drafted tokens.

    Attributes:
        drafted: number of these tokens.
        tokens: tokens that the pass brings, if half of those are right.
        token_seconds: time of a token then.
        break_even: tokens that it has to bring to be as fast as without a draft.
    """

    drafted: int
    tokens: float
    token_seconds: float
    break_even: float


@dataclass(frozen=True, slots=True)
class DraftEstimate:
    """The estimate of generation with a draft.

    Attributes:
        name: of the draft.
        obstacle: why it cannot be used; None if it can.
        held_bytes: memory that it takes; the model is placed in what is left.
        step_seconds: time of a drafted token.
        passes: for each number of drafted tokens in `DRAFTED`; none if a rate could not be measured.
    """

    name: str
    obstacle: str | None = None
    held_bytes: int = 0
    step_seconds: float = 0.0
    passes: tuple[DraftedPass, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationEstimate:
    """The generation estimate at one compression.

    In a mixture of experts a token reads the experts that are not in memory. Which ones those are depends on the text;
    bytes and times are for a model that uses all its experts equally, which finds the fewest in memory.

    Attributes:
        compression: None, "8bit", "4bit", "4bit-double" or "auto".
        obstacle: why there is no estimate for the model; None if there is one.
        refused: whether there is none because loading would refuse the model.
        placed: bytes by device and tier, without experts that are streamed individually.
        stays_bytes: stored bytes that are resident in memory or on a device, experts included.
        read_bytes: bytes that each token reads, from the disk or, if they fit there, from the page cache.
        from_the_disk: whether they come from the disk, on every token.
        token_seconds: time of a token after the first; None if a rate could not be measured.
        first_token_seconds: time of the first token, with nothing of the model in the page cache.
        speeds: rates that both times are based on.
        copied_bytes: bytes that each token copies from host memory to devices.
        experts: experts with a placement of their own, by device.
        found_token_seconds: time of a token after the first whose experts are all in memory; equal to `token_seconds`
            if no experts are streamed.
        placement: placement of each unit.
        too_little_memory: why loading would be refused: the memory that a pass needs, and what this process may take;
            None if it is enough.
        draft: the same with a draft; None without one.
    """

    compression: str | None
    obstacle: str | None = None
    placed: tuple[TierContent, ...] = ()
    stays_bytes: int = 0
    read_bytes: int = 0
    from_the_disk: bool = False
    token_seconds: float | None = None
    first_token_seconds: float | None = None
    speeds: tuple[Speed, ...] = ()
    copied_bytes: int = 0
    experts: tuple[Experts, ...] = ()
    found_token_seconds: float | None = None
    placement: Placement | None = None
    refused: bool = False
    too_little_memory: str | None = None
    draft: DraftEstimate | None = None


# The work of a pass with each unit: the bytes it reads, multiplies with and makes. Taken from the load plan that the
# model itself is loaded by.

STAYING = (Tier.RESIDENT, Tier.PACKED, Tier.PINNED)
"""Tiers that are not read from the disk again."""
_COPIED = (Tier.PINNED, Tier.STREAMED)
ONE_CALL = 0.5
"""Overhead of a decoder layer that is computed with all others by one call, in modules."""
BITSANDBYTES = "bitsandbytes "
"""Prefix of the forms of checkpoints that are published for bitsandbytes."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix, or several equal ones, that a pass multiplies with.

    Attributes:
        form: form it is multiplied from: "4bit" and "8bit" are codes, "bitsandbytes …" and a `CodedForm.scheme` those
            of a checkpoint that is published in that form, anything else is a torch dtype's name.
        shape: (rows, columns).
        nbytes: in that form; of all of them.
        share: of the bytes that one token needs: below 1 for experts, of which a router picks a few.
    """

    form: str
    shape: tuple[int, int]
    nbytes: int
    share: float = 1.0

    def touched(self, tokens: int) -> float:
        """Return the expected bytes that this many tokens need, each routed independently."""
        return self.nbytes * (1 - (1 - self.share) ** tokens)


@dataclass(frozen=True, slots=True)
class UnitWork:
    """The work of a pass with one unit.

    Attributes:
        unit: its path in the model.
        device: the device that computes it.
        streamed: bytes that are read for each pass; 0 if it is resident.
        uploaded: bytes that are copied to its device for each pass.
        products: the matrices it multiplies with.
        bound: number of parameters that are bound for each pass.
        made: bytes of those that are made from others for each pass.
        modules: number of modules inside it, itself included; 0 outside of decoder layers; `ONE_CALL` where all of
            these are one call.
        once: whether it is part of an encoder, which only the first token needs.
    """

    unit: str
    device: str
    streamed: int
    uploaded: int
    products: tuple[Product, ...]
    bound: int
    made: int
    modules: float
    once: bool


def work_of(plan: LoadPlan) -> tuple[UnitWork, ...]:
    """Return the work of a pass, unit by unit, in its order."""
    from rabbitllm.engine.fusions import layers_are_one_call

    picked, encoder = picked_by(plan.model.config.get_text_config()), _encoder_path(plan.model)
    hosts = plan.placement.hosts
    alike: dict[int, tuple[tuple[Product, ...], int]] = {}  # in an outline one source is of many layers
    work = []
    for placed in plan.placement.units:
        source = plan.sources[placed.unit]
        if id(source) not in alike:
            modules = sum(1 for _ in source.unit.module.modules()) if source.unit.is_layer else 0
            alike[id(source)] = tuple(_products(source, picked)), modules
        products, modules = alike[id(source)]
        streamed = placed.stored if placed.tier is Tier.STREAMED else 0
        uploaded = placed.stored if placed.device not in hosts and placed.tier in _COPIED else 0
        hooked = placed.tier in HOOKED and not (placed.tier is Tier.PACKED and source.is_view)
        bound = len(tuple(source.entries)) if hooked else 0
        made = _made_bytes(source) if hooked else 0
        once = encoder is not None and (placed.unit + ".").startswith(encoder)
        work.append(UnitWork(placed.unit, placed.device, streamed, uploaded, products, bound, made, modules, once))
    if layers_are_one_call(plan):
        return tuple(replace(unit, modules=ONE_CALL if unit.modules else 0) for unit in work)
    return tuple(work)


def _made_bytes(source: UnitSource) -> int:
    """Return the bytes of parameters, and of codes, that are no views of the stored bytes."""
    if source.is_view:
        return 0
    made = sum(entry.nbytes for job in source.jobs if not job.recipe.wraps for _, entry in job.entries)
    return made + sum(job.coded_bytes for job in source.jobs)


def _encoder_path(model: PreTrainedModel) -> str | None:
    """Return the path of the encoder, with a trailing dot; None if there is none."""
    if not model.config.is_encoder_decoder:
        return None
    encoder = model.get_encoder()
    return next((f"{name}." for name, module in model.named_modules() if module is encoder and name), None)


def _products(source: UnitSource, picked: int | None) -> Iterable[Product]:
    from torch import nn

    if isinstance(source.unit.module, nn.Embedding):
        return  # one row per token
    for job in source.jobs:
        for how, entry in job.quantized:
            if isinstance(how, CodedRecipe):
                yield Product(how.form.scheme, _matrix(entry), how.form.nbytes)
                continue
            stored = source.stored[job.recipe.sources[0][1]]
            assert stored.quantized is not None
            nbytes = stored.nbytes + stored.quantized.expanded_bytes
            yield Product(stored.quantized.codes.scheme, _matrix(entry), nbytes)
        for _, entry in job.entries:
            if job.recipe.wraps and (form := _own_form(_owner(source, entry))) is not None:
                yield Product(form, _matrix(entry), sum(source.stored[name].nbytes for _, name in job.recipe.sources))
            elif len(entry.shape) >= 2:
                form = str(entry.dtype).removeprefix("torch.")
                yield Product(form, _matrix(entry), entry.nbytes, _share(entry, picked))


def _own_form(module: nn.Module) -> str | None:
    """Return the form of a module of bitsandbytes, of 4bit with its compute dtype; None for any other module."""
    type_name = type(module).__name__
    if type_name == "Linear8bitLt":
        return f"{BITSANDBYTES}8bit"
    if type_name == "Linear4bit":
        return f"{BITSANDBYTES}4bit in {str(module.compute_dtype or 'float32').removeprefix('torch.')}"
    return None


def _owner(source: UnitSource, entry: ParameterEntry) -> nn.Module:
    """Return the module that holds a `ParameterEntry`."""
    inside = entry.target.rpartition(".")[0].removeprefix(source.unit.name)
    return source.unit.module.get_submodule(inside.removeprefix("."))


def _matrix(entry: ParameterEntry) -> tuple[int, int]:
    return entry.shape[-2], entry.shape[-1]


def _share(entry: ParameterEntry, picked: int | None) -> float:
    """Return the share of experts, in one tensor of three dimensions, that a router picks; 1 for other tensors."""
    experts = entry.shape[0] if len(entry.shape) == 3 else 0
    return picked / experts if picked is not None and picked < experts else 1.0


# The experts that a token needs, and the share of them that is in memory.
#
# Which experts a token is routed to depends on its text. The estimates assume that all experts of a layer are used
# equally and independently for each token: then memory that keeps a share c of them has an expert that a token needs
# with probability c, whatever the cache's policy. Models use some experts more than others, and a cache keeps those, so
# in practice more are found.


@dataclass(frozen=True, slots=True)
class RoutedWork:
    """The work of a pass with the experts of one module.

    Attributes:
        source: the experts.
        device: the device that computes them.
        tier: `ROUTED` if they are streamed; else they are resident.
        is_host: whether that device computes in the host memory where layer files are mapped.
        on_device: the share of them that is kept where they compute; 1 if they are resident.
        in_host: the share that is kept in pinned host memory.
        products: the matrices of one expert.
        made: bytes of an expert's weights that are made from others for each use.
    """

    source: ExpertSource
    device: str
    tier: Tier
    is_host: bool
    on_device: float
    in_host: float
    products: tuple[Product, ...]
    made: int

    @property
    def missed(self) -> float:
        """The share that is not kept in memory."""
        return max(1.0 - self.on_device - self.in_host, 0.0)

    @property
    def used_bytes(self) -> int:
        """Bytes of the experts that a token uses."""
        return self.source.used * self.source.expert_bytes

    @property
    def read_bytes(self) -> float:
        """The expected bytes that a token reads."""
        return self.missed * self.used_bytes

    @property
    def copied_bytes(self) -> float:
        """The expected bytes that a token copies from host memory to a device that does not share it."""
        return 0.0 if self.is_host else (1.0 - self.on_device) * self.used_bytes

    def touched_bytes(self, tokens: int) -> float:
        """Return the expected bytes of the distinct experts that this many tokens use."""
        return self.source.stored_bytes * (1 - (1 - self.source.used / self.source.experts) ** tokens)


def routed_work(plan: LoadPlan) -> tuple[RoutedWork, ...]:
    """Return the work of a pass with experts, module by module, in its order."""
    sources = {source.name: source for source in plan.experts}
    hosts, pools = plan.placement.hosts, {pool.device: pool for pool in plan.placement.pools}
    work = []
    for placed in plan.placement.experts:
        source = sources[placed.unit]
        routed = placed.tier is Tier.ROUTED
        on_device, in_host = pools[placed.device].shares if routed else (1.0, 0.0)
        is_host, products = placed.device in hosts, tuple(_expert_products(source))
        leaves = [leaf for leaf in source.leaves.values() if not leaf.is_view and leaf.matrix_type is None]
        made = 0 if placed.tier is Tier.RESIDENT else sum(leaf.entry.nbytes // source.experts for leaf in leaves)
        work.append(RoutedWork(source, placed.device, placed.tier, is_host, on_device, in_host, products, made))
    return tuple(work)


def _expert_products(source: ExpertSource) -> Iterator[Product]:
    for leaf in source.leaves.values():
        if len(leaf.shape) < 2:
            continue  # a bias
        stored, nbytes = leaf.blocks[0].form, sum(part.nbytes for part in leaf.parts)
        if leaf.coded is not None:
            form = leaf.coded.form.scheme
        elif leaf.matrix_type not in (None, TurnedMatrix) and stored is not None:  # that is decoded to bfloat16
            form = stored.codes.scheme
        else:
            form, nbytes = str(leaf.entry.dtype).removeprefix("torch."), leaf.entry.nbytes // source.experts
        yield Product(form, _matrix(leaf.entry), nbytes)


def by_copies(
    work: Sequence[UnitWork], routed: Sequence[RoutedWork], copies: Copies
) -> tuple[list[UnitWork], list[RoutedWork]]:
    """Return the work of a pass with copies of all that is streamed, which are in memory."""
    coming = [part for part in routed if part.tier is Tier.ROUTED]
    whole = sum(unit.streamed for unit in work) + sum(part.source.stored_bytes for part in coming)

    def copy(nbytes: int) -> tuple[Product, ...]:
        return (Product(copies.kind, (1, nbytes), round(copies.nbytes * nbytes / whole)),)

    units = [
        replace(unit, streamed=0, bound=0, made=0, products=copy(unit.streamed)) if unit.streamed else unit
        for unit in work
    ]
    experts = [
        replace(part, tier=Tier.PACKED, on_device=1.0, made=0, products=copy(part.source.expert_bytes))
        for part in coming
    ]
    return units, [*(part for part in routed if part.tier is not Tier.ROUTED), *experts]


def experts_of(work: Iterable[RoutedWork]) -> tuple[Experts, ...]:
    """Sum up the modules of each device and tier."""
    groups = grouped(((routed.device, routed.tier), routed) for routed in work)
    return tuple(
        Experts(
            device=device,
            tier=tier.value,
            count=sum(routed.source.experts for routed in members),
            used=sum(routed.source.used for routed in members),
            stored_bytes=sum(routed.source.stored_bytes for routed in members),
            used_bytes=sum(routed.used_bytes for routed in members),
            kept_bytes=round(sum(routed.on_device * routed.source.stored_bytes for routed in members)),
            host_bytes=round(sum(routed.in_host * routed.source.stored_bytes for routed in members)),
            read_bytes=round(sum(routed.read_bytes for routed in members)),
            copied_bytes=round(sum(routed.copied_bytes for routed in members)),
        )
        for (device, tier), members in groups.items()
    )


def bytes_of_a_pass(
    compression: str | None, placement: Placement, work: Sequence[UnitWork], routed: Sequence[RoutedWork]
) -> GenerationEstimate:
    """Return the part of a generation estimate that needs no rates.

    Args:
        compression: of the layer files.
        placement: of the model.
        work, routed: of a pass with its units and its experts.
    """
    experts = experts_of(routed)
    decoding = [unit for unit in work if not unit.once]
    stays = sum(placed.counted for placed in placement.units if placed.tier in STAYING)
    return GenerationEstimate(
        compression,
        placed=placement.contents,
        stays_bytes=stays + sum(group.kept_bytes + group.host_bytes for group in experts),
        copied_bytes=sum(unit.uploaded for unit in decoding) + sum(group.copied_bytes for group in experts),
        read_bytes=sum(unit.streamed for unit in decoding) + sum(group.read_bytes for group in experts),
        experts=experts,
        placement=placement,
    )
