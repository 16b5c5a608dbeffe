"""Models with streamed experts: transformers' bits, and only experts that a token needs are read.

A stack of experts behaves like an ordinary parameter of the same values.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import platform
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rabbitllm.engine import _expert_pool
from rabbitllm.engine._expert_pool import ExpertPool
from rabbitllm.engine.expert_finding import is_routed
from rabbitllm.engine.experts import ExpertStack
from rabbitllm.engine.placement import Tier
from rabbitllm.engine.span_reader import BLOCK, THROUGH_THE_CACHE, ReadMode, SpanReader
from rabbitllm.errors import AbsentWeightError, CorruptShardError, IncompleteSplitError, OptionError
from rabbitllm.quant.products import GroupedProduct
from rabbitllm.quant.turned import TurnedMatrix
from rabbitllm.storage.files import read_range
from rabbitllm.storage.readers import Readers, ReadRequest
from rabbitllm.telemetry.passes import EXPERTS_ON_DEVICE, EXPERTS_READ, READ
from tests.support.builders import build_checkpoint, reference_logits
from tests.support.hybrid_families import HYBRIDS
from tests.support.integer_products import tolerated
from tests.support.rounding import assert_as_near, exact_logits
from tests.support.tiny_models import (
    ALL,
    INPUT,
    assert_same,
    budget_that_keeps,
    dequantized,
    load,
    plain_model,
    run,
    split,
)

compiled_reads = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="compiled code reads there"
)
MANY = {"num_experts": 24, "num_experts_per_tok": 3}
FAMILIES = {
    "qwen3_moe": "num_experts",
    "mixtral": "num_local_experts",
    "deepseek_v3": "n_routed_experts",
    "qwen3_next": "num_experts",
    "jamba": "num_experts",
    "gpt_oss": "num_local_experts",
}
"""And what each calls the number of its experts."""
SHARES = (0.0, 0.25, 1.0)
"""Of the experts that are kept. Of so few, more would not be kept than that: transit slots hold the others."""


def with_share(directory: Path, share: float, **options: Any) -> Any:
    """A model that keeps this share of its experts."""
    budget = budget_that_keeps(directory, share) if 0 < share < 1 else int(share) * ALL
    model = load(directory, budget, **options)
    assert bool(share) == bool(not model.placement.pools or model.placement.pools[0].slots)
    return model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "model", "qwen3_moe", shards=2, dtype=torch.bfloat16, **MANY)


def routed(model: Any) -> dict[str, Any]:
    """The modules with experts."""
    return {name: module for name, module in model.named_modules() if is_routed(module)}


class Routing:
    """The choices of a model's routers: module -> expert -> number of calls."""

    def __init__(self, model: Any) -> None:
        self.used: dict[str, Counter[int]] = {}
        for name, module in routed(model).items():
            self.used[name] = Counter()
            module.register_forward_pre_hook(self._note(self.used[name]), with_kwargs=True)

    @staticmethod
    def _note(used: Counter[int]) -> Any:
        def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            index = args[1] if len(args) > 1 else kwargs["top_k_index"]
            used.update(set(index.flatten().tolist()))

        return note


class Reads:
    """Every run of bytes that is read while this is entered: (file, offset, bytes)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans: list[tuple[str, int, int]] = []
        whole = SpanReader.read

        def read(reader: SpanReader, spans: Any, buffer: memoryview) -> None:
            chosen = list(spans)
            self.spans += [(span.file, span.offset, span.nbytes) for span in chosen]
            whole(reader, chosen, buffer)

        monkeypatch.setattr(SpanReader, "read", read)


def every_way() -> Iterator[Any]:
    """Families and compressions; the short run has each family uncompressed and at one compression."""
    for index, family in enumerate(FAMILIES):
        for compression in (None, "4bit", "8bit"):
            later = compression is not None and compression != ("4bit", "8bit")[index % 2]
            yield pytest.param(compression, family, marks=pytest.mark.long if later else ())


@pytest.mark.parametrize(("compression", "family"), [*every_way()])
def test_bits_do_not_depend_on_where_experts_are(tmp_path: Path, family: str, compression: str | None) -> None:
    dtype = torch.float32 if list(FAMILIES).index(family) % 2 == 0 else torch.bfloat16
    experts = {FAMILIES[family]: 48}  # more than transit slots
    folder = build_checkpoint(tmp_path / "model", family, shards=3, dtype=dtype, **experts)
    plain = dequantized(folder, tmp_path / "reference", compression, dtype) if compression else folder
    expected = reference_logits(plain, INPUT, dtype)
    directory = split(folder, compression)
    for share in SHARES:
        model = with_share(directory, share)
        assert_same(run(model), expected)
        assert (Tier.ROUTED in {placed.tier for placed in model.placement.experts}) == (share < 1)


@pytest.mark.parametrize("kernel", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("share", SHARES)
def test_every_kernel_of_transformers_gets_its_experts(checkpoint: Path, kernel: str, share: float) -> None:
    plain = plain_model(checkpoint)
    plain.set_experts_implementation(kernel)
    model = with_share(split(checkpoint), share)
    model.set_experts_implementation(kernel)
    batch = torch.stack([INPUT[0], INPUT[0].flip(0)])
    with torch.inference_mode():
        assert torch.equal(model(batch).logits, plain(batch).logits)


@pytest.mark.parametrize("compression", [None, "4bit"])
def test_token_reads_only_its_routed_experts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    model = load(split(checkpoint, compression), 0, profiling=True)
    routing, reads = Routing(model), Reads(monkeypatch)
    with torch.inference_mode():
        cache = model(INPUT).past_key_values
        model.profiler.clear()
        before = {name: set(used) for name, used in routing.used.items()}
        for used in routing.used.values():
            used.clear()
        reads.spans.clear()
        model(torch.tensor([[7]]), past_key_values=cache)
    (pool,) = model.streamer.pools.values()
    expected, nbytes = Counter[tuple[str, int, int]](), 0
    for source in pool.sources:
        assert len(routing.used[source.name]) == MANY["num_experts_per_tok"]
        for expert in routing.used[source.name]:
            expected.update((span.file, span.offset, span.nbytes) for span in source.spans(expert))
            nbytes += source.expert_bytes
    files = {span[0] for span in expected}
    of_experts = {
        (s.file, s.offset, s.nbytes)
        for source in pool.sources
        for e in range(MANY["num_experts"])
        for s in source.spans(e)
    }
    assert Counter(span for span in reads.spans if span in of_experts) == expected
    assert files <= {span[0] for span in reads.spans}
    counted = [totals[EXPERTS_READ] for totals in model.profiler.layers.values() if EXPERTS_READ in totals]
    assert sum(total.count for total in counted) == len(pool.sources) * MANY["num_experts_per_tok"]
    assert sum(total.nbytes for total in counted) == nbytes
    read = [model.profiler.layers[source.name][READ] for source in pool.sources]
    assert sum(total.nbytes for total in read) == nbytes
    assert before  # the prompt routed too


def test_expert_is_one_read_with_views_as_weights(checkpoint: Path) -> None:
    model = load(split(checkpoint), 0)
    (pool,) = model.streamer.pools.values()
    for source in pool.sources:
        for expert in range(source.experts):
            (span,) = source.spans(expert)
            assert span.nbytes == source.expert_bytes
    source = pool.sources[0]
    memory = torch.zeros(source.nbytes, dtype=torch.uint8)
    for leaf in source.leaves.values():
        weight = leaf.weight(model, lambda part: memory[part.at : part.at + part.nbytes], 0)
        assert weight.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def test_resident_experts_are_ordinary_tensors_of_the_mapped_file(checkpoint: Path) -> None:
    """Neither stacked nor copied: a parameter of the genuine shape, whose experts lie apart in the mapped file."""
    model, plain = load(split(checkpoint)), plain_model(checkpoint)
    assert model.placement.is_resident
    for name, module in routed(model).items():
        for leaf, parameter in module._parameters.items():
            assert type(parameter) is torch.nn.Parameter
            assert torch.equal(parameter, plain.get_parameter(f"{name}.{leaf}"))
            assert parameter.stride(0) > parameter.shape[1] * parameter.shape[2]


def test_experts_stay_for_the_next_generation(checkpoint: Path) -> None:
    model = with_share(split(checkpoint), 0.25, profiling=True)
    model.generate(INPUT, max_new_tokens=4, do_sample=False)
    first = model.profiler.stages
    model.profiler.clear()
    model.generate(INPUT, max_new_tokens=4, do_sample=False)
    again = model.profiler.stages
    used = sum(first[tier].count for tier in (EXPERTS_ON_DEVICE, EXPERTS_READ) if tier in first)
    assert used == sum(again[tier].count for tier in (EXPERTS_ON_DEVICE, EXPERTS_READ) if tier in again)
    assert again[EXPERTS_READ].count < first[EXPERTS_READ].count
    (cache,) = (pool.cache for pool in model.streamer.pools.values())
    assert cache.occupied <= cache.slots


def test_next_start_is_warm(checkpoint: Path, tmp_path: Path) -> None:
    directory, file = split(checkpoint), tmp_path / "use.safetensors"
    model = with_share(directory, 0.25)
    expected = model.generate(INPUT, max_new_tokens=6, do_sample=False)
    model.save_expert_use(file)
    reads = {}
    for warm in (False, True):
        again = with_share(directory, 0.25, profiling=True)
        if warm:
            again.load_expert_use(file)
            (pool,) = again.streamer.pools.values()
            assert pool.cache.occupied == pool.cache.slots
            again.profiler.clear()
        assert torch.equal(again.generate(INPUT, max_new_tokens=6, do_sample=False), expected)
        reads[warm] = again.profiler.stages[EXPERTS_READ].count
    assert reads[True] < reads[False] - pool.cache.slots / 2


def test_use_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = build_checkpoint(tmp_path / "other", "qwen3_moe", dtype=torch.bfloat16, **{**MANY, "num_experts": 6})
    file = tmp_path / "use.safetensors"
    load(split(other), 0).save_expert_use(file)
    with pytest.raises(OptionError, match=r"has F64 \(2, 6\) .* expected F64 \(2, 24\)"):
        load(split(checkpoint), 0).load_expert_use(file)
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(CorruptShardError):
        load(split(checkpoint), 0).load_expert_use(file)


def test_use_counts_replace_no_other_file(checkpoint: Path, tmp_path: Path) -> None:
    model, file = load(split(checkpoint), 0), tmp_path / "use.safetensors"
    shard = next(checkpoint.glob("*.safetensors")).read_bytes()
    for name in (file.name, f"{file.name}.part"):
        (tmp_path / name).write_bytes(shard)
        with pytest.raises(OptionError, match=f"{name} exists and has no use counts; it was not changed"):
            model.save_expert_use(file)
        assert (tmp_path / name).read_bytes() == shard
        (tmp_path / name).unlink()
    for _ in range(2):
        model.save_expert_use(file)


def test_long_prompt_reads_each_expert_once_with_few_slots(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_expert_pool, "MAX_TRANSIT", 1)
    plain, model = plain_model(checkpoint), load(split(checkpoint), 0, profiling=True)
    (pool,) = model.placement.pools
    assert (pool.slots, pool.transit) == (0, 3)
    routing = Routing(model)
    prompt = torch.randint(0, 200, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(model(prompt).logits, plain(prompt).logits)
    assert all(len(used) > pool.transit for used in routing.used.values())
    (experts,) = model.streamer.pools.values()
    nbytes = sum(len(routing.used[source.name]) * source.expert_bytes for source in experts.sources)
    assert sum(model.profiler.layers[source.name][READ].nbytes for source in experts.sources) == nbytes


def test_long_prompt_multiplies_several_experts_while_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as half of the transit slots; the tokens' bits are those of experts that compute one by one."""
    wide = {"hidden_size": 256, "moe_intermediate_size": 256}
    checkpoint = build_checkpoint(tmp_path / "model", "qwen3_moe", dtype=torch.bfloat16, **MANY, **wide)
    directory, together = split(checkpoint, "4bit"), list[int]()
    multiply = GroupedProduct.multiply

    def spied(product: GroupedProduct, matrices: Sequence[Any], groups: Any) -> None:
        together.append(len(matrices))
        multiply(product, matrices, groups)

    monkeypatch.setattr(GroupedProduct, "multiply", spied)
    prompt = torch.randint(0, 200, (2, 400), generator=torch.Generator().manual_seed(0))
    results, most = [], []
    for slots in (1, 8):
        monkeypatch.setattr(_expert_pool, "MAX_TRANSIT", slots)
        model = load(directory, 0, exact=False)
        (pool,) = model.placement.pools
        assert (pool.slots, pool.transit) == (0, max(slots, 3))
        together.clear()
        with torch.inference_mode():
            results.append(model(prompt).logits)
        most.append(max(together))
    assert torch.equal(*results)
    assert most == [1, 4]


def experts_by_span(pool: ExpertPool) -> dict[tuple[str, int, int], tuple[str, int]]:
    """Run of bytes -> the module and the number of its expert; see `Reads`."""
    return {
        (span.file, span.offset, span.nbytes): (source.name, expert)
        for source in pool.sources
        for expert in range(source.experts)
        for span in source.spans(expert)
    }


def test_probable_experts_are_read_before_the_router_chooses(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the next layer, which are not read again if it chooses them, and change nothing if it does not."""
    monkeypatch.setattr(_expert_pool, "LEAST_AHEAD_BYTES", 0)
    plain, model = plain_model(checkpoint), with_share(split(checkpoint), 0.25)
    (pool,) = model.streamer.pools.values()
    routing, reads, ahead = Routing(model), Reads(monkeypatch), list[tuple[str, int]]()
    look_ahead, right = ExpertPool.look_ahead, 0
    of_expert = experts_by_span(pool)

    def spied(self: ExpertPool, module: int, x: Any) -> None:
        look_ahead(self, module, x)
        ahead.extend((self.sources[self._ahead[0]].name, expert) for expert in self._ahead[2])

    monkeypatch.setattr(ExpertPool, "look_ahead", spied)
    with torch.inference_mode():
        caches = [one(INPUT, use_cache=True).past_key_values for one in (plain, model)]
        for token in range(40):
            for used in routing.used.values():
                used.clear()
            ahead.clear()
            reads.spans.clear()
            results = [
                one(torch.tensor([[token]]), past_key_values=cache).logits
                for one, cache in zip((plain, model), caches, strict=True)
            ]
            assert torch.equal(*results)
            chosen = {(source.name, expert) for source in pool.sources for expert in routing.used[source.name]}
            wanted, right = chosen | {*ahead}, right + len(chosen & {*ahead})
            counts = Counter(of_expert[span] for span in reads.spans if span in of_expert)
            assert {*counts} <= wanted
            assert {*counts.values()} <= {1}
    assert right
    assert pool.sources[0].name not in {name for name, _ in ahead}


def test_experts_that_a_batch_used_often_are_read_ahead(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the next layer attends; each expert is read once a pass, and the results are those of the class."""
    plain, model = plain_model(checkpoint), with_share(split(checkpoint), 0.25)
    (pool,) = model.streamer.pools.values()
    routing, reads, ahead = Routing(model), Reads(monkeypatch), list[tuple[str, int]]()
    read_again_ahead, right, rows = ExpertPool.read_again_ahead, 0, 16
    of_expert = experts_by_span(pool)

    def spied(self: ExpertPool, module: int) -> None:
        read_again_ahead(self, module)
        ahead.extend((self.sources[self._ahead[0]].name, expert) for expert in self._ahead[2])

    monkeypatch.setattr(ExpertPool, "read_again_ahead", spied)
    prompts = torch.stack([INPUT[0].roll(row) for row in range(rows)])
    with torch.inference_mode():
        caches = [each(prompts, use_cache=True).past_key_values for each in (plain, model)]
        for token in range(6):
            for used in routing.used.values():
                used.clear()
            ahead.clear()
            reads.spans.clear()
            tokens = torch.arange(rows)[:, None] + token
            pairs = zip((plain, model), caches, strict=True)
            assert torch.equal(*(each(tokens, past_key_values=cache).logits for each, cache in pairs))
            chosen = {(source.name, expert) for source in pool.sources for expert in routing.used[source.name]}
            right += len(chosen & {*ahead})
            counts = Counter(of_expert[span] for span in reads.spans if span in of_expert)
            assert {*counts} <= chosen | {*ahead}
            assert {*counts.values()} <= {1}
    assert right >= 10
    assert pool.sources[0].name not in {name for name, _ in ahead}


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_pass_after_a_failed_read_is_right(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    expected = reference_logits(checkpoint, INPUT, torch.bfloat16)
    model, whole = with_share(split(checkpoint), share), SpanReader.read
    remaining = [5]

    def read(reader: SpanReader, spans: Any, buffer: memoryview) -> None:
        if threading.current_thread().name.startswith("experts"):
            remaining[0] -= 1
            if remaining[0] == 0:
                buffer[:64] = b"\xff" * 64
                raise OSError(5, "the disk said no")
        whole(reader, spans, buffer)

    monkeypatch.setattr(SpanReader, "read", read)
    with torch.inference_mode(), pytest.raises(OSError, match="the disk said no"):
        model(INPUT)
    assert_same(run(model), expected)


def test_copy_after_a_failed_read_is_right(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a pass, which would end the first one: a read that was begun for that one does not come into another."""
    directory, whole = split(checkpoint), SpanReader.read
    model = load(directory, 0)
    stack, expected = (next(iter(routed(each).values())).down_proj for each in (model, load(directory)))
    (pool,) = model.streamer.pools.values()
    first, second = (slot.memory.data_ptr() for slot in pool._transit[:2])
    times, again, over = Counter[int](), threading.Event(), threading.Event()

    def read(reader: SpanReader, spans: Any, buffer: memoryview) -> None:
        place = np.frombuffer(buffer, np.uint8).ctypes.data
        times[place] += 1
        is_first = times[place] == 1
        if is_first and place == first:
            raise OSError(5, "the disk said no")
        if is_first and place == second:
            again.wait(0.3)
        whole(reader, spans, buffer)
        if place == second:
            (over if is_first else again).set()
            over.wait(600)

    monkeypatch.setattr(SpanReader, "read", read)
    with pytest.raises(OSError, match="the disk said no"):
        stack[torch.arange(24)]
    assert torch.equal(stack[torch.arange(6, 24)], expected[6:])


def test_pass_after_an_interrupt_is_right(checkpoint: Path) -> None:
    expected = reference_logits(checkpoint, INPUT, torch.bfloat16)
    model = with_share(split(checkpoint), 0.25)
    last = list(routed(model).values())[-1]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = last.act_fn.register_forward_pre_hook(interrupt)
    with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
        model(INPUT)
    handle.remove()
    assert_same(run(model), expected)


@pytest.mark.parametrize("sent", [0, 1, 4])
def test_interrupt_while_experts_are_requested(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, sent: int) -> None:
    """Slots were assigned to experts that were not read: their former content is not taken for these experts."""
    expected = reference_logits(checkpoint, INPUT, torch.bfloat16)
    model = with_share(split(checkpoint), 0.25)
    with torch.inference_mode():
        model(INPUT.flip(1))  # other experts are in the slots now
    whole, remaining = ExpertPool._send, [sent]

    def send(*args: Any, **kwargs: Any) -> None:
        remaining[0] -= 1
        if remaining[0] < 0:
            raise KeyboardInterrupt
        whole(*args, **kwargs)

    monkeypatch.setattr(ExpertPool, "_send", send)
    with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
        model(INPUT)
    monkeypatch.undo()
    assert_same(run(model), expected)


@pytest.mark.parametrize("way", [THROUGH_THE_CACHE, ReadMode(drop=True), ReadMode(direct=True)])
def test_experts_that_do_not_fit_leave_the_page_cache(
    checkpoint: Path, way: ReadMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = split(checkpoint)
    expected = run(load(directory))
    monkeypatch.setattr("rabbitllm.engine.load.choose_read_mode", lambda *_: way)
    model = load(directory, 0)
    (pool,) = model.streamer.pools.values()
    assert_same(run(model), expected)
    assert pool._disk.mode == way
    assert any(span.nbytes % BLOCK for source in pool.sources for span in source.spans(0))


@compiled_reads
@pytest.mark.parametrize("compression", [None, "4bit", "4bit-double"])
def test_compiled_code_reads_what_was_compared(
    checkpoint: Path, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once an expert was compared with its checksums. What compiled code cannot read is read as before, as are files
    that have changed."""
    directory, sent = split(checkpoint, compression), list[ReadRequest]()
    expected = run(load(directory))
    monkeypatch.setattr("rabbitllm.engine.load.choose_read_mode", lambda *_: ReadMode(direct=True))
    send, wait = Readers.send, ReadRequest.wait
    monkeypatch.setattr(Readers, "send", lambda self, requests: (sent.extend(requests), send(self, requests)))
    model = with_share(directory, 0.25)
    assert_same(run(model), expected)
    sent.clear()
    assert_same(run(model), expected)
    (pool,) = model.streamer.pools.values()
    assert pool._disk.mode == ReadMode(direct=True)
    assert sent
    assert all(request.wait() for request in sent)
    with monkeypatch.context() as patch:
        patch.setattr(ReadRequest, "wait", lambda self: wait(self) and False)
        assert_same(run(model), expected)
    spans = [span for expert in range(pool.sources[0].experts) for span in pool.sources[0].spans(expert)]

    def flip() -> None:
        with open(directory / spans[0].file, "r+b") as file:
            for span in spans:
                byte = read_range(Path(file.name), span.offset, 1)[0]
                file.seek(span.offset)
                file.write(bytes([byte ^ 1]))

    flip()
    with pytest.raises(IncompleteSplitError, match=re.escape(spans[0].file)):
        run(model)
    flip()
    assert_same(run(model), expected)


@compiled_reads
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_threads_of_a_dropped_model_end(
    checkpoint: Path, is_interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its memory goes with them, also if a pass broke off in the middle of reads."""
    directory = split(checkpoint)
    monkeypatch.setattr("rabbitllm.engine.load.choose_read_mode", lambda *_: ReadMode(direct=True))
    before = {*threading.enumerate()}
    model = with_share(directory, 0.25)
    run(model)
    (pool,) = model.streamer.pools.values()
    assert pool._readers is not None
    assert pool._readers.requests
    memory, first = weakref.ref(pool), INPUT[:, :1]
    if is_interrupted:
        with monkeypatch.context() as patch:
            patch.setattr(ExpertPool, "_wait", interrupt)
            with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
                model(first)
        assert any(isinstance(slot.pending, _expert_pool._Reading) for slot in (*pool._slots, *pool._transit))
    del model, pool
    gc.collect()
    assert memory() is None
    readers = [thread for thread in {*threading.enumerate()} - before if thread.name == "experts-cpu"]
    for thread in readers:
        thread.join(600)
    assert not any(thread.is_alive() for thread in readers)


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@compiled_reads
def test_few_descriptors_are_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that stay open for compiled code take half of a process's descriptors at most."""
    import resource

    folder = build_checkpoint(tmp_path / "m", "qwen3_moe", dtype=torch.bfloat16, **MANY, num_hidden_layers=12)
    directory = split(folder)
    expected = run(load(directory))
    monkeypatch.setattr("rabbitllm.engine.load.choose_read_mode", lambda *_: ReadMode(direct=True))
    model = with_share(directory, 0.25)
    (pool,) = model.streamer.pools.values()
    limits, opened = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
    for room, tables in ((8, range(1)), (opened + 8, range(1, 12))):
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + room, limits[1]))
        try:
            assert_same(run(model), expected)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert sum(table is not None for table in pool._tables.values()) in tables
        pool._tables.clear()
    assert_same(run(model), expected)
    assert None not in pool._tables.values()


@compiled_reads
def test_a_fill_that_was_interrupted_is_not_over(checkpoint: Path) -> None:
    readers = Readers.of(1, "interrupted", ())
    assert readers is not None
    calls = list[bool]()

    def finish(is_read: bool) -> None:
        calls.append(is_read)
        if len(calls) == 1:
            raise KeyboardInterrupt

    reading = _expert_pool._Reading(ReadRequest(readers), finish)
    with pytest.raises(KeyboardInterrupt):
        reading.result()
    for _ in range(2):
        reading.result()
    assert calls == [False, False]


def test_without_a_split_experts_are_read_from_shards(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "qwen3_moe", shards=3, dtype=torch.bfloat16, **MANY)
    from rabbitllm import AutoModel

    expected = reference_logits(folder, INPUT, torch.bfloat16)
    for budget in (0, budget_that_keeps(split(folder), 0.25), ALL):
        model = AutoModel.from_pretrained(str(folder), split=False, device="cpu", max_memory={"cpu": budget})
        assert_same(run(model), expected)
        assert {placed.tier for placed in model.placement.experts} == {Tier.RESIDENT if budget == ALL else Tier.ROUTED}


def test_experts_from_codes_are_close_to_dequantized_ones(tmp_path: Path) -> None:
    wide = {"hidden_size": 128, "moe_intermediate_size": 64, **MANY}
    folder = build_checkpoint(tmp_path / "model", "qwen3_moe", shards=2, dtype=torch.float32, **wide)
    for compression in ("4bit", "8bit"):
        expected = reference_logits(
            dequantized(folder, tmp_path / compression, compression, torch.float32), INPUT, torch.float32
        )
        logits = {}
        for share in SHARES:
            logits[share] = run(with_share(split(folder, compression), share, exact=False)).logits
            off = (logits[share] - expected.logits).norm() / expected.logits.norm()
            assert off < tolerated(compression)
        assert torch.equal(logits[0.0], logits[0.25])


@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
def test_experts_of_turned_matrices_are_multiplied_from_their_codes(tmp_path: Path, family: str) -> None:
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
    }
    kind = HYBRIDS["llama4"] if family == "llama4" else family
    folder = build_checkpoint(tmp_path / "model", kind, dtype=torch.bfloat16, seed=1, **sizes)
    directory = split(folder, "4bit")
    plain = dequantized(folder, tmp_path / "plain", "4bit", torch.bfloat16)
    expected, logits = reference_logits(plain, INPUT, torch.bfloat16).logits, []
    for budget in (0, ALL):
        model = load(directory, budget, exact=False, fast_bfloat16=False)
        for module in routed(model).values():
            assert module.gate_up_proj.is_coded
            if budget:
                weight = next(module.down_proj.each([0]))
                assert type(weight.matrix) is TurnedMatrix
                assert module.down_proj.supply.stays("down_proj")
        logits.append(run(model).logits)
    assert torch.equal(*logits)
    assert_as_near(logits[0], expected, exact_logits(plain, INPUT), routed=True, scheme="4bit")
    model(INPUT).logits.sum().backward()  # with what a pass in inference mode has kept


def test_llama_4_with_one_matrix_from_codes(tmp_path: Path) -> None:
    """Rows of the other one are no whole segments, so it is an ordinary parameter in memory."""
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    every = {"num_local_experts": 2, "num_experts_per_tok": 2}  # of which rounding can choose no others
    folder = build_checkpoint(tmp_path / "model", HYBRIDS["llama4"], dtype=torch.bfloat16, **sizes, **every)
    directory = split(folder, "4bit")
    model, expected = load(directory, exact=False, fast_bfloat16=False), run(load(directory))
    (experts,) = routed(model).values()
    assert experts.gate_up_proj.is_coded
    assert type(experts.down_proj) is torch.nn.Parameter
    result = run(model).logits
    assert (result - expected.logits).norm() < expected.logits.norm() / 32
    assert torch.equal(result, run(load(directory, 0, exact=False, fast_bfloat16=False)).logits)
    model(INPUT).logits.sum().backward()  # the result of the shared expert is not changed in place


def test_unequal_experts_are_streamed_with_their_layer(checkpoint: Path) -> None:
    """One of them has another dtype, so its bytes have another layout."""
    shard = sorted(checkpoint.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    odd = next(name for name in tensors if ".experts.5." in name)
    save_file({**tensors, odd: tensors[odd].float()}, shard, metadata={"format": "pt"})
    expected = reference_logits(checkpoint, INPUT, torch.bfloat16)
    for budget in (0, ALL):
        model = load(split(checkpoint), budget)
        assert len(model.placement.experts) == len(routed(model)) - 1
        assert_same(run(model), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_llama_4_reads_only_routed_experts(tmp_path: Path, dtype: torch.dtype) -> None:
    """Its own forward multiplies by all of them, and transformers has no registry for it."""
    folder = build_checkpoint(tmp_path / "model", HYBRIDS["llama4"], dtype=dtype)
    expected = reference_logits(folder, INPUT, dtype)
    directory = split(folder)
    for budget in (0, ALL):
        assert_same(run(load(directory, budget)), expected)
    model = load(directory, 0, profiling=True)
    with torch.inference_mode():
        model(torch.tensor([[7]]))
    (pool,) = model.streamer.pools.values()
    read = [model.profiler.layers[source.name][READ].nbytes for source in pool.sources]
    assert read == [source.expert_bytes for source in pool.sources]
    assert [source.experts for source in pool.sources] == [4] * len(read)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class TensorExperts:
    """Provides experts from ordinary tensors; `asked` lists the requested ones."""

    valid, is_on_device = 2, False

    def __init__(self, **leaves: torch.Tensor) -> None:
        self.leaves = leaves
        self.asked: list[int] = []

    def each(self, leaf: str, experts: Sequence[int]) -> Iterator[torch.Tensor]:
        for expert in experts:
            self.asked.append(expert)
            yield self.leaves[leaf][expert]

    def order(self, experts: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Experts of even indices are in memory."""
        late = [index for index, expert in enumerate(experts) if expert % 2]
        return [index for index in range(len(experts)) if index not in late], late, []

    def numbers(self, index: torch.Tensor) -> list[int]:
        return list(index.flatten().tolist())

    def ends(self, ends: torch.Tensor, rows: int) -> list[int]:
        return self.numbers(ends)

    def stack(self, leaf: str) -> ExpertStack:
        whole = self.leaves[leaf]
        return ExpertStack(self, leaf, whole.shape, whole.dtype, whole.device)


def experts(count: int = 6, rows: int = 32, columns: int = 64, dtype: torch.dtype = torch.float32) -> TensorExperts:
    return TensorExperts(weight=torch.randn(count, rows, columns).to(dtype))


def groups(sizes: Sequence[int]) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).int()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [[1, 0, 3, 0, 0, 2], [0, 0, 0, 0, 0, 1], [5, 1, 1, 1, 1, 40], [0, 0, 0, 0, 0, 0]])
def test_grouped_products_have_the_bits_of_torchs_own(dtype: torch.dtype, sizes: list[int]) -> None:
    source = experts(dtype=dtype)
    x = torch.randn(sum(sizes), 64).to(dtype)
    with torch.no_grad():
        expected = nn.functional.grouped_mm(x, source.leaves["weight"].transpose(-2, -1), offs=groups(sizes))
        actual = nn.functional.grouped_mm(x, source.stack("weight").transpose(-2, -1), offs=groups(sizes))
    assert torch.equal(actual, expected)
    used = [expert for expert, size in enumerate(sizes) if size]
    assert source.asked == [e for e in used if not e % 2] + [e for e in used if e % 2]  # those that are here come first


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_weights(dtype: torch.dtype) -> None:
    source = experts(rows=64, columns=32, dtype=dtype)
    x, ends = torch.randn(6, 64).to(dtype), groups([1, 2, 0, 0, 3, 0])
    expected = nn.functional.grouped_mm(x, source.leaves["weight"], offs=ends)
    assert torch.equal(nn.functional.grouped_mm(x, source.stack("weight"), offs=ends), expected)
    fallback = torch.ops.transformers.grouped_mm_fallback
    assert torch.equal(fallback(x, source.stack("weight"), ends), fallback(x, source.leaves["weight"], ends))
    assert source.asked == [0, 4, 1] * 2


def test_single_experts_are_requested_singly() -> None:
    source = experts()
    stack, whole = source.stack("weight"), source.leaves["weight"]
    assert torch.equal(stack[3], whole[3])
    assert torch.equal(stack[torch.tensor(2)], whole[2])
    assert torch.equal(stack[-1], whole[-1])
    assert torch.equal(stack.transpose(1, 2)[1], whole.transpose(1, 2)[1])
    assert source.asked == [3, 2, 5, 1]
    with pytest.raises(IndexError, match="6 experts"):
        stack[6]


def test_several_experts_are_copied_and_each_is_requested_once() -> None:
    source = experts()
    index = torch.tensor([[4, 1], [4, 4]])
    assert torch.equal(source.stack("weight")[index], source.leaves["weight"][index])
    assert source.asked == [1, 4]


def test_other_operations_get_all_experts() -> None:
    source = experts()
    stack, whole = source.stack("weight"), source.leaves["weight"]
    assert torch.equal(stack + 1, whole + 1)
    assert torch.equal(stack[2:4], whole[2:4])
    assert torch.equal(stack.sum(0), whole.sum(0))
    assert torch.equal(torch.bmm(stack, whole.mT), torch.bmm(whole, whole.mT))
    assert torch.equal(stack.mT, whole.mT)
    assert torch.equal(stack[torch.tensor([True, False] * 3)], whole[torch.tensor([True, False] * 3)])


def test_stack_is_a_parameter_like_any_other() -> None:
    source = experts(dtype=torch.bfloat16)
    module = nn.Module()
    module.weight = nn.Parameter(source.stack("weight"))
    assert isinstance(module.weight, nn.Parameter)
    assert (module.weight.shape, module.weight.dtype, module.weight.device.type) == ((6, 32, 64), torch.bfloat16, "cpu")
    assert sum(parameter.numel() for parameter in module.parameters()) == 6 * 32 * 64
    assert source.asked == []
    assert "by expert" in repr(module.weight)
    assert torch.equal(copy.deepcopy(source.stack("weight")) * 1, source.leaves["weight"])


def test_gradients_pass_through_to_the_inputs() -> None:
    source = experts()
    ends = groups([1, 0, 2, 0, 0, 1])
    inputs = [torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    for x, weight in zip(inputs, (source.leaves["weight"], source.stack("weight")), strict=True):
        nn.functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends).square().sum().backward()
    assert torch.allclose(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]


class Experts(nn.Module):
    """The attributes that transformers' kernels use."""

    has_gate, has_bias, is_transposed, has_post_expert_norm, _is_expert_parallel = True, False, False, False, False
    act_fn = nn.SiLU()
    num_experts = 6

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated: torch.Tensor = self.act_fn(gate) * up
        return activated


@pytest.mark.parametrize("kernel", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_transformers_kernels_request_only_routed_experts(kernel: str, tokens: int) -> None:
    source = TensorExperts(gate_up_proj=torch.randn(6, 64, 48), down_proj=torch.randn(6, 48, 32))
    index = torch.stack([torch.randperm(5)[:2] for _ in range(tokens)])  # never the last one
    x, worth = torch.randn(tokens, 48), torch.rand(tokens, 2)
    plain, stacked = Experts(), Experts()
    for leaf, weight in source.leaves.items():
        setattr(plain, leaf, nn.Parameter(weight))
        setattr(stacked, leaf, nn.Parameter(source.stack(leaf)))
    with torch.no_grad():
        expected, actual = (ALL_EXPERTS_FUNCTIONS[kernel](module, x, index, worth) for module in (plain, stacked))
    assert torch.equal(actual, expected)
    assert sorted(source.asked) == sorted([*set(index.flatten().tolist())] * 2)


def test_readers_of_memory_get_all_experts_or_an_error() -> None:
    source = experts()
    stack, whole = source.stack("weight"), source.leaves["weight"]
    assert np.array_equal(stack.numpy(), whole.numpy())
    assert np.array_equal(np.asarray(stack), whole.numpy())
    assert stack.tolist() == whole.tolist()
    assert torch.equal(torch.from_dlpack(stack), whole)
    with pytest.raises(AbsentWeightError, match="experts are read from the disk"):
        stack.data_ptr()
    with pytest.raises(AbsentWeightError, match="cannot pickle"):
        torch.save(stack, io.BytesIO())
