"""The measuring itself: what is generated, with the profiler on and off, and the memory that is told."""

from __future__ import annotations

import numpy as np
import psutil
import pytest

from rabbitllm.bench import BenchRequest, Measured, as_record, measure, peak_memory, shares
from rabbitllm.errors import OptionError
from tests.support.builders import build_checkpoint
from tests.support.fresh_process import in_a_fresh_process
from tests.support.load_requests import asked
from tests.support.tiny_models import one_thread, split  # noqa: F401  a fixture that applies by itself

REQUEST = BenchRequest(tokens=5, prompt_tokens=6, batch=2, turns=2)


@pytest.fixture(scope="module", params=["llama", "t5", "mamba2"])
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = build_checkpoint(tmp_path_factory.mktemp("bench") / "model", request.param, tied=request.param == "t5")
    split(folder)
    return measure(asked(folder, device="cpu", max_memory={"cpu": 0}), REQUEST)


def test_only_the_last_turn_is_profiled(measured: Measured) -> None:
    assert len(measured.trace.passes) == REQUEST.tokens
    assert [p.kind for p in measured.trace.passes][1:] == ["further"] * (REQUEST.tokens - 1)
    assert len(measured.turns) == REQUEST.turns


def test_times_and_bytes(measured: Measured) -> None:
    assert measured.first > 0
    assert measured.tokens_per_second == pytest.approx(REQUEST.batch / measured.further)
    further = measured.sums["further"]
    assert measured.per_token(further.disk_bytes) == further.disk_bytes / ((REQUEST.tokens - 1) * REQUEST.batch)


def test_the_placement_counts_tied_tensors_once(measured: Measured) -> None:
    rows = as_record(measured)["placement"]
    assert sum(row["bytes"] for row in rows) == sum(placed.counted for placed in measured.placement.units)
    assert sum(row["units"] for row in rows) == len(measured.placement.units)


def test_shares_of_a_pass_add_up(measured: Measured) -> None:
    further = measured.sums["further"]
    rows = list(shares(further))
    assert sum(share for _, _, share, _ in rows) == pytest.approx(1, abs=0.01)
    assert sum(seconds for _, seconds, _, _ in rows) == pytest.approx(further.wall / further.passes, rel=0.01)
    assert rows[-1][0] == "between layers"


def test_a_draft_for_a_batch_is_refused() -> None:
    with pytest.raises(OptionError, match="Drafts are for one sequence"):
        measure(asked("nothing", device="cpu"), REQUEST, draft="ngram")


@pytest.mark.long
def test_peak_memory_grows_with_use() -> None:
    in_a_fresh_process(check_peak_memory)


def check_peak_memory() -> None:
    before = peak_memory()
    assert before is not None
    growth = before - psutil.Process().memory_info().rss + (64 << 20)
    used = np.ones(growth, np.uint8)
    after = peak_memory()
    assert after is not None
    assert before + (48 << 20) < after < before + (128 << 20)
    del used
    assert peak_memory() == pytest.approx(after, rel=0.05)
