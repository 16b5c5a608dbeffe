"""Weights that another module reads: in a pass with the bits of a resident model, and refused outside of one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.functional import linear

from rabbitllm.engine.placement import Tier
from rabbitllm.engine.weight_tensors import AbsentWeight
from rabbitllm.errors import AbsentWeightError, ReadOnlyWeightError
from rabbitllm.generation.scoring import Room, ScoredText, score
from tests.engine.test_fake_gpu import load_on
from tests.engine.test_streamer import in_time
from tests.generation.together import alone, prompts, together
from tests.support.builders import build_checkpoint
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.one_thread import THREADS
from tests.support.reading_families import READING
from tests.support.tiny_models import ALL, INPUT, load, split, tiers

SHORT = {("glm4v", "4bit"), ("lfm2_vl", None), ("voxtral", None), ("aria", None), ("emu3", None)} | {
    ("deepseek_ocr2", "4bit"),
    ("prophetnet", "4bit"),
    ("qwen2_audio", None),
}
"""What `make test` runs: each family once."""
EVERY = [
    pytest.param(family, compression, marks=() if (family, compression) in SHORT else pytest.mark.long)
    for family in READING
    for compression in (None, "4bit")
]


def checkpoint(folder: Path, family: str) -> Path:
    chosen = READING[family]
    return build_checkpoint(folder / "model", chosen, tied=chosen.ties[0])


def outcome(model: Any, family: str) -> list[torch.Tensor]:
    """Of a forward, and of a generation, which calls some towers by themselves."""
    inputs = {name: value.to(model.device) for name, value in READING[family].made().items()}
    with torch.inference_mode():
        logits = model(**inputs).logits
        inputs.pop("decoder_input_ids", None)
        return [logits, model.generate(**inputs, max_new_tokens=4, do_sample=False)]


def same(results: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results, other, strict=True))


def absent(model: Any) -> list[str]:
    """Parameters that are not in memory."""
    return [name for name, weight in model.named_parameters() if isinstance(weight, AbsentWeight)]


def budgets(model: Any) -> list[int]:
    stored = sum(placed.stored for placed in model.placement.units)
    return [0, stored // 3, 2 * stored // 3]


@pytest.mark.parametrize(("family", "compression"), EVERY)
def test_streamed_results_equal_resident_ones(tmp_path: Path, family: str, compression: str | None) -> None:
    source = checkpoint(tmp_path, family)
    folder = split(source, compression)
    for exact in (True, False):
        resident = load(folder, exact=exact)
        expected = outcome(resident, family)
        assert expected[0].isfinite().all()
        if compression is None:
            plain = READING[family].model_class.from_pretrained(source).eval()
            for parameter in plain.parameters():
                parameter.data = parameter.data.clone()
            assert same(expected, outcome(plain, family))
        for budget in budgets(resident):
            streamed = load(folder, budget, exact=exact)
            assert absent(streamed)
            assert same(outcome(streamed, family), expected), budget
            assert same(outcome(streamed, family), expected), budget
            assert streamed.streamer.bound == set()


@pytest.mark.parametrize(
    ("family", "compression", "count"),
    [("glm4v", None, 1), ("lfm2_vl", "4bit", 2), ("deepseek_ocr2", "4bit", 1), ("prophetnet", None, 1)],
)
def test_on_a_gpu(tmp_path: Path, family: str, compression: str | None, count: int) -> None:
    folder = split(checkpoint(tmp_path, family), compression)
    expected = outcome(load(folder), family)
    for budget, host in ((0, 0), (0, ALL), (120_000, 60_000)):
        with watched():
            model = load_on([FakeGpu(index) for index in range(count)], folder, budget, host)
            actual = outcome(model, family)
        assert same(actual, expected), (budget, host)


# One model, and hooks that read


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("reading"), "qwen2", tied=True)


def reading(model: Any, seen: list[Any] | None = None) -> Any:
    """Adds to the hidden states before the head what both tied matrices make of them, read and not called."""

    def read(module: nn.Module, args: Any, output: Any) -> Any:
        head, embedding = model.lm_head.weight, model.get_input_embeddings().weight
        if seen is not None:
            seen.append((head.data_ptr(), embedding.data_ptr()))
        states = output.last_hidden_state
        output.last_hidden_state = states + linear(states, head) @ embedding / 100
        return output

    model.base_model.register_forward_hook(read)
    return model


def logits(model: Any, ids: torch.Tensor = INPUT) -> torch.Tensor:
    with torch.inference_mode():
        output: torch.Tensor = model(ids).logits
    return output


@pytest.mark.parametrize("budget", [0, 150_000])
@pytest.mark.parametrize("compression", [None, "4bit"])
def test_reads_of_tied_matrices(source: Path, compression: str | None, budget: int) -> None:
    """At 4bit the embedding is by rows, and the head is streamed; what is made for the one is the other's too."""
    folder = split(source, compression)
    expected = logits(reading(load(folder)))
    seen: list[Any] = []
    model = reading(load(folder, budget), seen)
    kinds = tiers(model)
    assert kinds["lm_head"] is not Tier.RESIDENT or budget
    assert compression is None or kinds["model.embed_tokens"] is Tier.ROWS
    for _ in range(2):
        assert torch.equal(logits(model), expected)
        assert model.streamer.bound == set()
    assert all(head == embedding for head, embedding in seen)
    assert not torch.equal(logits(load(folder)), expected)


def test_reads_of_an_embedding_before_and_after_its_call(source: Path) -> None:
    folder = split(source, "4bit")
    model, resident = load(folder, 0), load(folder)
    seen: list[list[torch.Tensor]] = [[], []]
    for reader, sums in zip((model, resident), seen, strict=True):

        def read(module: nn.Module, *_: Any, reader: Any = reader, sums: list[torch.Tensor] = sums) -> None:
            sums.append(reader.get_input_embeddings().weight.sum(1))

        reader.base_model.register_forward_pre_hook(read)
        reader.base_model.norm.register_forward_hook(read)
        sums.append(logits(reader))
    # before its forward the inner model's pass has not begun, but that of the model around it has
    assert len(seen[0]) == 3
    assert same(*seen)
    assert isinstance(model.get_input_embeddings().weight, AbsentWeight)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("compression", [None, "4bit"])
def test_exception_after_a_read(
    source: Path, compression: str | None, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = split(source, compression)
    model, expected = load(folder, 0), logits(load(folder))

    def fail(*_: Any) -> None:
        assert model.lm_head.weight.isfinite().all()
        assert "lm_head" in model.streamer.bound
        raise error

    for layer in model.base_model.layers:
        hook = layer.mlp.register_forward_hook(fail)
        with pytest.raises(error):
            logits(model)
        hook.remove()
        assert model.streamer.bound == set()
        with pytest.raises(AbsentWeightError):
            model.lm_head.weight.sum()
        with pytest.raises(AbsentWeightError):
            layer.mlp.up_proj.weight.sum()
        assert torch.equal(in_time(lambda: logits(model)), expected)


def test_interrupted_embedding_keeps_no_rows(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(split(source, "4bit"), 0)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(model.get_input_embeddings(), "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            logits(model)
    assert isinstance(model.get_input_embeddings().weight, AbsentWeight)


def _other_layer(model: Any) -> None:
    layers = model.base_model.layers

    def read(*_: Any) -> None:
        layers[1].self_attn.q_proj.weight.sum()

    layers[0].register_forward_hook(read)
    logits(model)


def _other_thread(model: Any) -> None:
    """While a pass of this one is under way."""
    raised: list[BaseException] = []

    def read() -> None:
        try:
            model.lm_head.weight.sum()
        except BaseException as error:
            raised.append(error)

    def look(*_: Any) -> None:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    model.base_model.norm.register_forward_hook(look)
    logits(model)
    raise raised[0]


OUTSIDE: dict[str, Callable[[Any], Any]] = {
    "a sum": lambda model: model.lm_head.weight.sum(),
    "a comparison": lambda model: model.lm_head.weight == 0,
    "a row": lambda model: model.get_input_embeddings().weight[3],
    "rows": lambda model: nn.functional.embedding(INPUT, model.lm_head.weight),
    "a cast": lambda model: model.lm_head.weight.double(),
    "a copy": lambda model: model.lm_head.weight.clone(),
    "numpy": lambda model: model.lm_head.weight.detach().numpy(),
    "an array": lambda model: np.asarray(model.lm_head.weight.data),
    "a list": lambda model: model.lm_head.weight.tolist(),
    "printed": lambda model: print(model.lm_head.weight[:2]),
    "a part of a layer": lambda model: model.base_model.layers[0].mlp(torch.ones(1, 64)),
    "attention's projection": lambda model: model.base_model.layers[1].self_attn.q_proj(torch.ones(1, 64)),
    "another layer in a pass": _other_layer,
    "another thread in a pass": _other_thread,
    "a state dict": lambda model: {name: tensor.sum() for name, tensor in model.state_dict().items()},
    "torch.save": lambda model: torch.save(model.state_dict(), "/dev/null"),
    "safetensors": lambda model: safetensors.torch.save({"a": model.state_dict()["lm_head.weight"]}),
    "larger embeddings": lambda model: model.resize_token_embeddings(280),
    "smaller embeddings": lambda model: model.resize_token_embeddings(100, mean_resizing=False),
    "padded embeddings": lambda model: model.resize_token_embeddings(pad_to_multiple_of=64),
    "copied": lambda model: torch.empty(272, 64).copy_(model.state_dict()["lm_head.weight"]),
}


@pytest.mark.parametrize("way", sorted(OUTSIDE))
def test_read_outside_of_a_pass_is_refused(source: Path, way: str) -> None:
    folder = split(source, "4bit")
    model, expected = load(folder, 0), logits(load(folder))
    assert torch.equal(logits(model), expected)
    with torch.no_grad(), pytest.raises(AbsentWeightError, match="not in memory"):
        OUTSIDE[way](model)
    assert model.get_input_embeddings().num_embeddings == 272
    assert model.streamer.bound == set()


def test_message_names_the_weight_and_the_reason(source: Path) -> None:
    model = load(split(source), 0)
    with pytest.raises(AbsentWeightError, match=r"Weight lm_head\.weight is not in memory: it is computed in"):
        model.lm_head.weight.sum()
    with pytest.raises(AbsentWeightError, match=r"up_proj\.weight .*while model\.layers\.2 computes"):
        model.base_model.layers[2].mlp.up_proj.weight.sum()


def test_a_placeholder_of_another_weight_is_refused(source: Path) -> None:
    model = load(split(source), 0)
    mlp = model.base_model.layers[1].mlp
    mlp.up_proj.weight = mlp.gate_proj.weight
    with pytest.raises(ReadOnlyWeightError, match=r"up_proj\.weight was replaced"):
        logits(model)


def test_resident_embeddings_can_be_resized(source: Path) -> None:
    folder, results = split(source), []
    stored = sum(placed.stored for placed in load(folder).placement.units)
    for budget in (ALL, stored * 4 // 5):
        torch.manual_seed(0)
        model = load(folder, budget)
        assert bool(absent(model)) == (budget != ALL)
        model.resize_token_embeddings(280)
        results.append(logits(model))
    assert torch.equal(*results)
    assert results[0].shape[-1] == 280


def test_embeddings_of_the_right_size_need_not_be_read(source: Path) -> None:
    model = load(split(source), 0)
    for options in ({}, {"new_num_tokens": 272}, {"new_num_tokens": 265, "pad_to_multiple_of": 16}):
        assert model.resize_token_embeddings(**options) is model.get_input_embeddings()
    assert torch.equal(logits(model), logits(load(split(source))))


@pytest.mark.parametrize("way", sorted(set(OUTSIDE) - {"another thread in a pass"}))
def test_resident_model_allows_every_read(source: Path, way: str) -> None:
    with torch.no_grad():
        OUTSIDE[way](load(split(source)))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("compression", [None, "4bit"])
def test_members_of_a_joint_pass_read_the_same_weight(source: Path, compression: str | None, packing: bool) -> None:
    """It is dequantized once for all, and freed when the pass ends."""
    folder, inputs = split(source, compression), prompts()
    expected = alone(reading(load(folder)), inputs)
    seen: list[Any] = []
    model = reading(load(folder, 0), seen)
    makes = units_made_for_reads(model)
    members = together(model, inputs, exact=not packing, packing=packing)
    for member, other in zip(members, expected, strict=True):
        if packing:
            torch.testing.assert_close(member.logits, other.logits, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(member.logits, other.logits)
    assert model.streamer.bound == set()
    passes = model.streamer_passes
    assert passes[0] < len(expected) * len(expected[0].logits)
    assert makes.count("lm_head") <= passes[0]


def units_made_for_reads(model: Any) -> list[str]:
    """The names of units that are dequantized for reads, in order; `streamer_passes` counts passes."""
    streamer, names, passes = model.streamer, [], [0]
    make, begin = streamer._readable, streamer.begin

    def counted(source: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(source.unit.name)
        return make(source, *args, **kwargs)

    def begun() -> None:
        passes[0] += 1
        begin()

    streamer._readable, streamer.begin = counted, begun
    model.streamer_passes = passes
    return names


def test_scored_texts(source: Path) -> None:
    folder = split(source)
    texts = [ScoredText(i, tuple(ids[0].tolist()), (7, 40 + i)) for i, ids in enumerate(prompts())]
    logprobs = [
        {s.index: s.logprob for s in score(reading(load(folder, budget)), texts, Room(tokens=20, exact=True))}
        for budget in (0, ALL)
    ]
    assert logprobs[0] == logprobs[1]


def test_threads_alternate_at_a_tower(tmp_path: Path) -> None:
    """One calls the whole model, one its tower alone."""
    folder = split(checkpoint(tmp_path, "glm4v"))
    inputs = READING["glm4v"].made()
    resident, model = load(folder), load(folder, 0)

    def tower(vision_model: Any) -> torch.Tensor:
        with torch.inference_mode():
            output = vision_model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
        results: torch.Tensor = torch.cat(tuple(output.pooler_output))
        return results

    expected = [logits_of(resident, inputs), tower(resident)]
    results: list[list[torch.Tensor]] = [[], []]

    def work(index: int) -> None:
        torch.set_num_threads(THREADS)
        for _ in range(5):
            results[index].append(logits_of(model, inputs) if index == 0 else tower(model))

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    for index in range(2):
        assert len(results[index]) == 5
        assert all(torch.equal(vision_model, expected[index]) for vision_model in results[index])


def logits_of(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        output: torch.Tensor = model(**inputs).logits
    return output


def test_forward_called_as_peft_does(source: Path) -> None:
    """Not the model is called, but its forward."""
    folder = split(source)
    model, expected = reading(load(folder, 0)), logits(reading(load(folder)))
    with torch.inference_mode():
        assert torch.equal(model.forward(INPUT).logits, expected)
    assert model.streamer.bound == set()


def test_with_several_readers_of_a_layer(source: Path) -> None:
    """A read in the middle of a layer takes none of the buffers that layers go through."""
    folder = split(source)
    model, resident = load(folder, 0), load(folder)
    for reader in (model, resident):
        for layer in reader.base_model.layers:
            layer.mlp.register_forward_hook(
                lambda module, args, output, reader=reader: output + linear(output, reader.lm_head.weight).mean()
            )
    expected = logits(resident)
    for _ in range(3):
        assert torch.equal(in_time(lambda: logits(model)), expected)
