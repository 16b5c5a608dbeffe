"""A mixture in one call has the bits of the model's own class, chooses its experts, and notices what changes."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import platform
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import DynamicCache, GptOssConfig, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssMLP, GptOssTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock, Qwen3MoeTopKRouter

from rabbitllm.base.programs import Program
from rabbitllm.engine import _fusing, _mixtures, _routed
from rabbitllm.engine._attention import relative_error
from rabbitllm.engine._expert_pool import ExpertPool
from rabbitllm.engine._mixtures import MixtureCall
from rabbitllm.engine._routed import _Expert
from rabbitllm.engine.forwards import has_row_product
from rabbitllm.engine.span_reader import ReadMode
from rabbitllm.engine.turns import taking_turns
from rabbitllm.errors import IncompleteSplitError
from rabbitllm.storage import _read_kernels
from rabbitllm.storage.readers import Readers, ReadRequest
from tests.engine.test_first_use import flip_in
from tests.engine.test_routed import MANY
from tests.engine.test_siblings import PROMPT, SIZES, assert_same_logits
from tests.engine.test_siblings import checkpoint as compressed
from tests.engine.test_whole_steps import counted_steps
from tests.support import quantized
from tests.support.builders import DELTA, Family
from tests.support.call_counts import called_parts
from tests.support.kernel_rows import plain_products as plain_products
from tests.support.tiny_models import ALL, budget_that_keeps, load, split

pytestmark = [pytest.mark.bits, pytest.mark.usefixtures("plain_products")]
HEADS = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SHARED = {"shared_expert_intermediate_size": 256}
KINDS = {**DELTA, "layer_types": ["linear_attention", "full_attention"]}
HYBRIDS = Family("qwen3_next", KINDS), Family("qwen3_5_moe_text", KINDS)
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
OSS = Family("gpt_oss", {**WINDOWS, "num_local_experts": 24, "num_experts_per_tok": 3})
STEPS = 40


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step of a mixture that a call computed, whether that was not left to the class."""
    done, arrays, left = list[bool](), MixtureCall.arrays, MixtureCall.by_class

    def counted(self: MixtureCall, x: torch.Tensor, **named: bool) -> Any:
        if (given := arrays(self, x, **named)) is not None:
            done.append(True)
        return given

    def by_class(self: MixtureCall, x: torch.Tensor) -> torch.Tensor:
        done[-1] = False
        return left(self, x)

    monkeypatch.setattr(MixtureCall, "arrays", counted)
    monkeypatch.setattr(MixtureCall, "by_class", by_class)
    return done


def checkpoint(tmp_path: Path, family: str | Family, compression: str | None, **settings: Any) -> Path:
    """A split directory, also of gpt-oss as it is published."""
    if compression != "mxfp4":
        return compressed(tmp_path, family, compression, **settings)
    return split(quantized.build_mxfp4(tmp_path / "model", **{**SIZES, **OSS.settings, **settings}))


def router_in(mlp: Any) -> Any:
    return mlp.router if hasattr(mlp, "router") else mlp.gate


def fast(directory: Path, budget: int = ALL) -> Any:
    return load(directory, budget, exact=False, fast_bfloat16=True)


def is_dropped() -> bool:
    """Whether there are no calls any more; a thread that has read for one may keep it a little longer."""
    deadline = time.monotonic() + 600
    while any(type(each) is MixtureCall for each in gc.get_objects()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
        gc.collect()
    return True


@torch.no_grad()
def logits(model: Any, steps: int = STEPS) -> torch.Tensor:
    """Of steps of a text."""
    cache = DynamicCache(config=model.config)
    model(PROMPT, past_key_values=cache)
    return torch.cat([model(torch.tensor([[step * 7 + 1]]), past_key_values=cache).logits for step in range(steps)])


@pytest.mark.parametrize(
    ("family", "compression"),
    [("qwen3_moe", "4bit"), ("qwen3_moe", "q4_k_m"), (OSS, "mxfp4"), *((family, "4bit") for family in HYBRIDS)],
)
@pytest.mark.parametrize("kept", ["resident", "a quarter", "streamed"])
def test_a_model_has_the_same_logits(
    tmp_path: Path,
    family: str | Family,
    compression: str,
    kept: str,
    calls: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = checkpoint(tmp_path, family, compression, **MANY, **HEADS, **SHARED)
    quarter = kept == "a quarter"
    budget = budget_that_keeps(directory, 0.25, exact=False) if quarter else ALL * (kept == "resident")
    got = logits(fast(directory, budget))
    assert is_dropped()  # and the model
    assert sum(calls) > STEPS  # of two layers
    assert sum(calls) < len(calls) or kept != "resident"  # an expert's first use
    del calls[:]
    monkeypatch.setattr("rabbitllm.engine.fusions.fuse_mixtures", lambda model: 0)
    assert torch.equal(logits(fast(directory, budget)), got)
    assert not calls
    monkeypatch.undo()
    assert_same_logits(directory, budget, "fuse_mixtures", "GptOssMLP" if family is OSS else "MoeBlock", monkeypatch)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", *HYBRIDS])
@pytest.mark.parametrize("budget", [ALL, 0])
@torch.no_grad()
def test_parts_are_called_where_sequences_take_turns(tmp_path: Path, family: str | Family, budget: int) -> None:
    """The rows of all go through them together; the parts of a token alone are computed by fewer calls."""
    settings = {**MANY, **HEADS, **SHARED, "linear_value_head_dim": 32}
    model = fast(checkpoint(tmp_path, family, "4bit", **settings), budget)
    logits(model)
    counts, cache = called_parts(model), DynamicCache(config=model.config)
    model(PROMPT, past_key_values=cache)
    token = torch.tensor([[7]])
    for _ in range(2):  # the first use of an expert is left to the class
        counts.update({name: -count for name, count in counts.items()})
        alone = model(token, past_key_values=copy.deepcopy(cache)).logits
    assert not any(counts.values())
    with taking_turns():
        together = model(token, past_key_values=cache).logits
    assert {*counts.values()} == {1}
    assert relative_error(together, alone) < 1 / 16


@torch.no_grad()
def test_a_copy_is_freed_before_its_original_computes_again(tmp_path: Path) -> None:
    module = fast(checkpoint(tmp_path, "qwen3_moe", None, **MANY, **HEADS)).model.layers[0].mlp
    copied, x = copy.deepcopy(module), torch.randn(1, 1, 256).bfloat16()
    expected = [module(x) for _ in range(3)]
    assert all(map(torch.equal, [copied(x) for _ in range(3)], expected))
    calls = [each for each in gc.get_objects() if type(each) is MixtureCall]
    assert {id(each._module) for each in calls} >= {id(module), id(copied)}
    del calls, expected
    reference = weakref.ref(copied)
    del copied
    gc.collect()
    assert reference() is None
    shallow = copy.copy(module)
    shallow(x)
    assert _fusing.notes_on(shallow) is not _fusing.notes_on(module)


@pytest.mark.parametrize("compression", ["4bit", None])
@torch.no_grad()
def test_others_are_entered_with_the_experts_of_a_token(tmp_path: Path, compression: str | None) -> None:
    """Later tokens that choose these are no longer left to the class."""
    mlp = fast(checkpoint(tmp_path, "qwen3_moe", compression, **MANY, **HEADS)).model.layers[0].mlp
    for thread in threading.enumerate():
        if thread.name == "read-ahead":  # an expert is entered once it was compared with its checksums
            thread.join(600)
    x = torch.randn(1, 1, 256).bfloat16()
    for _ in range(3):
        mlp(x)
    kept = _routed.kept_experts(mlp.experts)
    assert kept is not None
    used = {*mlp.gate(x.view(1, -1))[2].flatten().tolist()}
    assert {number for number, word in enumerate(kept._words) if word} > used
    assert len(kept.experts) >= len(used) + _routed._OTHERS


def test_stacks_of_experts_in_memory_go_with_the_model(tmp_path: Path) -> None:
    """What is kept of a parameter must not lead to it."""
    gc.collect()
    before = len(_routed._resident)
    logits(fast(checkpoint(tmp_path, "qwen3_moe", None, **MANY, **HEADS)))
    assert is_dropped()
    assert len(_routed._resident) == before


@pytest.mark.parametrize(
    ("family", "compression", "share"),
    [
        ("qwen3_moe", "4bit", 1),
        ("qwen3_moe", "q4_k_m", 1),
        (Family("qwen2_moe"), "4bit", 1),
        ("qwen3_moe", None, 1),
        (Family("qwen2_moe"), None, 1),
        *((OSS, compression, 1) for compression in ("mxfp4", "4bit", None)),
        *((family, "4bit", 1) for family in HYBRIDS),
        ("qwen3_moe", "q4_k_m", 0.25),
        ("qwen3_moe", None, 0.25),
        (Family("qwen2_moe"), "4bit", 0.5),
        *((OSS, compression, 0.25) for compression in ("mxfp4", "4bit", None)),
        *((family, "4bit", 0.25) for family in HYBRIDS),
    ],
)
def test_a_token_of_all_layers_by_one_call(
    tmp_path: Path,
    family: str | Family,
    compression: str | None,
    share: float,
    calls: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where a share of the experts is in memory, and others are read in its midst."""
    layers = counted_steps(monkeypatch)
    settings: dict[str, Any] = {**MANY, **HEADS, **SHARED, "num_hidden_layers": 3}
    if family in HYBRIDS:
        kinds = ["linear_attention", "full_attention", "linear_attention"]
        settings |= {"layer_types": kinds, "linear_value_head_dim": 32}
    if family is OSS:
        settings["layer_types"] = [*WINDOWS["layer_types"], "sliding_attention"]
    directory = checkpoint(tmp_path, family, compression, **settings)
    budget = ALL if share == 1 else budget_that_keeps(directory, share, exact=False)
    model = fast(directory, budget)
    assert bool(model.placement.pools) is (share < 1)
    got = [logits(model) for _ in range(2)]
    assert set(layers) == {3}
    assert len(layers) > STEPS
    assert sum(calls) > STEPS
    assert share < 1 or sum(calls) < len(calls)  # after a mixture that is left to its class the call goes on
    router_in(model.model.layers[1].mlp).top_k = 2
    got.append(logits(model))
    assert model(PROMPT, output_router_logits=True).router_logits[0].shape == (PROMPT.shape[1], 24)
    monkeypatch.setattr("rabbitllm.engine.fusions.fuse_models", lambda model: 0)
    other = fast(directory, budget)
    expected = [logits(other) for _ in range(2)]
    router_in(other.model.layers[1].mlp).top_k = 2
    expected.append(logits(other))
    assert all(map(torch.equal, got, expected))
    assert not torch.equal(*got[1:])


@torch.no_grad()
def test_a_router_that_was_another_between_two_steps(tmp_path: Path, calls: list[bool]) -> None:
    """What a mixture has read since is not what the call of all layers was given."""
    model = fast(checkpoint(tmp_path, "qwen3_moe", "4bit", **MANY, **HEADS), ALL)
    expected = [logits(model) for _ in range(2)][1]
    mixture, own, x = model.model.layers[1].mlp, len(calls), torch.ones(1, 1, model.config.hidden_size).bfloat16()
    before = router_in(mixture).weight.data
    other = router_in(mixture).weight.data = before.flip(0).contiguous()
    mixture(x)
    assert len(calls) == own + 1
    router_in(mixture).weight.data = before
    assert torch.equal(logits(model), expected)
    assert not torch.equal(other, before)  # it was not freed


def test_plain_experts_are_kept_until_they_are_multiplied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else keeps their words; those of codes are kept with their memory."""
    directory = checkpoint(tmp_path, "qwen3_moe", None, **MANY, **HEADS)
    model = fast(directory, budget_that_keeps(directory, 0.25, exact=False))
    logits(model, 4)  # the class, which tells of what kind the products are
    of, reading, words, numbers = _Expert.of, MixtureCall._reading, list[Any](), list[int]()

    def noted(gate_up: Any, down: Any) -> Any:
        expert = of(gate_up, down)
        words.append(weakref.ref(expert.words))
        return expert

    def followed(self: MixtureCall, *args: Any) -> Any:
        words.clear()
        for step in reading(self, *args):
            assert all(each() is not None for each in words)
            numbers.append(len(words))
            yield step

    monkeypatch.setattr(_Expert, "of", noted)
    monkeypatch.setattr(MixtureCall, "_reading", followed)
    logits(model, 4)
    assert len(numbers) >= 2 * 4
    assert {*numbers[1::2]} == {MANY["num_experts_per_tok"]}


@torch.no_grad()
def test_biases_are_part_of_the_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the next layer's experts, by the call and by torch: here biases alone decide which are chosen."""
    monkeypatch.setattr("rabbitllm.engine._expert_pool.LEAST_AHEAD_BYTES", 1)
    settings = {**MANY, **HEADS, "num_hidden_layers": 3, "layer_types": [*WINDOWS["layer_types"], "sliding_attention"]}
    directory = checkpoint(tmp_path, OSS, "4bit", **settings)
    used, read_ahead = OSS.settings["num_experts_per_tok"], ExpertPool.read_ahead
    for is_fused in (True, False):
        model = fast(directory, budget_that_keeps(directory, 0.25, exact=False))
        for number, layer in enumerate(model.model.layers):
            layer.mlp.router.bias[used * number : used * (number + 1)] += 500
        guesses = list[tuple[int, list[int]]]()

        def noted(pool: ExpertPool, module: int, chosen: Any, guesses: Any = guesses, **named: bool) -> bool:
            guesses.append((module, chosen.tolist()))
            return read_ahead(pool, module, chosen, **named)

        with monkeypatch.context() as patch:
            patch.setattr(ExpertPool, "read_ahead", noted)
            if not is_fused:
                patch.setattr(MixtureCall, "arrays", lambda self, x, **_: None)
            logits(model, 4)
        assert len(guesses) >= 2 * 4
        assert all({*chosen} <= {*range(used * (module + 1), used * (module + 2))} for module, chosen in guesses)


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="compiled code reads there")
def test_a_guess_that_was_not_begun_is_not_read_unless_it_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where compiled code reads, all that the next layer's router chooses is named, and waits for the pass's own."""
    monkeypatch.setattr("rabbitllm.engine._expert_pool.LEAST_AHEAD_BYTES", 1)
    monkeypatch.setattr("rabbitllm.engine.load.choose_read_mode", lambda *_: ReadMode(direct=True))
    directory = checkpoint(tmp_path, "qwen3_moe", "4bit", **MANY, **HEADS)
    model = fast(directory, budget_that_keeps(directory, 0.25, exact=False))
    expected, used = [logits(model) for _ in range(3)][-1], MANY["num_experts_per_tok"]
    asked, names, named = list[tuple[int, int]](), dict[int, tuple[int, int]](), list[int]()
    chosen, send, ask, step = set[tuple[int, int]](), Readers.send, ExpertPool._ask, ExpertPool.step
    withdraw, taken_back = Readers.withdraw, list[Readers]()

    def noted(pool: ExpertPool, table: Any, module: int, expert: int, slot: Any, waits: bool) -> None:
        ask(pool, table, module, expert, slot, waits)
        names[slot.request.address] = module, expert

    def held(readers: Readers, requests: Sequence[ReadRequest]) -> None:
        """As if the disk were busy with others until the next choice."""
        ours = [request for request in requests if not request._words[_read_kernels.WAITS]]
        named.append(len(requests) - len(ours))
        asked.extend(names[request.address] for request in ours)
        send(readers, ours)

    def begun(pool: ExpertPool, module: int, experts: Sequence[int]) -> bool:
        chosen.update((module, expert) for expert in experts)
        result = step(pool, module, experts)
        assert {*asked} <= chosen
        return result

    def filled(*_: Any) -> None:
        raise AssertionError("read by Python")

    with monkeypatch.context() as patch:
        patch.setattr(ExpertPool, "_ask", noted)
        patch.setattr(ExpertPool, "_fill", filled)
        patch.setattr(ExpertPool, "step", begun)
        patch.setattr(Readers, "send", held)
        patch.setattr(Readers, "withdraw", lambda self: (taken_back.append(self), withdraw(self)))
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(PROMPT, past_key_values=cache)
            for number in range(STEPS):
                asked.clear()
                chosen.clear()
                result = model(torch.tensor([[number * 7 + 1]]), past_key_values=cache).logits
                assert torch.equal(result[0], expected[number])
    assert used >= max(named) > (used + 1) // 2
    assert len(taken_back) >= sum(map(bool, named))
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("name", ["step", "is_there", "_weight", "_send", "read_ahead"])
def test_an_interrupt_while_a_step_reads_experts(
    tmp_path: Path, name: str, is_done: bool, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(tmp_path, "qwen3_moe", "4bit", **MANY, **HEADS, **SHARED)
    monkeypatch.setattr("rabbitllm.engine._expert_pool.LEAST_AHEAD_BYTES", 1)
    model = fast(directory, budget_that_keeps(directory, 0.25, exact=False))
    expected, ordinary, steps = logits(model), getattr(ExpertPool, name), iter(range(7))

    def interrupted(*arguments: Any, **named: Any) -> Any:
        if not is_within_call():
            return ordinary(*arguments, **named)
        is_last = next(steps, None) is None
        result = ordinary(*arguments, **named) if is_done or not is_last else None
        if is_last:
            raise KeyboardInterrupt
        return result

    def is_within_call() -> bool:
        frames = inspect.stack(0)
        return any(frame.function == "_reading" for frame in frames)

    with monkeypatch.context() as patch:
        patch.setattr(ExpertPool, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            logits(model)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_token_of_more_experts_than_are_read_at_once(
    tmp_path: Path, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go through the memory in which the next layer's guess is, too."""
    monkeypatch.setattr("rabbitllm.engine._expert_pool.LEAST_AHEAD_BYTES", 1)
    monkeypatch.setattr("rabbitllm.engine.load.choose_read_mode", lambda *_: ReadMode(direct=is_direct))
    directory = checkpoint(tmp_path, "qwen3_moe", "4bit", **{**MANY, "num_experts": 64}, **HEADS)
    results = list[torch.Tensor]()
    for budget in (ALL, budget_that_keeps(directory, 0.25, exact=False)):
        model = fast(directory, budget)
        for layer in model.model.layers:
            router_in(layer.mlp).top_k = 50
        results.append(logits(model, 8))
    assert torch.equal(*results)


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="compiled code reads there")
def test_a_file_that_changes_behind_a_guess_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rabbitllm.engine._expert_pool.LEAST_AHEAD_BYTES", 1)
    monkeypatch.setattr("rabbitllm.engine.load.choose_read_mode", lambda *_: ReadMode(direct=True))
    directory = checkpoint(tmp_path, "qwen3_moe", "4bit", **MANY, **HEADS)
    model = fast(directory, budget_that_keeps(directory, 0.25, exact=False))
    logits(model)
    send, step, flipped = Readers.send, ExpertPool.step, list[int]()

    def held(readers: Readers, requests: Sequence[ReadRequest]) -> None:
        """As if the disk were busy with others until the next choice."""
        send(readers, [request for request in requests if not request._words[_read_kernels.WAITS]])

    def changed(pool: ExpertPool, module: int, experts: Sequence[int]) -> bool:
        right = [expert for expert in experts if expert in pool._ahead[-1]]
        if right and not flipped:
            (span, *_) = pool.sources[module].spans(right[0])
            flipped.append(right[0])
            with (directory / span.file).open("r+b") as file:
                file.seek(span.offset + span.nbytes // 2)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 64]))
        return step(pool, module, experts)

    monkeypatch.setattr(Readers, "send", held)
    monkeypatch.setattr(ExpertPool, "step", changed)
    with pytest.raises(IncompleteSplitError, match="damaged"):
        logits(model)
    assert flipped


@torch.no_grad()
def test_routers_of_compressed_models_use_the_kernel_by_default(tmp_path: Path, calls: list[bool]) -> None:
    folder = checkpoint(tmp_path, Family("qwen2_moe"), "4bit", **MANY, **HEADS, **SHARED)
    ordinary, exact = load(folder, exact=False), load(folder)
    for model in (ordinary, exact):
        logits(model)
        assert bool(sum(calls)) is (model is ordinary)
        names = {name for name, module in model.model.layers[0].mlp.named_children() if has_row_product(module)}
        assert names == ({"gate", "shared_expert_gate"} if model is ordinary else set())
        del calls[:]


@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize(("experts", "used"), [(128, 8), (512, 10), (24, 3), (60, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_experts_and_weights_are_torch_s(dtype: torch.dtype, experts: int, used: int, is_normed: bool) -> None:
    """Logits of float16 that are equal, or nearly so, are left to torch, as weights are below its normal numbers."""
    routing = _mixtures._Routing(None, used, is_normed, dtype=dtype)
    program, known = Program.of(routing.add_to, 5, experts, dtype=dtype), torch.arange(1, experts + 1)
    sure, ties = dict.fromkeys((False, True), 0), 0
    for seed in range(1000):
        random = torch.Generator().manual_seed(seed)
        logits = (torch.randn(1, experts, generator=random) * 2.0 ** (seed % 8 - 3)).to(dtype)
        chosen, weights = torch.zeros(1 + 4 * used, dtype=torch.int64), torch.zeros(1, used, dtype=dtype)
        done = torch.zeros(1, dtype=torch.int64)
        program(*(tensor.data_ptr() for tensor in (logits, known, chosen, weights, done)))
        expected = routing.choice(logits)
        sure[bool(done)] += 1
        assert chosen[0] == used * done
        if done:
            assert torch.equal(chosen[1:].view(used, 4)[:, 3], expected[0][0])
            assert torch.equal(chosen[1::4], expected[0][0] + 1)
            assert torch.equal(weights, expected[1])
            chosen_logits, index = torch.topk(logits, used)  # as gpt-oss' router does it
            alike = torch.equal(weights, torch.softmax(chosen_logits, 1)) and torch.equal(index, expected[0])
            assert alike or not is_normed
        ordered = torch.softmax(logits, -1, torch.float32)[0].sort(descending=True).values[: used + 1]
        ties += bool(done and (ordered.diff() == 0).any())
    assert sure[True] > (700 if dtype is torch.bfloat16 else 500)
    assert ties > 10 or used == 1 or dtype is torch.float16


class _Reversed(_mixtures._Routing):
    """As a class that chooses the same experts in another order."""

    def choice(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index, weights = super().choice(logits)
        return index.flip(-1), weights.flip(-1)


@pytest.mark.parametrize(("experts", "used"), [(16, 2), (128, 8), (256, 8), (512, 8), (512, 10)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_the_trial_compares_choices_among_any_number_of_experts(dtype: torch.dtype, experts: int, used: int) -> None:
    assert _mixtures._chooses_alike(_mixtures._Routing(None, used, True, dtype=dtype), experts)
    assert not _mixtures._chooses_alike(_Reversed(None, used, True, dtype=dtype), experts)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_are_left_to_torch(value: float) -> None:
    program, logits = Program.of(_mixtures._Routing(None, 2, True).add_to, 5, 16), torch.arange(16.0).bfloat16()
    logits[5], known, weights = value, torch.ones(16, dtype=torch.int64), torch.ones(2)
    chosen, done = torch.ones(9, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    program(*(tensor.data_ptr() for tensor in (logits, known, chosen, weights, done)))
    assert not done
    assert chosen[0] == 0


def doubled(module: Any, args: Any, output: Any) -> Any:
    return tuple(each * 2 for each in output) if isinstance(output, tuple) else output * 2


def half_router(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits, weights, index = PLAIN_ROUTER(self, hidden_states)
    return logits, weights / 2, index


PLAIN_ROUTER, PLAIN_BLOCK = Qwen3MoeTopKRouter.forward, Qwen3MoeSparseMoeBlock.forward


def with_data(patch: pytest.MonkeyPatch, parameter: nn.Parameter) -> None:
    patch.setattr(parameter, "data", parameter.data.flip(0).clone())


def parametrized(patch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """As an adapter with `target_parameters` does."""

    class Turned(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.flip(0)

    nn.utils.parametrize.register_parametrization(module, name, Turned())


OTHERS = list[Any]()
Change = Callable[[pytest.MonkeyPatch, Any], Any]
CHANGES: dict[str, Change] = {
    "hook on the mixture": lambda patch, mlp: patch.setitem(mlp._forward_hooks, 7, doubled),
    "hook on the router": lambda patch, mlp: patch.setitem(
        mlp.gate._forward_hooks, 7, lambda module, args, output: (output[0], output[1] * 2, output[2])
    ),
    "hook on the experts": lambda patch, mlp: patch.setitem(mlp.experts._forward_hooks, 7, doubled),
    "hook before the experts": lambda patch, mlp: patch.setitem(
        mlp.experts._forward_pre_hooks, 7, lambda module, args: (args[0], args[1].flip(-1), args[2])
    ),
    "hook on the activation": lambda patch, mlp: patch.setitem(mlp.experts.act_fn._forward_hooks, 7, doubled),
    "class of the mixture": lambda patch, mlp: patch.setattr(
        type(mlp), "forward", lambda self, hidden_states: PLAIN_BLOCK(self, hidden_states) * 2
    ),
    "class of the activation": lambda patch, mlp: patch.setattr(
        type(mlp.experts.act_fn), "forward", lambda act, x: torch.sigmoid(x)
    ),
    "method of the experts": lambda patch, mlp: patch.setattr(
        type(mlp.experts), "_apply_gate", lambda self, both: both.chunk(2, -1)[0]
    ),
    "function of the experts": lambda patch, mlp: patch.setitem(
        ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", lambda module, x, index, weights: x * 2
    ),
    "class of the router": lambda patch, mlp: patch.setattr(type(mlp.gate), "forward", half_router),
    "router": lambda patch, mlp: patch.setitem(mlp._modules, "gate", other_router(mlp.gate)),
    "forward of the router": lambda patch, mlp: patch.setitem(
        vars(mlp.gate), "forward", lambda x: half_router(mlp.gate, x)
    ),
    "weight of the router": lambda patch, mlp: patch.setitem(
        mlp.gate._parameters, "weight", nn.Parameter(mlp.gate.weight.flip(0))
    ),
    "data of the router": lambda patch, mlp: with_data(patch, mlp.gate.weight),
    "number of experts": lambda patch, mlp: patch.setattr(mlp.gate, "top_k", 2),
    "sum of weights": lambda patch, mlp: patch.setattr(mlp.gate, "norm_topk_prob", not mlp.gate.norm_topk_prob),
    "experts": lambda patch, mlp: patch.setitem(mlp._modules, "experts", copy.copy(mlp.experts)),
    "matrices": lambda patch, mlp: patch.setitem(mlp.experts._parameters, "down_proj", OTHERS[0].down_proj),
    "activation": lambda patch, mlp: patch.setitem(mlp.experts._modules, "act_fn", nn.Tanh()),
    "implementation": lambda patch, mlp: patch.setattr(mlp.experts.config, "_experts_implementation", "eager"),
}


OF_SHARED: dict[str, Change] = {
    "hook": lambda patch, mlp: patch.setitem(mlp.shared_expert._forward_hooks, 7, doubled),
    "hook of the gate": lambda patch, mlp: patch.setitem(mlp.shared_expert_gate._forward_hooks, 7, doubled),
    "hook of the activation": lambda patch, mlp: patch.setitem(mlp.shared_expert.act_fn._forward_hooks, 7, doubled),
    "data of the gate": lambda patch, mlp: patch.setattr(
        mlp.shared_expert_gate.weight, "data", mlp.shared_expert_gate.weight.data.flip(-1).clone()
    ),
    "bias of the gate": lambda patch, mlp: patch.setitem(
        mlp.shared_expert_gate._parameters, "bias", nn.Parameter(torch.ones(1).bfloat16())
    ),
    "activation": lambda patch, mlp: patch.setitem(mlp.shared_expert._modules, "act_fn", nn.Tanh()),
    "Linear": lambda patch, mlp: patch.setitem(mlp.shared_expert._modules, "up_proj", mlp.shared_expert.gate_proj),
    "weight": lambda patch, mlp: patch.setitem(
        mlp.shared_expert.up_proj._parameters, "weight", mlp.shared_expert.gate_proj.weight
    ),
    "forward": lambda patch, mlp: patch.setitem(vars(mlp.shared_expert), "forward", torch.zeros_like),
}


def other_router(router: Any) -> Any:
    other = Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=256, num_experts=24, num_experts_per_tok=2))
    other.weight = nn.Parameter(router.weight.flip(0))
    return other


def compared(
    directory: Path, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], Callable[[], list[torch.Tensor]], list[torch.Tensor]]:
    """A model whose mixtures are one call, and one without such; what returns the logits of both, and these now."""
    models = [fast(directory)]
    monkeypatch.setattr("rabbitllm.engine.fusions.fuse_mixtures", lambda model: 0)
    models.append(fast(directory))

    def both() -> list[torch.Tensor]:
        return [logits(model, 12) for model in models]

    both()
    del calls[:]
    ordinary = both()
    assert torch.equal(*ordinary)
    assert sum(calls) > len(calls) / 2 > 6
    return models, both, ordinary


def assert_noticed(
    changes: Mapping[str, Change],
    models: Sequence[Any],
    both: Callable[[], list[torch.Tensor]],
    ordinary: Sequence[torch.Tensor],
    *,
    once: tuple[str, ...] = (),
    without_effect: str = "",
) -> None:
    """Each change of a mixture has the same effect on both models, and none once it is taken back.

    Args:
        changes: by their names.
        models, both, ordinary: see `compared`.
        once: how names of changes begin that one model makes for both.
        without_effect: the name of the only one that changes no logits.
    """
    for name, change in changes.items():
        with pytest.MonkeyPatch.context() as patch:
            for model in models[: 1 if name.startswith(once) else 2]:
                change(patch, model.model.layers[1].mlp)
            changed = both()
        assert torch.equal(*changed), name
        assert torch.equal(changed[0], ordinary[0]) is (name == without_effect), name
        assert all(map(torch.equal, both(), ordinary)), name


@pytest.mark.parametrize("has_layers", [True, False])
@torch.no_grad()
def test_a_change_between_two_steps_is_noticed(
    tmp_path: Path, has_layers: bool, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_layers:
        monkeypatch.setattr("rabbitllm.engine.fusions.fuse_layers", lambda model: 0)
    directory = checkpoint(tmp_path, "qwen3_moe", "4bit", **MANY, **HEADS)
    models, both, ordinary = compared(directory, calls, monkeypatch)
    OTHERS[:] = [models[0].model.layers[0].mlp.experts]
    assert_noticed(CHANGES, models, both, ordinary, once=("class",), without_effect="experts")
    for model in models:
        parametrized(monkeypatch, model.model.layers[1].mlp.gate, "weight")
    changed = both()
    assert torch.equal(*changed)
    assert not torch.equal(changed[0], ordinary[0])


def data_of(name: str) -> Change:
    """Other data of a Linear of a shared expert."""
    return lambda patch, mlp: with_data(patch, mlp.shared_expert.get_submodule(name).weight)


PLAIN = {f"data of {name}": data_of(name) for name in ("gate_proj", "up_proj", "down_proj")}
"""Changes of weights that are plain matrices, which codes refuse."""


@pytest.mark.parametrize("compression", ["4bit", None])
@torch.no_grad()
def test_a_change_of_a_shared_expert_is_noticed(
    tmp_path: Path, compression: str | None, calls: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoint(tmp_path, Family("qwen2_moe"), compression, **MANY, **HEADS, **SHARED)
    models, both, ordinary = compared(directory, calls, monkeypatch)
    assert_noticed(OF_SHARED | ({} if compression else PLAIN), models, both, ordinary)


@torch.no_grad()
def test_layers_that_share_router_and_experts(tmp_path: Path, calls: list[bool]) -> None:
    model = fast(checkpoint(tmp_path, "qwen3_moe", "4bit", **MANY, **HEADS))
    first, second = (layer.mlp for layer in model.model.layers)
    for shared in ("gate", "experts"):
        part = getattr(second, shared)
        part._parameters.update(getattr(first, shared)._parameters)
    x = torch.randn(1, 1, 256).bfloat16()
    for _ in range(3):
        assert torch.equal(first(x), second(x))
    assert sum(calls) > 2
    second.gate.top_k = 2
    assert torch.equal(second(x), type(second).forward(second, x))
    assert not torch.equal(first(x), second(x))


@torch.no_grad()
def test_another_default_device(tmp_path: Path, calls: list[bool]) -> None:
    model = fast(checkpoint(tmp_path, "qwen3_moe", "4bit", **MANY, **HEADS))
    expected = logits(model)
    torch.set_default_device("meta")
    try:
        mlp, x = model.model.layers[0].mlp, torch.ones(1, 1, 256, dtype=torch.bfloat16, device="cpu")
        del calls[:]
        results = [mlp(x) for _ in range(3)]
    finally:
        torch.set_default_device(None)
    assert torch.equal(results[0], type(mlp).forward(mlp, x))
    assert torch.equal(logits(model), expected)


@torch.no_grad()
def test_an_adapter_of_experts_parameters(tmp_path: Path, calls: list[bool]) -> None:
    model = fast(checkpoint(tmp_path, "qwen3_moe", "4bit", **MANY, **HEADS))
    plain = logits(model)
    settings = LoraConfig(r=2, target_parameters=["mlp.gate.weight"], init_lora_weights=False)
    adapted = get_peft_model(model, settings).eval()
    assert not torch.equal(logits(adapted.base_model.model), plain)
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted.base_model.model), plain)


def biased(name: str) -> dict[str, Change]:
    """Changes of a bias of a mixture."""

    def owner(mlp: Any) -> tuple[Any, str]:
        path, _, leaf = name.rpartition(".")
        return mlp.get_submodule(path)._parameters, leaf

    def replaced(patch: pytest.MonkeyPatch, mlp: Any) -> None:
        table, leaf = owner(mlp)
        patch.setitem(table, leaf, nn.Parameter(table[leaf].flip(0) * 2))

    def of_other_data(patch: pytest.MonkeyPatch, mlp: Any) -> None:
        table, leaf = owner(mlp)
        with_data(patch, table[leaf])

    def with_gaps(patch: pytest.MonkeyPatch, mlp: Any) -> None:
        table, leaf = owner(mlp)
        patch.setattr(table[leaf], "data", table[leaf].data.repeat_interleave(2, -1)[..., ::2].flip(0)[..., ::1])

    return {f"{name}, another": replaced, f"data of {name}": of_other_data, f"{name} with gaps": with_gaps}


OF_OSS: dict[str, Change] = {
    **biased("router.bias"),
    **biased("experts.gate_up_proj_bias"),
    **biased("experts.down_proj_bias"),
    "hook on the mixture": lambda patch, mlp: patch.setitem(
        mlp._forward_hooks, 7, lambda module, args, output: (output[0] * 2, output[1])
    ),
    "hook on the router": lambda patch, mlp: patch.setitem(
        mlp.router._forward_hooks, 7, lambda module, args, output: (output[0], output[1] * 2, output[2])
    ),
    "number of experts": lambda patch, mlp: patch.setattr(mlp.router, "top_k", 2),
    "weight of the router": lambda patch, mlp: with_data(patch, mlp.router.weight),
    "router": lambda patch, mlp: patch.setitem(mlp._modules, "router", OTHERS[0]),
    "limit": lambda patch, mlp: patch.setattr(mlp.experts, "limit", 0.25),
    "alpha": lambda patch, mlp: patch.setattr(mlp.experts, "alpha", 3.0),
    "class of the mixture": lambda patch, mlp: patch.setattr(
        GptOssMLP, "forward", lambda self, x: (x * 2, torch.zeros(1, 3))
    ),
    "method of the experts": lambda patch, mlp: patch.setattr(
        GptOssExperts, "_apply_gate", lambda self, both: both[..., ::2]
    ),
}


@torch.no_grad()
def test_a_change_of_gpt_oss_is_noticed(tmp_path: Path, calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    models, both, ordinary = compared(checkpoint(tmp_path, OSS, "mxfp4", **HEADS), calls, monkeypatch)
    OTHERS[:] = [models[0].model.layers[0].mlp.router]
    assert_noticed(OF_OSS, models, both, ordinary, once=("class", "method"))


@torch.no_grad()
def test_a_mixture_that_is_called_returns_its_weights_too(tmp_path: Path, calls: list[bool]) -> None:
    mlp = fast(checkpoint(tmp_path, OSS, "mxfp4", **HEADS)).model.layers[0].mlp
    x = torch.randn(1, 1, 256).bfloat16()
    for _ in range(4):
        assert all(map(torch.equal, mlp(x), type(mlp).forward(mlp, x)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GptOssTopKRouter, "__call__", None)
        assert len(mlp(x)) == 2
    assert calls


class Sigmoids(Qwen3MoeTopKRouter):  # type: ignore[misc]
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        weights, index = torch.topk(torch.sigmoid(logits.float()), self.top_k)
        return logits, weights.bfloat16(), index


class Unbiased(GptOssTopKRouter):  # type: ignore[misc]
    """Its bias chooses, and weighs nothing."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = nn.functional.linear(hidden_states, self.weight)
        index = torch.topk(logits + self.bias, self.top_k)[1]
        return logits, torch.softmax(logits.gather(1, index), 1), index


class LaterFirst(GptOssTopKRouter):  # type: ignore[misc]
    """Of experts that are equally probable the later one comes first."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = nn.functional.linear(hidden_states, self.weight, self.bias)
        values, index = logits.flip(-1).sort(stable=True, descending=True)
        return logits, torch.softmax(values[:, : self.top_k], 1), len(self.weight) - 1 - index[:, : self.top_k]


class Doubled(Qwen3MoeSparseMoeBlock):  # type: ignore[misc]
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * 2  # type: ignore[no-any-return]


def test_classes_that_choose_or_add_otherwise_are_not_replaced() -> None:
    config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=128, num_experts=16)
    for is_normed in (True, False):
        config.norm_topk_prob = is_normed
        module = Qwen3MoeSparseMoeBlock(config).bfloat16()
        assert _mixtures.fuse_mixtures(module) == 1
        assert _mixtures.routing_in(module).is_normed is is_normed
    module = Doubled(config).bfloat16()
    assert _mixtures.fuse_mixtures(module) == 0
    module = Qwen3MoeSparseMoeBlock(config)
    module.gate = Sigmoids(config)
    assert _mixtures.fuse_mixtures(module.bfloat16()) == 0
    oss = GptOssConfig(hidden_size=64, intermediate_size=128, num_local_experts=32)
    for kind, count in ((GptOssTopKRouter, 1), (Unbiased, 0), (LaterFirst, 0)):
        module = GptOssMLP(oss)
        module.router = kind(oss)
        assert _mixtures.fuse_mixtures(module.bfloat16()) == count


@pytest.mark.parametrize("compression", ["4bit", None])
@torch.no_grad()
def test_a_damaged_expert_is_refused_each_time(tmp_path: Path, compression: str | None, calls: list[bool]) -> None:
    folder = checkpoint(tmp_path, "qwen3_moe", compression, **MANY, **HEADS)
    with flip_in(folder, "model.layers.0.mlp.experts.5.up_proj.weight"):
        mlp = fast(folder).model.layers[0].mlp
        inputs = torch.randn(STEPS, 1, 1, 256).bfloat16()
        chosen = [set(mlp.gate(x.view(1, -1))[2].flatten().tolist()) for x in inputs]
        assert any(5 in each for each in chosen)
        for _ in range(3):
            for x, experts in zip(inputs, chosen, strict=True):
                if 5 in experts:
                    with pytest.raises(IncompleteSplitError, match="is damaged"):
                        mlp(x)
                else:
                    with contextlib.suppress(IncompleteSplitError):  # its checksum is that of neighbours, too
                        mlp(x)
        assert compression is None or calls
