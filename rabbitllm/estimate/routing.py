"""What a token needs of experts that come and go, and how much of it is at hand. Pure: measures nothing.

Which experts a token will be routed to is in its text. What is said here holds if all experts of a layer were used
alike, each token choosing by itself: then memory that keeps a share c of them has what a token needs with probability
c, whatever the cache does. Models use some experts more than others, and a cache keeps those, so they find more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rabbitllm.engine.load_plan import LoadPlan
from rabbitllm.engine.placement import Pool, Tier


@dataclass(frozen=True, slots=True)
class RoutedWork:
    """What a pass does with the experts of one module.

    Attributes:
        name: the module's path in the model.
        unit: the unit that it is in.
        device: where they compute.
        tier: `ROUTED` if they are streamed; else they are resident.
        is_host: whether that device computes where layer files are mapped.
        experts: how many there are.
        used: by a token.
        expert_bytes: of one, on disk.
        on_device: the share of them that is kept where they compute; 1 if they are resident.
        in_host: the share that is kept in pinned host memory.
        kind: equal for modules that differ in nothing that takes time.
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
        """The share that is kept nowhere."""
        return max(1.0 - self.on_device - self.in_host, 0.0)

    @property
    def used_bytes(self) -> int:
        """Of the experts of a token."""
        return self.used * self.expert_bytes

    @property
    def read_bytes(self) -> float:
        """What a token is expected to read."""
        return self.missed * self.used_bytes

    @property
    def copied_bytes(self) -> float:
        """What a token is expected to copy from host memory to a device that shares none."""
        return 0.0 if self.is_host else (1.0 - self.on_device) * self.used_bytes

    def touched_bytes(self, tokens: int) -> float:
        """Of the distinct experts that so many tokens are expected to use."""
        return self.experts * self.expert_bytes * (1 - (1 - self.used / self.experts) ** tokens)


def routed_work(drawn: LoadPlan) -> tuple[RoutedWork, ...]:
    """What a pass does with experts, module by module, in its order."""
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
    """The modules of each unit."""
    found: dict[str, list[RoutedWork]] = {}
    for routed in work:
        found.setdefault(routed.unit, []).append(routed)
    return found


def _shares(pool: Pool) -> tuple[float, float]:
    return pool.slots / pool.experts, pool.host_slots / pool.experts
