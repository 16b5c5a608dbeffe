"""What a token needs of experts: shares and bytes, compared with the placement and with the engine's own cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rabbitllm.engine.expert_pool import ExpertCache
from rabbitllm.engine.placement import Tier
from rabbitllm.estimate.predict import experts_of
from rabbitllm.estimate.routing import routed_work
from tests.estimate.test_work import drawn

MANY = {"num_experts": 12, "num_experts_per_tok": 3}


def test_experts_that_stay_are_read_by_no_token(tmp_path: Path) -> None:
    found = drawn(tmp_path / "m", "qwen3_moe", **MANY)
    work = routed_work(found)
    assert [routed.name for routed in work] == [source.name for source in found.experts]
    assert {(routed.tier, routed.on_device, routed.missed, routed.read_bytes) for routed in work} == {
        (Tier.RESIDENT, 1.0, 0.0, 0.0)
    }
    (own,) = experts_of(work)
    assert own.kept_bytes == own.stored_bytes == sum(source.stored_bytes for source in found.experts)
    assert own.used_bytes == own.stored_bytes * 3 / 12
    assert (own.count, own.used) == (3 * 12, 3 * 3)


def test_of_experts_that_come_and_go_what_is_kept_is_not_read(tmp_path: Path) -> None:
    found = drawn(tmp_path / "m", "qwen3_moe", room=700_000, **MANY)
    (pool,) = found.placement.pools
    assert 0 < pool.slots < 36
    work = routed_work(found)
    for routed in work:
        assert routed.on_device == pool.slots / 36
        assert routed.read_bytes == pytest.approx((1 - pool.slots / 36) * 3 * routed.expert_bytes)
        assert routed.copied_bytes == 0
    (own,) = experts_of(work)
    assert own.kept_bytes == pytest.approx(own.stored_bytes * pool.slots / 36, abs=1)


def test_a_prompt_touches_more_experts_than_a_token_and_never_more_than_there_are(tmp_path: Path) -> None:
    (routed, *_) = routed_work(drawn(tmp_path / "m", "qwen3_moe", room=0, **MANY))
    assert routed.touched_bytes(1) == pytest.approx(routed.used_bytes)
    assert routed.touched_bytes(2) == pytest.approx((3 + 3 * 9 / 12) * routed.expert_bytes)
    assert routed.touched_bytes(1000) == pytest.approx(12 * routed.expert_bytes)


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_used_alike_a_cache_finds_the_share_that_it_keeps(share: float) -> None:
    """What plans assume, of the engine's own cache."""
    experts, used, tokens = 64, 4, 2000
    cache, random = ExpertCache([experts], int(share * experts)), np.random.default_rng(0)
    found = 0
    for _ in range(tokens):
        chosen = np.sort(random.choice(experts, used, replace=False))
        cache.use(0, chosen, np.ones(used, np.int64), 1)
        slots = cache.slots_of(0, chosen)
        found += int(np.count_nonzero(slots >= 0))
        cache.admit(0, chosen[slots < 0], slots[slots >= 0])
    assert found / (used * tokens) == pytest.approx(share, abs=0.03)
