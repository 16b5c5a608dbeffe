"""Streaming: which units are bound, the state after an exception, and copies between devices."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from rabbitllm.base.options import RunOptions
from rabbitllm.engine import _streamer
from rabbitllm.engine._streamer import InputMover
from rabbitllm.engine.load import load_model
from rabbitllm.engine.placement import READY, SLOTS, Tier
from rabbitllm.engine.units import ParameterEntry, UnitSource
from rabbitllm.engine.weight_tensors import AbsentWeight
from rabbitllm.errors import RabbitLLMError, ReadOnlyWeightError
from rabbitllm.telemetry.passes import READ
from tests.support.builders import Reference, build_checkpoint, reference_logits
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.one_thread import THREADS
from tests.support.tiny_models import (
    ALL,
    INPUT,
    NEW_TOKENS,
    assert_same,
    bytes_when_made,
    load,
    plain_model,
    run,
    split,
    tiers,
)

T = TypeVar("T")
LAYERS = [f"model.layers.{i}" for i in range(3)]
STREAMED = [*LAYERS, "lm_head"]
"""The streamed units of an uncompressed Llama without room: its embedding is used from the mapped file."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "model", "llama", shards=2)


@pytest.fixture
def expected(checkpoint: Path) -> Reference:
    return reference_logits(checkpoint, INPUT, torch.float32)


@pytest.fixture
def model(checkpoint: Path) -> Any:
    return load(split(checkpoint), 0)


def loader_of(model: Any) -> Any:
    return model.streamer.executors["cpu"].loader


def loads(model: Any) -> int:
    """The number of reads of units, after the running ones have ended."""
    loader = loader_of(model)
    for _, future in list(loader._prefetcher._pending.values()):
        future.result(30)
    count: int = loader.loads
    return count


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        output: torch.Tensor = model(INPUT).logits
    return output


def in_time(work: Callable[[], T]) -> T:
    """The result of a function that would wait for ever if a slot had been lost."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(600)
    assert results, "it did not finish"
    return results[0]


def unbound_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of the units that are not resident."""
    places = {unit: tier for unit, tier in tiers(model).items() if tier not in READY}
    for name, parameter in model.named_parameters():
        if any(name.startswith(unit + ".") for unit in places):
            yield name, parameter


def assert_nothing_is_bound(model: Any) -> None:
    assert model.streamer.bound == set()
    weights = dict(unbound_weights(model))
    assert len(weights) > 20
    for name, weight in weights.items():
        assert isinstance(weight, AbsentWeight), name


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_mode_of_the_caller_changes_no_bit(checkpoint: Path, mode: Any) -> None:
    """The last positions of a batch lie at strides, and how torch multiplies those depends on the weight's gradient."""
    ids = torch.cat([INPUT, INPUT.flip(1), INPUT + 1, INPUT + 2])
    plain, streamed = plain_model(checkpoint), load(split(checkpoint), 0)
    with mode():
        expected = plain(ids, logits_to_keep=1).logits
        assert torch.equal(streamed(ids, logits_to_keep=1).logits, expected)


def test_which_units_stream(model: Any) -> None:
    assert [unit for unit, tier in tiers(model).items() if tier is Tier.STREAMED] == STREAMED
    assert tiers(model)["model.embed_tokens"] is Tier.MAPPED
    assert tiers(model)["model.norm"] is Tier.RESIDENT


def test_weights_that_are_not_bound_are_absent(model: Any, expected: Reference) -> None:
    assert_nothing_is_bound(model)
    assert_same(run(model), expected)
    assert_nothing_is_bound(model)
    assert model.lm_head.weight.shape == (272, 64)
    assert model.num_parameters() == sum(weight.numel() for weight in model.parameters())


def test_replaced_weight_is_refused(tmp_path: Path, model: Any) -> None:
    """Its place is taken by the stored one in each pass."""
    state = {name: torch.zeros(weight.shape) for name, weight in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pytest.raises(ReadOnlyWeightError, match=r"model\.layers\.0\..* was replaced"):
        logits(model)
    with pytest.raises(RabbitLLMError, match="was changed since it was loaded"):
        model.save_pretrained(tmp_path / "copy")


@pytest.mark.parametrize("budget", [0, 100_000, ALL])
def test_tying_again_changes_no_result(tmp_path: Path, budget: int) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", tied=True)
    model, expected = load(split(folder), budget), reference_logits(folder, INPUT, torch.float32)
    model.tie_weights()
    assert_same(run(model), expected)
    model.save_pretrained(tmp_path / "copy")


def test_call_after_an_interrupted_one(model: Any) -> None:
    """Of a layer by itself, which leaves its weights bound."""
    layer = model.model.layers[0]
    states, angles = torch.ones(1, 3, 64), (torch.ones(1, 3, 16), torch.zeros(1, 3, 16))
    interrupted = layer.mlp.register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        layer(states, position_embeddings=angles)
    interrupted.remove()
    assert model.streamer.bound == {LAYERS[0]}
    layer(states, position_embeddings=angles)
    assert_nothing_is_bound(model)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_only_the_computing_unit_is_bound(model: Any) -> None:
    seen = []

    def look(module: Any, args: Any, output: Any) -> None:
        bound = [name for name, weight in unbound_weights(model) if not isinstance(weight, AbsentWeight)]
        seen.append((model.streamer.bound, {name[:14] for name in bound}))

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(look)
        layer.mlp.register_forward_hook(look)
    logits(model)
    assert seen == [({name}, {name}) for name in LAYERS for _ in range(2)]


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    ("compression", "dtype", "made_again"),
    [(None, "float32", False), ("4bit", "float32", False), (None, "bfloat16", True)],
)
def test_weights_that_only_refer_to_a_buffer_are_made_once(
    checkpoint: Path,
    compression: str | None,
    dtype: str,
    made_again: bool,
    on_gpu: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are values that a pass makes, such as those of another dtype."""
    gpu, seen = FakeGpu(0), dict[str, list[Any]]()
    folder = split(checkpoint, compression)

    def loaded() -> Any:
        if not on_gpu:
            return load(folder, 0, dtype=dtype, exact=False)
        return load_model(
            folder, RunOptions(max_memory={gpu.name: 0, "cpu": 0}, dtype=dtype, show_progress=False), None, [gpu]
        )

    with watched(), monkeypatch.context() as patch:
        patch.setattr(UnitSource, "are_views", lambda *_: False)
        expected = run(loaded())
    with watched():
        model = loaded()
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                note = seen.setdefault(name, []).append
                module.register_forward_pre_hook(lambda module, args, note=note: note(module._parameters["weight"]))
        for _ in range(3):
            assert_same(run(model), expected)
    counts = {len({id(weight) for weight in weights}) for weights in seen.values()}
    assert len(seen) == 7 * len(LAYERS)
    assert min(counts) > SLOTS if made_again else max(counts) <= SLOTS, counts


@pytest.mark.parametrize("compression", [None, "4bit", "4bit-double"])
def test_streamed_layers_refer_to_buffers_of_cuda(
    checkpoint: Path, compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose alignment other dtypes have, too; what only says how a tensor is stored may lie anywhere."""
    gpu, answers, are_views = FakeGpu(0), dict[str, bool](), UnitSource.are_views

    def noted(source: UnitSource, device: torch.device) -> bool:
        answers[source.unit.name] = are_views(source, torch.device("cuda", 0))
        return are_views(source, device)

    monkeypatch.setattr(UnitSource, "are_views", noted)
    options = RunOptions(max_memory={gpu.name: 0, "cpu": 0}, show_progress=False)
    with watched():
        load_model(split(checkpoint, compression), options, None, [gpu])
    assert all(answers[layer] for layer in LAYERS)


def _scale(weight: Any) -> None:
    weight.data = weight.data * 2


def _scale_unmarked(weight: Any) -> None:
    if not hasattr(weight, "is_scaled"):
        weight.data.mul_(2)
        weight.is_scaled = True


def _scale_and_train(weight: Any) -> None:
    weight.data.mul_(2)
    assert weight.requires_grad
    weight.requires_grad_(False)


@pytest.mark.parametrize("change", [_scale, _scale_unmarked, _scale_and_train])
def test_a_weight_that_a_hook_changes_is_changed_in_that_pass_alone(
    model: Any, expected: Reference, change: Callable[[Any], None]
) -> None:
    """Its values are read anew for each pass: what a hook says of them, or puts in their place, ends with it too."""
    layer = model.model.layers[1].mlp.down_proj
    hook = layer.register_forward_pre_hook(lambda module, args: change(module.weight))
    changed = [logits(model) for _ in range(2 * SLOTS)]
    assert not torch.equal(changed[0], expected.logits)
    assert all(torch.equal(result, changed[0]) for result in changed)
    hook.remove()
    for _ in range(SLOTS):
        assert torch.equal(logits(model), expected.logits)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_exception_in_a_layer_is_harmless(
    model: Any, expected: Reference, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error("in the middle of a layer")

    for turn in range(6):  # more often than there are slots
        with monkeypatch.context() as patched:
            patched.setattr(model.model.layers[turn % 3].mlp, "forward", fail)
            with pytest.raises(error, match="in the middle of a layer"):
                logits(model)
        assert_nothing_is_bound(model)
        assert torch.equal(in_time(lambda: logits(model)), expected.logits)
        assert_nothing_is_bound(model)
    assert_same(run(model), expected)


def test_interrupt_while_a_layer_is_freed(model: Any, expected: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    set_entry, freed = ParameterEntry.set, list[str]()

    def interrupted(entry: ParameterEntry, weight: torch.Tensor) -> None:
        set_entry(entry, weight)
        if isinstance(weight, AbsentWeight):
            freed.append(entry.target)
            if len(freed) == 2:
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ParameterEntry, "set", interrupted)
        with pytest.raises(KeyboardInterrupt):
            logits(model)
    assert_nothing_is_bound(model)
    assert torch.equal(in_time(lambda: logits(model)), expected.logits)


class _InterruptedVariable:
    """A context variable; Ctrl-C comes right behind one of its changes."""

    def __init__(self, variable: Any) -> None:
        self.get, self._variable, self.changes, self.interrupted_at = variable.get, variable, 0, 0

    def set(self, value: Any) -> Any:
        return self._then(self._variable.set(value))

    def reset(self, token: Any) -> None:
        self._then(self._variable.reset(token))

    def _then(self, result: Any) -> Any:
        self.changes += 1
        if self.changes == self.interrupted_at:
            raise KeyboardInterrupt
        return result


def test_interrupts_at_the_ends_of_a_pass(model: Any, expected: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = _InterruptedVariable(_streamer._calling)
    monkeypatch.setattr(_streamer, "_calling", variable)
    logits(model)
    for change in range(1, variable.changes + 1):
        variable.changes, variable.interrupted_at = 0, change
        with pytest.raises(KeyboardInterrupt):
            logits(model)
        for _ in range(SLOTS):
            variable.interrupted_at = 0
            assert torch.equal(in_time(lambda: logits(model)), expected.logits)
            assert variable.get() is None
        assert_nothing_is_bound(model)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_exceptions_one_after_the_other(
    model: Any, expected: Reference, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    for layer in model.model.layers:
        with monkeypatch.context() as patched:
            patched.setattr(layer.self_attn, "forward", fail)
            with pytest.raises(error):
                logits(model)
    assert torch.equal(in_time(lambda: logits(model)), expected.logits)
    assert_nothing_is_bound(model)


def test_interrupt_in_an_encoder_of_a_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_checkpoint(tmp_path, "t5", tied=True)
    model = load(split(folder), 0)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    for block in model.encoder.block:
        with monkeypatch.context() as patched:
            patched.setattr(block.layer[1], "forward", fail)
            with pytest.raises(KeyboardInterrupt):
                model.generate(INPUT, max_new_tokens=2)
    result = in_time(lambda: run(model))
    assert_same(result, reference_logits(folder, INPUT, torch.float32))


def test_packed_unit_is_unbound_after_an_exception(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = split(checkpoint, "4bit")
    resident = load(directory)
    expected = run(resident)
    model = load(directory, bytes_when_made(resident) - 1)
    assert tiers(model)["model.layers.1"] is Tier.PACKED

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError

    with monkeypatch.context() as patched:
        patched.setattr(model.model.layers[1].mlp, "forward", fail)
        with pytest.raises(RuntimeError):
            logits(model)
    assert_nothing_is_bound(model)
    assert_same(run(model), expected)
    assert_nothing_is_bound(model)


def test_unreadable_layer_is_an_error_and_the_next_call_works(
    checkpoint: Path, model: Any, expected: Reference
) -> None:
    path = checkpoint / "splitted_model" / "model.layers.2.safetensors"  # not read ahead of the pass
    whole = path.read_bytes()
    for _ in range(3):
        path.write_bytes(whole[:-64])
        with pytest.raises(OSError, match=r"model\.layers\.2\.safetensors ends at byte"):
            logits(model)
        assert_nothing_is_bound(model)
        path.write_bytes(whole)
        assert torch.equal(in_time(lambda: logits(model)), expected.logits)


def test_next_units_are_requested_for_every_buffer_and_the_last_requests_the_first(model: Any) -> None:
    """So the thread that reads goes on by itself: it need not be woken for each unit while all cores compute."""
    loader, asked = loader_of(model), []
    request = loader.request

    def noted(unit: str) -> None:
        asked.append(unit)
        request(unit)

    loader.request = noted
    for count in range(1, 4):
        logits(model)
        # what is brought for the next pass already
        assert loads(model) == count * len(STREAMED) + SLOTS
    around = [*STREAMED, *STREAMED[:SLOTS]]
    assert asked == [next for index in range(len(STREAMED)) for next in around[index + 1 : index + 1 + SLOTS]] * 3


def test_without_prefetching_no_unit_is_requested_ahead(checkpoint: Path, expected: Reference) -> None:
    model = load(split(checkpoint), 0, prefetching=False)
    for count in range(1, 3):
        assert torch.equal(logits(model), expected.logits)
        assert loads(model) == count * len(STREAMED)


def test_wrong_prediction_is_corrected(model: Any, expected: Reference) -> None:
    hidden = torch.randn(1, 3, 64)
    before = loads(model)
    with torch.inference_mode():
        for _ in range(4):  # the head alone, where the first layer was expected
            model.lm_head(hidden)
    assert loads(model) - before <= 4 + SLOTS  # what was expected after the first call
    for _ in range(2):
        assert torch.equal(in_time(lambda: logits(model)), expected.logits)
    learnt = loads(model)
    for count in range(1, 4):
        assert torch.equal(logits(model), expected.logits)
        assert loads(model) == learnt + count * len(STREAMED)


def test_decoder_repeats_and_its_encoder_does_not(tmp_path: Path) -> None:
    model = load(split(build_checkpoint(tmp_path, "t5", tied=True)), 0)
    streamed = [unit for unit, tier in tiers(model).items() if tier is Tier.STREAMED]
    again = [unit for unit in streamed if not unit.startswith("encoder.")]
    assert len(again) < len(streamed)
    tokens = 6
    with torch.inference_mode():
        model.generate(INPUT, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    # once each, and the wrong guesses at the turns
    assert loads(model) <= len(streamed) + (tokens - 1) * len(again) + 3 * SLOTS


def test_cache_layers_keeps_that_number_of_layers(checkpoint: Path, expected: Reference) -> None:
    model = load(split(checkpoint), 0, cache_layers=2, profiling=True)
    assert_same(run(model), expected)
    read = {unit for unit, stages in model.profiler.layers.items() if READ in stages}
    assert read == {"model.layers.2", "lm_head"}


def test_resident_model_loads_no_unit(checkpoint: Path, expected: Reference) -> None:
    model = load(split(checkpoint), ALL)
    assert_same(run(model), expected)
    assert loads(model) == 0
    assert not any(module._forward_pre_hooks for module in model.model.layers)


def test_resident_model_has_gradients(checkpoint: Path) -> None:
    model = load(split(checkpoint), ALL)
    model(INPUT, labels=INPUT).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_streamed_pass_keeps_no_gradients(model: Any, expected: Reference) -> None:
    output = model(INPUT)
    assert not output.logits.requires_grad
    assert torch.equal(output.logits, expected.logits)


def test_model_loaded_in_inference_mode_works_outside(checkpoint: Path, expected: Reference) -> None:
    with torch.inference_mode():
        model = load(split(checkpoint), ALL)
    assert torch.equal(model(INPUT).logits.detach(), expected.logits)
    model(INPUT, labels=INPUT).loss.backward()


def test_modes_alternate(model: Any, expected: Reference) -> None:
    for _ in range(2):
        assert torch.equal(logits(model), expected.logits)
        with torch.no_grad():
            assert torch.equal(model(INPUT).logits, expected.logits)


def test_generation_in_another_thread(model: Any, expected: Reference) -> None:
    def generate() -> torch.Tensor:
        torch.set_num_threads(THREADS)
        tokens: torch.Tensor = model.generate(INPUT, max_new_tokens=NEW_TOKENS, do_sample=False)
        return tokens

    assert torch.equal(in_time(generate), expected.tokens)


def test_threads_alternate(model: Any, expected: Reference) -> None:
    results: list[torch.Tensor] = []

    def generate() -> None:
        torch.set_num_threads(THREADS)
        for _ in range(3):
            results.append(model.generate(INPUT, max_new_tokens=NEW_TOKENS, do_sample=False))

    threads = [threading.Thread(target=generate, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert len(results) == 9
    assert all(torch.equal(tokens, expected.tokens) for tokens in results)


def test_deleted_model_leaves_no_thread_and_no_memory(checkpoint: Path) -> None:
    before = set(threading.enumerate())
    model = load(split(checkpoint), 0)
    logits(model)
    loads(model)  # a reader that is at work holds what it works for
    (reader,) = set(threading.enumerate()) - before
    references = [weakref.ref(model), weakref.ref(loader_of(model))]
    del model
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    reader.join(600)
    assert not reader.is_alive()


HERE, THERE = FakeGpu(0).torch_device, FakeGpu(1).torch_device
MODULE = nn.Identity()
Pair = namedtuple("Pair", "first second")
modes = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


def cross(boundary: InputMover, *args: Any, **kwargs: Any) -> Any:
    moved = boundary(MODULE, args, kwargs)
    return (args, kwargs) if moved is None else moved


@modes
def test_tensor_is_copied_once(mode: Any) -> None:
    with mode(), watched() as operations:
        mask = torch.ones(3, device=HERE)
        boundary = InputMover(THERE)
        copies = [cross(boundary, torch.ones(2, device=HERE), mask=mask)[1]["mask"] for _ in range(4)]
        assert all(copy is copies[0] for copy in copies)
        assert copies[0].device == THERE
        assert torch.equal(copies[0].cpu(), mask.cpu())
        assert operations.crossings[HERE, THERE] == 1 + 4


@modes
def test_tensors_on_the_device_stay_the_same_objects(mode: Any) -> None:
    with mode(), watched() as operations:
        tensor = torch.ones(3, device=THERE)
        state = [tensor, {"a": (tensor, None)}]
        boundary = InputMover(THERE)
        assert boundary(MODULE, (tensor, 3, None), {"state": state, "name": "x"}) is None
        args, kwargs = cross(boundary, torch.ones(1, device=HERE), state=state)
        assert kwargs["state"] is state
        assert args[0].device == THERE
        assert sum(operations.crossings.values()) == 1


@modes
def test_changed_copy_is_copied_again(mode: Any) -> None:
    with mode(), watched():
        mask, boundary = torch.ones(3, device=HERE), InputMover(THERE)
        first = cross(boundary, mask)[0][0]
        first.add_(1)
        first[0] = 7
        second = cross(boundary, mask)[0][0]
        assert second is not first
        assert second.cpu().tolist() == [1, 1, 1]


def test_changed_original_is_copied_again() -> None:
    with torch.no_grad(), watched():
        mask, boundary = torch.ones(3, device=HERE), InputMover(THERE)
        assert cross(boundary, mask)[0][0].cpu().tolist() == [1, 1, 1]
        mask.add_(1)
        assert cross(boundary, mask)[0][0].cpu().tolist() == [2, 2, 2]


@modes
def test_new_pass_copies_again(mode: Any) -> None:
    with mode(), watched():
        mask, boundary = torch.ones(3, device=HERE), InputMover(THERE)
        first = cross(boundary, mask)[0][0]
        mask.add_(1)
        boundary.forget()
        assert cross(boundary, mask)[0][0].cpu().tolist() == [2, 2, 2]
        assert first.cpu().tolist() == [1, 1, 1]


def test_copies_are_freed_with_their_originals() -> None:
    with torch.no_grad(), watched():
        boundary = InputMover(THERE)
        for _ in range(5):
            cross(boundary, torch.ones(3, device=HERE))
        gc.collect()
        assert len(boundary._copies) == 0


@modes
def test_containers_of_tensors_are_copied(mode: Any) -> None:
    class Held(UserDict[str, torch.Tensor]):
        def to(self, device: torch.device, non_blocking: bool = False) -> Held:
            return Held({key: tensor.to(device) for key, tensor in self.items()})

    with mode(), watched():
        x = torch.ones(3, device=HERE)
        inputs: dict[str, Any] = {
            "list": [x, 1],
            "tuple": (x, "x"),
            "named": Pair(x, x),
            "dict": OrderedDict(a=x),
            "held": Held(a=x),
            "nested": ({"a": [x]},),
        }
        _, moved = cross(InputMover(THERE), **inputs)
        assert {name: type(value) for name, value in moved.items()} == {n: type(v) for n, v in inputs.items()}
        tensors = [moved["list"][0], moved["tuple"][0], *moved["named"], moved["dict"]["a"], moved["held"]["a"]]
        for tensor in (*tensors, moved["nested"][0]["a"][0]):
            assert tensor.device == THERE
            assert torch.equal(tensor.cpu(), x.cpu())
        assert moved["list"][1] == 1


def test_gradients_reach_the_original() -> None:
    with watched():
        boundary = InputMover(THERE)
        source = torch.ones(3, requires_grad=True)
        for _ in range(2):
            (cross(boundary, source)[0][0] * 2).sum().backward()
        assert source.grad is not None
        assert source.grad.tolist() == [4, 4, 4]
