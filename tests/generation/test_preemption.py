"""Preempted requests get the tokens that they get alone, and continue where they were."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from rabbitllm.errors import OptionError
from rabbitllm.generation import _sequence
from rabbitllm.generation.cache_manager import CacheManager
from rabbitllm.generation.kv_cache import bytes_of, cache_argument, cost_by_cache, cost_by_config
from rabbitllm.generation.request import BatchStats, Delta, Event, FinishReason, Limits, Request
from rabbitllm.generation.transformers_api import has_dynamic_cache
from rabbitllm.storage.durable import Step, observe_steps
from tests.generation.submitting import Open, Submitted, alone, answered, answered_together, prompt
from tests.support.builders import FAMILIES, build_checkpoint, make_tokenizer
from tests.support.hybrid_families import HYBRIDS
from tests.support.tiny_models import plain_model, split

CAUSAL = sorted(name for name, family in FAMILIES.items() if not family.encoder_decoder)
SHOWN = ("llama", "gemma3", "qwen3_next")
"""Layers that keep every token, windows, states."""
LENGTHS = (12, 17, 9)
NEW_TOKENS = 24
ROOM_TOKENS = 20
"""For each text, where they grow to 41."""

each_family = pytest.mark.parametrize(
    "family", [*SHOWN, *(pytest.param(name, marks=pytest.mark.long) for name in CAUSAL if name not in SHOWN)]
)


@pytest.fixture(autouse=True)
def who_waits_begins_in_little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sequence, "RESERVED_TOKENS", 4)


@torch.no_grad()
def limits(model: Any, **options: Any) -> Limits:
    """Limits so low that sequences are preempted."""
    config = model.config.get_text_config(decoder=True)
    predicted = cost_by_config(config, model.dtype)
    measured = None
    if has_dynamic_cache(model):
        cache = DynamicCache(config=config)
        model(torch.tensor([prompt(9, 9)]), **{cache_argument(model): cache})
        measured = cost_by_cache(cache)
    room = len(LENGTHS) * (measured or predicted).bytes_for(ROOM_TOKENS)
    return Limits(cache_bytes=max(room, predicted.bytes_for(max(LENGTHS) + 1)), chunk=24, **options)


def endless(folder: Path, family: str, dtype: torch.dtype) -> Path:
    """A checkpoint whose answers have all of their tokens, on every processor: none of them ends one."""
    build_checkpoint(folder, family, dtype=dtype, tokenizer=False)
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    GenerationConfig(pad_token_id=0).save_pretrained(folder)
    return folder


def requests() -> list[Request]:
    return [Request(prompt(length, length), NEW_TOKENS, top_logprobs=2) for length in LENGTHS]


def assert_resumed(family: str, model: Any, stats: BatchStats) -> None:
    """All of them; but of models without attention, whose caches do not tell how many tokens are in them."""
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    tells = any(isinstance(layer, DynamicLayer) for layer in layers)
    assert stats.resumed == (stats.preempted if tells else 0)
    assert stats.aside_bytes == 0
    if family in SHOWN:
        assert stats.preempted > 0
        assert stats.aside_limit_bytes > 0


@each_family
def test_preempted_requests_get_their_tokens_alone(tmp_path: Path, open_batch: Open, family: str) -> None:
    folder = endless(tmp_path / family, family, torch.float32)
    plain = plain_model(folder, dtype=torch.float32).eval()
    batch, _ = open_batch(limits(plain), folder=split(folder))
    for answer in answered(batch, requests()):
        assert answer.tokens == alone(plain, answer.request)
    assert_resumed(family, plain, batch.stats)


def test_states_count_from_the_first_pass(tmp_path: Path, open_batch: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    shares, measure = list[float](), CacheManager.measure

    def measured(caches: CacheManager) -> None:
        held = sum(bytes_of(cache) for each in caches._running if (cache := each.cache or each.waiting_cache))
        shares.append(held / caches.memory.limit)
        measure(caches)

    monkeypatch.setattr(CacheManager, "measure", measured)
    for family, exact in (("qwen3_next", False), ("qwen3_next", True), ("jamba", False)):  # kept, and of `generate`
        folder = build_checkpoint(tmp_path / f"{family}-{exact}", FAMILIES[family], dtype=torch.float32)
        batch, _ = open_batch(limits(plain_model(folder, dtype=torch.float32), exact=exact), folder=split(folder))
        answered(batch, [Request(prompt(9, seed), 4) for seed in range(6)])
        assert 0.5 < max(shares) <= 1
        shares.clear()


def test_states_are_measured_of_a_request_that_ends_in_its_first_pass(tmp_path: Path, open_batch: Open) -> None:
    for family in ("qwen3_next", "jamba"):
        batch, _ = open_batch(folder=split(build_checkpoint(tmp_path / family, FAMILIES[family])))
        for passes in (2, 1):  # the first one alone
            before = batch.stats.passes
            answered_together(batch, [Request(prompt(9, seed), 1) for seed in range(6)])
            assert batch.stats.passes - before == passes


@pytest.mark.parametrize("rooms", [1, 100])
def test_module_states_belong_to_one_sequence(tmp_path: Path, open_batch: Open, rooms: int) -> None:
    """With room for few of them, and for all."""
    folder = build_checkpoint(tmp_path / "recurrent_gemma", HYBRIDS["recurrent_gemma"], dtype=torch.float32)
    plain = plain_model(folder, dtype=torch.float32).eval()
    few = limits(plain).cache_bytes
    assert few is not None
    batch, _ = open_batch(Limits(cache_bytes=rooms * few, chunk=24), folder=split(folder))
    for answer in answered(batch, requests()):
        assert answer.tokens == alone(plain, answer.request)
    assert batch.stats.resumed == 0
    assert (batch.stats.preempted > 0) is (rooms == 1)


@each_family
def test_exact_has_the_bits_without_preemption(tmp_path: Path, open_batch: Open, family: str) -> None:
    folder = endless(tmp_path / family, family, torch.bfloat16)
    plain = plain_model(folder, dtype=torch.bfloat16).eval()
    batch, _ = open_batch(limits(plain, exact=True), folder=split(folder), dtype="bfloat16")
    together = answered(batch, requests())
    stats = batch.stats
    assert_resumed(family, plain, stats)
    if stats.resumed < stats.preempted:
        return  # computed again as one prompt, which has other bits
    for answer in together:
        (single,) = answered(batch, [answer.request])
        assert answer.chosen == single.chosen
    assert batch.stats.preempted == stats.preempted


def test_a_half_computed_prompt_resumes(open_batch: Open, plain: Any, tmp_path: Path) -> None:
    token_bytes = cost_by_config(plain.config, torch.float32).bytes_for(1)
    chunk = 8
    written: list[int] = []
    batch, _ = open_batch(Limits(chunk=chunk, cache_bytes=88 * token_bytes, swap_folder=tmp_path))
    with observe_steps(lambda step: written.append(len(step.data))):
        for answer in answered(batch, [Request(prompt(10, 10), 60), Request(prompt(70, 70), 4)]):
            assert answer.tokens == alone(plain, answer.request)
    assert batch.stats.resumed == batch.stats.preempted == 1
    assert sum(written) // token_bytes in range(chunk, 70, chunk)


def test_a_full_disk_has_them_computed_again(
    open_batch: Open, plain: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def full(step: Step) -> None:
        if step.path == tmp_path:
            tried.append(step)
            if step.offset:  # some of it was written
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = open_files()
    with observe_steps(full):
        batch, _ = open_batch(limits(plain, swap_folder=tmp_path))
        several = answered(batch, requests())
    assert [answer.tokens for answer in several] == [alone(plain, answer.request) for answer in several]
    stats = batch.stats
    assert tried
    assert (stats.resumed, stats.aside_bytes) == (0, 0)
    assert stats.preempted > 0
    assert caplog.text.count("computed again") == 1  # and not a line for each
    assert open_files() == before


def test_the_folder_stays_empty(open_batch: Open, plain: Any, tmp_path: Path) -> None:
    listings: list[list[Path]] = []
    before = open_files()
    batch, _ = open_batch(limits(plain, swap_folder=tmp_path))
    several = [Submitted(request) for request in requests()]

    def receive(event: Event) -> None:
        several[0].receive(event)
        if batch.stats.aside_bytes:
            assert open_files() != before
            listings.append(list(tmp_path.iterdir()))

    for answer in several:
        batch.submit(answer.request, receive if answer is several[0] else answer.receive)
    for answer in several:
        answer.wait()
    batch.close()
    assert several[0].finished.finish is FinishReason.LENGTH  # and not because `receive` has raised
    assert listings
    assert not any(listings)
    assert not list(tmp_path.iterdir())
    assert open_files() == before


@pytest.mark.parametrize("seconds", [None, 0.0], ids=["one", "all"])
def test_cancelled_requests_leave_no_swapped_cache(
    open_batch: Open, plain: Any, tmp_path: Path, seconds: float | None
) -> None:
    """The last one has been preempted when the first one has so many tokens."""
    before = open_files()
    batch, _ = open_batch(limits(plain, swap_folder=tmp_path))
    several = [Submitted(request) for request in requests()]
    sizes: list[int] = []

    def receive(event: Event) -> None:
        several[0].receive(event)
        if isinstance(event, Delta) and (aside := batch.stats.aside_bytes) and not sizes:
            sizes.append(aside)
            for answer in several[1:] if seconds is None else several:
                assert answer.handle is not None
                answer.handle.cancel()

    for answer in several:
        answer.handle = batch.submit(answer.request, receive if answer is several[0] else answer.receive)
    for answer in several:
        answer.wait()
    assert sizes
    assert {answer.finished.finish for answer in several[1:]} == {FinishReason.CANCELLED}
    assert batch.stats.aside_bytes == 0
    assert open_files() == before


def test_swapping_can_be_switched_off(open_batch: Open, plain: Any, tmp_path: Path) -> None:
    steps: list[Step] = []
    with observe_steps(steps.append):
        batch, _ = open_batch(limits(plain, swap_bytes=0, swap_folder=tmp_path))
        for answer in answered(batch, requests()):
            assert answer.tokens == alone(plain, answer.request)
    assert not steps
    assert batch.stats.resumed == 0 < batch.stats.preempted


def test_without_a_disk_nothing_is_swapped_out(open_batch: Open, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rabbitllm.generation.cache_manager.default_folder", lambda: None)
    batch, _ = open_batch(limits(plain))
    assert batch.stats.aside_limit_bytes == 0


def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    for option in ({"swap_folder": tmp_path / "missing"}, {"swap_bytes": -1}):
        with pytest.raises(OptionError):
            Limits(**option)  # type: ignore[arg-type]


def open_files() -> set[str]:
    """That belong to no name; those of the test's own process."""
    places = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return {os.readlink(place) for place in places if os.path.lexists(place) and "(deleted)" in os.readlink(place)}
