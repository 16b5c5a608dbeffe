"""The experts that a token needs when experts are streamed, and the share that is in memory. Pure: measures nothing.

Which experts a token is routed to depends on its text. The estimates here assume that all experts of a layer are used
equally and independently for each token: then memory that keeps a share c of them has an expert that a token needs with
probability c, whatever the cache's policy. Models use some experts more than others, and a cache keeps those, so in
practice more are found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rabbitllm.engine.load_plan import LoadPlan
from rabbitllm.engine.placement import Pool, Tier


@dataclass(frozen=True, slots=True)
class RoutedWork:
    """The work of a pass with the experts of one module.

    Attributes:
        name: the module's path in the model.
        unit: the unit that contains it.
        device: the device that computes them.
        tier: `ROUTED` if they are streamed; else they are resident.
        is_host: whether that device computes in the host memory where layer files are mapped.
        experts: number of experts.
        used: number of them that a token uses.
        expert_bytes: of one, on disk.
        on_device: the share of them that is kept where they compute; 1 if they are resident.
        in_host: the share that is kept in pinned host memory.
        kind: equal for modules whose calls take the same time.
    """

    name: str
    unit: str
    device: str
    tier: Tier
    is_host: bool
    experts: int
    used: int
    expert_bytes: int
    on_device: float
    in_host: float
    kind: tuple[Any, ...]

    @property
    def missed(self) -> float:
        """The share that is not kept in memory."""
        return max(1.0 - self.on_device - self.in_host, 0.0)

    @property
    def used_bytes(self) -> int:
        """Bytes of the experts that a token uses."""
        return self.used * self.expert_bytes

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
        return self.experts * self.expert_bytes * (1 - (1 - self.used / self.experts) ** tokens)


def routed_work(drawn: LoadPlan) -> tuple[RoutedWork, ...]:
    """Return the work of a pass with experts, module by module, in its order."""
    known = {source.name: source for source in drawn.experts}
    pools = {pool.device: pool for pool in drawn.placement.pools}
    hosts = {budget.device for budget in drawn.placement.budgets if budget.is_host}
    found = []
    for placed in drawn.placement.experts:
        source = known[placed.unit]
        routed = placed.tier is Tier.ROUTED
        on_device, in_host = _shares(pools[placed.device]) if routed else (1.0, 0.0)
        forms = tuple((leaf.shape, leaf.is_view, leaf.packed) for leaf in source.leaves.values())
        found.append(
            RoutedWork(
                name=source.name,
                unit=source.unit,
                device=placed.device,
                tier=placed.tier,
                is_host=placed.device in hosts,
                experts=source.experts,
                used=source.used,
                expert_bytes=source.expert_bytes,
                on_device=on_device,
                in_host=in_host,
                kind=(placed.device, placed.tier, source.experts, source.used, source.nbytes, forms),
            )
        )
    return tuple(found)


def by_unit(work: Iterable[RoutedWork]) -> dict[str, list[RoutedWork]]:
    """Group the modules by unit."""
    found: dict[str, list[RoutedWork]] = {}
    for routed in work:
        found.setdefault(routed.unit, []).append(routed)
    return found


def _shares(pool: Pool) -> tuple[float, float]:
    return pool.slots / pool.experts, pool.host_slots / pool.experts
