"""Scoring many texts: one pass, within bounds, each as it would be alone, and nothing left of what went wrong."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rabbitllm.base.options import RunOptions
from rabbitllm.engine.load import load_model
from rabbitllm.engine.placement import Tier
from rabbitllm.errors import BatchError, NotANumberError, OptionError, RabbitLLMError, ScoringError
from rabbitllm.generation.memory import HEAP_BLOCK_BYTES, PassCost, cost_of_a_pass, repeated_bytes
from rabbitllm.generation.scoring import Room, ScoredText, score
from rabbitllm.generation.scoring.micro_batches import TextLayout
from rabbitllm.generation.scoring.score import (
    MAX_TOKENS,
    MIN_TOKENS,
    RESIDENT_BATCHES,
    ScoringPlan,
    layout_of,
    limits_of,
    next_logits,
    token_logprobs,
)
from tests.generation.scoring.compared_with_plain import alone, assert_alike, by_index, scored, texts_for
from tests.support.builders import FAMILIES, SINGLE_NAME, VOCABULARY_SIZE, Family, build_checkpoint, read_tensors
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.tiny_models import ALL, load, plain_model, split

STREAMED = 60_000
"""Bytes with which most of a tiny model streams."""
SMALL = 40
"""Tokens of a micro-batch, so that there are several."""


@contextlib.contextmanager
def rows_of_logits(model: Any) -> Iterator[list[int]]:
    """How many rows of logits the head makes, each time."""
    rows: list[int] = []
    ordinary = model.lm_head.forward

    def forward(states: torch.Tensor) -> Any:
        rows.append(states.shape[-2])
        return ordinary(states)

    model.lm_head.forward = forward
    yield rows
    del model.lm_head.forward


@contextlib.contextmanager
def visits(model: Any) -> Iterator[Counter[str]]:
    """How often the weights of each unit that streams were brought, and those of its experts."""
    counted: Counter[str] = Counter()
    named = [placed.unit for placed in model.placement.units if placed.tier is Tier.STREAMED]
    named += [source.name for pool in model.streamer.pools.values() for source in pool.sources]

    def counts(name: str) -> Callable[..., None]:
        return lambda *args: counted.update([name])

    hooks = [model.get_submodule(name).register_forward_pre_hook(counts(name)) for name in named]
    try:
        yield counted
    finally:
        assert counted.keys() <= set(named)
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("exact", [False, True])
def test_one_pass_for_all_texts(split_folder: Path, plain: Any, exact: bool) -> None:
    model = load(split_folder, STREAMED)
    plans: list[ScoringPlan] = []
    with visits(model) as brought:
        results = by_index(score(model, texts_for(), Room(tokens=SMALL, exact=exact), on_plan=plans.append))
    (plan,) = plans
    assert len(plan.passes) == 1
    assert len(plan.passes[0]) > 3
    assert len(brought) == sum(placed.tier is Tier.STREAMED for placed in model.placement.units) > 2
    assert set(brought.values()) == {1}
    expected = [alone(plain, text) for text in texts_for()]
    assert_alike(results, expected)
    if exact:
        assert list(results.values()) == sorted(expected, key=lambda result: list(results).index(result.index))


@pytest.mark.parametrize("budget", [STREAMED, ALL], ids=["streamed", "resident"])
@pytest.mark.parametrize("tokens", [4096, 120])
def test_a_shared_context_is_computed_once(split_folder: Path, plain: Any, tokens: int, budget: int) -> None:
    """Also where not all of them are in the same micro-batch."""
    model = load(split_folder, budget)
    context = tuple(range(5, 105))
    texts = [ScoredText(index, (*context, index + 3), (7, 8, index)) for index in range(10)]
    plans: list[ScoringPlan] = []
    results = by_index(score(model, texts, Room(tokens=tokens), on_plan=plans.append))
    assert_alike(results, [alone(plain, text) for text in texts])
    assert len(plans[0].passes[0]) == (1 if tokens > 1000 else 2)
    assert plans[0].tokens == 10 * 103
    assert plans[0].computed == 100 + 10 * 3


FORMS = {
    "llama": TextLayout.PACKED,
    "gemma2": TextLayout.PACKED,  # soft caps of attention and of logits, sliding windows
    "gpt_oss": TextLayout.PACKED,  # experts, attention sinks
    "deepseek_v3": TextLayout.PACKED,  # latent attention, experts
    "qwen3_next": TextLayout.FILLED,  # states and attention, experts
    "mamba2": TextLayout.FILLED,
    "bloom": TextLayout.FILLED,
}
SHORT = ("gemma2", "qwen3_next")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in sorted(FORMS)]
)
def test_families(tmp_path: Path, family: str) -> None:
    folder = build_checkpoint(tmp_path / family, family, dtype=torch.float32)
    plain, directory = plain_model(folder, dtype=torch.float32).eval(), split(folder)
    expected = [alone(plain, text) for text in texts_for()]
    model = load(directory, STREAMED)
    assert layout_of(model, exact=False) is FORMS[family]
    for room in (
        Room(tokens=SMALL),
        Room(tokens=SMALL, memory_bytes=0, disk_bytes=1 << 30, scratch=tmp_path),
    ):
        with visits(model) as brought:
            assert_alike(scored(model, texts_for(), room), expected)
        assert set(brought.values()) == {1}
    results = scored(model, texts_for(), Room(exact=True))
    assert [results[result.index] for result in expected] == expected


def test_angles_by_the_longest_text(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 12}
    family = Family("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **factors}})
    folder = build_checkpoint(tmp_path / "phi3", family, dtype=torch.float32)
    plain = plain_model(folder, dtype=torch.float32).eval()
    model = load(split(folder), STREAMED)
    assert layout_of(model, exact=False) is TextLayout.EQUAL
    ids = torch.arange(3, 33)[None]
    assert not torch.equal(plain(ids).logits[:, :10], plain(ids[:, :10]).logits)  # so it matters
    assert_alike(scored(model, texts_for(), Room()), [alone(plain, text) for text in texts_for()])


def test_routed_experts_are_loaded_once_for_all_texts(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "moe", "qwen3_moe", dtype=torch.float32)
    plain, directory = plain_model(folder, dtype=torch.float32).eval(), split(folder)
    model = load(directory, 0)
    expected = [alone(plain, text) for text in texts_for()]
    with visits(model) as brought:
        assert_alike(scored(model, texts_for(), Room(tokens=SMALL)), expected)
    assert {source.name for pool in model.streamer.pools.values() for source in pool.sources} <= brought.keys()
    assert set(brought.values()) == {1}
    results = scored(model, texts_for(), Room(exact=True))
    assert [results[result.index] for result in expected] == expected


def test_waiting_activations_may_be_offloaded(split_folder: Path, tmp_path: Path) -> None:
    """It changes no bit, and what is on the disk has no name that a killed process would leave behind."""
    model = load(split_folder, STREAMED)
    texts = texts_for()
    expected = scored(model, texts, Room(tokens=SMALL))
    sizes = []

    def look(*args: Any) -> None:
        assert not list(tmp_path.iterdir())
        for opened in list(Path("/proc/self/fd").iterdir()):
            with contextlib.suppress(FileNotFoundError):  # that of the list itself
                if str(tmp_path) in str(opened.readlink()):
                    sizes.append(opened.stat().st_size)

    hook = model.model.layers[1].register_forward_hook(look)
    results = scored(model, texts, Room(tokens=SMALL, memory_bytes=20_000, disk_bytes=1 << 30, scratch=tmp_path))
    hook.remove()
    assert results == expected
    assert sizes[0] > 20_000


def test_several_passes_if_memory_is_small(split_folder: Path) -> None:
    model = load(split_folder, STREAMED)
    texts = texts_for()
    plans: list[ScoringPlan] = []
    results = by_index(score(model, texts, Room(tokens=SMALL, memory_bytes=60_000, disk_bytes=0), on_plan=plans.append))
    assert sum(len(plan.passes) for plan in plans) > 1
    assert results == scored(model, texts, Room(tokens=SMALL))


def test_a_resident_model(split_folder: Path, plain: Any) -> None:
    model = load(split_folder)
    plans: list[ScoringPlan] = []
    results = by_index(score(model, texts_for(), Room(tokens=SMALL), on_plan=plans.append))
    assert_alike(results, [alone(plain, text) for text in texts_for()])
    # results come as soon as no later micro-batch needs what was computed, and after some micro-batches in any case
    assert all(batch.shared_prefix for batches in plans[0].passes for batch in batches[:-1])
    assert len(plans[0].passes) > 1


def test_a_resident_model_yields_results_early(split_folder: Path, plain: Any) -> None:
    count = 2 * (2 * RESIDENT_BATCHES + 3)  # two of them in a micro-batch
    texts = [ScoredText(index, (*range(5, 45), index), (7, *[index % 50 + 3] * 20)) for index in range(count)]
    plans: list[ScoringPlan] = []
    results = by_index(score(load(split_folder), texts, Room(tokens=90), on_plan=plans.append))
    assert_alike(results, [alone(plain, text) for text in texts])
    assert [len(batches) for batches in plans[0].passes] == [RESIDENT_BATCHES, RESIDENT_BATCHES, 3]


def test_many_logits_are_computed_in_slices(split_folder: Path, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["rabbitllm.generation.scoring.score"], "LOGITS_BYTES", 4 * VOCABULARY_SIZE * 3)
    model = load(split_folder, STREAMED)
    text = ScoredText(0, (1, 2), tuple(range(3, 103)))
    with visits(model) as brought, rows_of_logits(model) as rows:
        results = scored(model, [text, ScoredText(1, (5,), (6,))], Room(tokens=SMALL))
    assert set(brought.values()) == {1}
    assert len(rows) > 100 // 3
    assert max(rows) == 3
    assert_alike(results, [alone(plain, text), alone(plain, ScoredText(1, (5,), (6,)))])


def test_embeddings_alone_need_no_head(split_folder: Path, plain: Any) -> None:
    model = load(split_folder, STREAMED)
    texts = [ScoredText(index, range(3, 9 + index), (), "last") for index in range(4)]
    with visits(model) as brought:
        assert_alike(scored(model, texts, Room()), [alone(plain, text) for text in texts])
    assert "lm_head" not in brought
    assert len(brought) > 2


def test_a_refused_text_affects_no_other(split_folder: Path, plain: Any) -> None:
    model = load(split_folder, STREAMED)
    texts = [ScoredText(1, range(3, 253), range(3, 20)), ScoredText(2, (4, 5), (6,)), ScoredText(3, (), (4,))]
    results = scored(model, texts, Room())
    assert "index 1 has 266 tokens" in str(results[1].error)
    assert isinstance(results[3].error, OptionError)
    assert_alike({2: results[2]}, [alone(plain, texts[1])])
    shortened = scored(model, texts, Room(truncate=True))
    cut = (*texts[0].context, *texts[0].continuation)[-257:]
    assert_alike({1: shortened[1]}, [alone(plain, ScoredText(1, cut[:-17], cut[-17:]))])


def test_a_failed_text_affects_no_other(split_folder: Path, plain: Any) -> None:
    """One whose tokens bring down the micro-batch that it is in, and itself when it is alone."""
    model = load(split_folder, STREAMED)
    texts = [ScoredText(position, (position + 3, position + 4), (5, 6)) for position in range(20)]
    poison = model.get_input_embeddings()

    def fails(module: Any, args: Any) -> None:
        state = args[0]
        if bool((state[0, :, 0] == bad).any()):
            raise RuntimeError("not with this one")

    bad = plain.get_input_embeddings().weight[7, 0].item()
    hook = model.model.layers[0].input_layernorm.register_forward_pre_hook(fails)
    results = scored(model, texts, Room(tokens=SMALL))
    hook.remove()
    assert poison is model.get_input_embeddings()
    failed = {index for index, result in results.items() if result.error is not None}
    assert failed == {3, 4}
    assert all(isinstance(results[index].error, ScoringError) for index in failed)
    assert "RuntimeError: not with this one" in str(results[3].error)
    assert_alike(results, [alone(plain, text) for text in texts if text.index not in failed])


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("the disk is gone")])
def test_an_aborted_pass_leaves_no_state(
    split_folder: Path, plain: Any, tmp_path: Path, error: BaseException | type[BaseException]
) -> None:
    model = load(split_folder, STREAMED)

    def breaks(*args: Any) -> None:
        raise error

    room = Room(tokens=SMALL, memory_bytes=0, disk_bytes=1 << 30, scratch=tmp_path)
    hook = model.model.layers[1].mlp.register_forward_pre_hook(breaks)
    with pytest.raises(type(error) if isinstance(error, BaseException) else error):
        list(score(model, texts_for(), room))
    hook.remove()
    assert not list(tmp_path.iterdir())
    assert model.shared_passes is None
    assert all(module._compiled_call_impl is None for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert torch.is_grad_enabled()
    ids = torch.tensor([[3, 4, 5, 6]])
    assert torch.equal(model(ids).logits, plain(ids).logits)
    assert_alike(scored(model, texts_for(), room), [alone(plain, text) for text in texts_for()])


class _Awaited:
    """The lock of a pass, and whether another thread than the one that has it wants it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.is_wanted = threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.is_wanted.set()
            self._lock.acquire()

    def __exit__(self, *args: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("first", [False, True], ids=["next_logits", "token_logprobs"])
@pytest.mark.parametrize("second", [False, True], ids=["next_logits", "token_logprobs"])
def test_threads_that_ask_at_the_same_time(split_folder: Path, plain: Any, first: bool, second: bool) -> None:
    """As requests of a server do: the second comes while the first computes, and ends after it."""
    model = load(split_folder, STREAMED)
    expected = plain(torch.tensor([[3, 4, 5, 6]])).logits[0].log_softmax(-1).detach()
    lock = model.streamer.pass_lock = _Awaited(model.streamer.pass_lock)
    found: list[tuple[bool, Any]] = []

    def ask(of_all: bool) -> None:
        found.append((of_all, token_logprobs(model, [3, 4, 5, 6], 0) if of_all else next_logits(model, [[3, 4]], [5])))

    later = threading.Thread(target=ask, args=(second,))

    def begin_the_second(*args: Any) -> None:
        hook.remove()
        later.start()
        assert lock.is_wanted.wait(600)

    hook = model.model.layers[0].register_forward_pre_hook(begin_the_second)
    ask(first)
    later.join()
    assert [of_all for of_all, _ in found] == [first, second]
    for of_all, result in found:
        if of_all:
            chances = [token.logprob for token in result[1:]]
            assert chances == pytest.approx([float(expected[at, at + 4]) for at in range(3)], abs=1e-4)
        else:
            torch.testing.assert_close(result[0, 0], plain(torch.tensor([[3, 4]])).logits[0, -1, 5])
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_gradient_mode_is_restored(split_folder: Path) -> None:
    model = load(split_folder, STREAMED)
    assert torch.is_grad_enabled()
    for _ in score(model, texts_for(), Room(tokens=SMALL)):
        assert torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_an_abandoned_score_restores_the_model(split_folder: Path) -> None:
    model = load(split_folder, STREAMED)
    results = score(model, texts_for(), Room(tokens=SMALL))
    next(results)
    results.close()
    assert model.shared_passes is None
    assert len(scored(model, texts_for(), Room())) == len(texts_for())


def test_a_busy_model_is_refused(split_folder: Path) -> None:
    model = load(split_folder, STREAMED)
    model.shared_passes = object()
    with pytest.raises(BatchError, match="is busy with other requests"):
        list(score(model, texts_for()))


def test_unsupported_models(tmp_path: Path, plain: Any) -> None:
    with pytest.raises(OptionError, match="found LlamaForCausalLM"):
        list(score(plain, texts_for()))
    model = load(split(build_checkpoint(tmp_path / "t5", "t5", tied=True)))
    with pytest.raises(OptionError, match="encoder"):
        list(score(model, texts_for()))


@pytest.mark.parametrize("room", [Room(tokens=0), Room(memory_bytes=-1), Room(scratch=Path("/not/there"))])
def test_invalid_limits(split_folder: Path, room: Room) -> None:
    with pytest.raises(OptionError):
        list(score(load(split_folder), texts_for(), room))


@pytest.mark.parametrize("count", [1, 2])
def test_gpus(checkpoint: Path, split_folder: Path, plain: Any, tmp_path: Path, count: int) -> None:
    gpus = [FakeGpu(index) for index in range(count)]
    limits: dict[str, int] = {gpu.name: 40_000 for gpu in gpus} | {"cpu": 0}
    texts = texts_for()
    with watched(), torch.no_grad():
        options = RunOptions(max_memory=limits, show_progress=False, dtype="float32", exact=True)
        model = load_model(split_folder, options, None, gpus)
        assert model.placement.uploaded_bytes > 0
        before = sum(gpu.uploads for gpu in gpus)
        results = scored(model, texts, Room(tokens=SMALL))
        uploads = sum(gpu.uploads for gpu in gpus) - before
    assert_alike(results, [alone(plain, text) for text in texts])
    assert uploads <= 2 * len(model.placement.units)


def test_every_family_of_the_builders_has_a_form() -> None:
    assert FORMS.keys() <= FAMILIES.keys()


def test_tensors_on_the_cpu_fit_the_heap(split_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(split_folder)
    (lane,) = model.streamer.executors.values()
    monkeypatch.setattr(lane.device, "free_bytes", lambda: 64 << 30)
    assert limits_of(model, Room()).tokens == MAX_TOKENS  # so narrow a model's fit
    for name, wide in (("hidden_size", 2048), ("intermediate_size", 5632), ("vocab_size", 32000)):
        monkeypatch.setattr(model.config, name, wide)
    tokens = limits_of(model, Room()).tokens
    assert MIN_TOKENS < tokens < MAX_TOKENS
    block = cost_of_a_pass(model.config, 4).block
    assert tokens * block <= HEAP_BLOCK_BYTES < (tokens + 1) * block
    monkeypatch.setattr(lane.device, "free_bytes", lambda: 0)
    assert limits_of(model, Room()).tokens == MIN_TOKENS
    assert limits_of(model, Room(tokens=7)).tokens == 7


def test_a_gpu_reserves_memory_for_repeated_keys(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    folder = split(build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16, **sizes))
    gpu = FakeGpu(0, memory=16 << 20)
    model = load_model(folder, RunOptions(max_memory={gpu.name: 0, "cpu": 0}, show_progress=False), None, [gpu])
    tokens = [limits_of(model, Room(), longest).tokens for longest in (0, 400, 800)]
    token_bytes = cost_of_a_pass(model.config, 2).each
    assert tokens[2] > MIN_TOKENS
    for less, longest in ((tokens[0] - tokens[1], 400), (tokens[0] - tokens[2], 800)):
        assert less * token_bytes == pytest.approx(repeated_bytes(model.config, 2, longest), abs=token_bytes)
    host = load(folder)
    assert limits_of(host, Room(), 800).tokens == limits_of(host, Room()).tokens


def test_wide_models_still_get_useful_groups() -> None:
    assert PassCost(1, 0, 1, 0, 1, HEAP_BLOCK_BYTES).max_tokens == 512


def test_float16_overflow_is_an_error_of_each_text(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", dtype=torch.bfloat16)
    weights = read_tensors(folder)
    weights["model.layers.1.mlp.up_proj.weight"] *= 1000
    weights["model.layers.1.mlp.down_proj.weight"] *= 300
    save_file(weights, folder / SINGLE_NAME, {"format": "pt"})
    directory = split(folder)
    model, wide = load(directory, dtype="float16"), load(directory, dtype="float32")
    with pytest.raises(RabbitLLMError, match="The logits contain inf or nan"):
        model(torch.tensor([[1, 40, 81]]))
    texts = {
        "logits": [ScoredText(index, (1, 40, 81 + index), (7,)) for index in range(2)],
        "hidden states": [ScoredText(index, (1, 40, 81 + index), (), "mean") for index in range(2)],
    }
    for values, exact in itertools.product(texts, (True, False)):
        for result in scored(model, texts[values], Room(exact=exact)).values():
            assert isinstance(result.error, NotANumberError)
            assert f"The {values} contain inf or nan" in result.error.problem
            assert "float32" in result.error.remedy
        assert [result.error for result in scored(wide, texts[values], Room(exact=exact)).values()] == [None, None]
