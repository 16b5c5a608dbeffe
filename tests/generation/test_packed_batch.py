"""Sequences that are packed into one forward: every model type, company that cannot be packed, and failures."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList

from rabbitllm.engine import _whole_steps
from rabbitllm.generation._model_runner import ModelRunner
from rabbitllm.generation._packed_batch import PACKABLE, WITH_IMAGES, PackedForward, PackedSequence, can_be_packed
from rabbitllm.generation.kv_cache import CACHE_ARGUMENT, copied, empty_cache
from rabbitllm.quant import _vectors, products
from tests.engine.test_every_architecture import build
from tests.engine.test_siblings import checkpoint as compressed
from tests.generation.together import LENGTHS, Text, alone, assert_alike, forwards, generated, prompts, together
from tests.support import quantized
from tests.support.builders import FAMILIES, SMALL, WINDOW, Family, build_checkpoint
from tests.support.hybrid_families import HYBRIDS
from tests.support.integer_products import is_of_bytes
from tests.support.tiny_models import ALL, load, split


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("packed") / "model", "mixtral")


@pytest.mark.parametrize(
    ("compression", "budget"),
    [
        (None, 0),
        ("4bit", 0),
        pytest.param(None, ALL, marks=pytest.mark.long),
        pytest.param("4bit", ALL, marks=pytest.mark.long),
        pytest.param("8bit", 0, marks=pytest.mark.long),
        pytest.param("8bit", ALL, marks=pytest.mark.long),
    ],
)
def test_all_forms_of_weights(
    folder: Path, compression: str | None, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "max_panel_inputs", lambda width, dtype: 0)  # they round inputs of many rows alone
    if is_of_bytes("4bit"):  # and by codes of few rows
        for limits in (products.MAX_CODE_INPUTS, products.MAX_CODE_INPUTS_WITH_AMX):
            monkeypatch.setitem(limits, "4bit", 1 << 20)
    model = load(split(folder, compression), budget, exact=compression is None)
    inputs = prompts()
    with forwards(model) as rows:
        assert_alike(together(model, inputs), alone(model, inputs), 1e-4 if compression is None else 1e-3)
    assert rows[1] == 1 + 6 + 1


@pytest.mark.parametrize(
    ("family", "strategy", "packs"),
    [("qwen2_moe", "token", False), ("llama", "token", True), ("llama", "tensor", False)],
)
def test_rows_that_a_scheme_rounds_with_one_scale(tmp_path: Path, family: str, strategy: str, packs: bool) -> None:
    """Of two dimensions, as a mixture's shared expert gets them, or all of a tensor: a result would depend on the other
    sequences."""
    pytest.importorskip("compressed_tensors")
    folder = quantized.build_compressed_tensors(tmp_path / "model", HYBRIDS.get(family, family), "W8A8")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"]["strategy"] = strategy
    (folder / "config.json").write_text(json.dumps(config))
    model, others = load(split(folder), ALL, dtype="bfloat16", exact=False), (prompts(), prompts(seed=1))
    assert can_be_packed(model) is packs
    first, second = (together(model, [others[0][0], *some[1:]], new_tokens=4)[0] for some in others)
    assert torch.equal(first.logits[0], second.logits[0])


def test_exact_passes_have_the_bits_of_each_sequence_alone(folder: Path) -> None:
    model = load(split(folder), 0, dtype="bfloat16")
    inputs = prompts()
    with forwards(model) as rows:
        texts = together(model, inputs, exact=True)
    assert rows[:3] == [LENGTHS[0], 6, LENGTHS[2]]
    for text, reference in zip(texts, alone(model, inputs), strict=True):
        assert torch.equal(text.logits, reference.logits)


@pytest.mark.bits
@pytest.mark.skipif(not _vectors.lanes(), reason="no vectors of a kind that is used")
@pytest.mark.parametrize(
    ("family", "compression", "settings"),
    [
        ("llama", "4bit", {"num_hidden_layers": 3}),
        ("qwen2", "q8_0", {}),
        ("qwen3", "q4_k_m", {"head_dim": 64}),
        ("gemma3", "4bit", {"head_dim": 64, "sliding_window": 9}),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@torch.no_grad()
def test_rows_of_all_sequences_are_one_call(
    tmp_path: Path,
    family: str,
    compression: str,
    settings: dict[str, Any],
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has the bits of its steps alone; the second one has three rows, as of a draft."""
    model = load(compressed(tmp_path, family, compression, **settings), exact=False, dtype=dtype)
    whole, compute = list[torch.Size](), _whole_steps._Whole._compute

    def counted(self: Any, x: torch.Tensor, *args: Any, **named: Any) -> Any:
        result = compute(self, x, *args, **named)
        whole.append(x.shape)
        return result

    monkeypatch.setattr(_whole_steps._Whole, "_compute", counted)
    caches, packed, expected = [], list[PackedSequence](), list[torch.Tensor]()
    for length, rows in ((5, 1), (17, 3), (40, 1), (9, 1)):
        cache = empty_cache(model)
        model(prompts([length])[0], **{CACHE_ARGUMENT: cache})
        ids = prompts([rows], seed=length)[0]
        positions = torch.arange(length, length + rows)[None]
        packed.append(PackedSequence(ids, positions, copied(cache, length), rows))
        expected.append(torch.cat([model(ids[:, n : n + 1], **{CACHE_ARGUMENT: cache}).logits for n in range(rows)], 1))
        caches.append(cache)
    del whole[:]
    results = PackedForward(model)(packed)
    assert [len(shape) and shape[1] for shape in whole] == [6]
    assert all(torch.equal(result.logits, logits) for result, logits in zip(results, expected, strict=True))
    for sequence, cache in zip(packed, caches, strict=True):
        for layer, own in zip(sequence.cache.layers, cache.layers, strict=True):
            assert torch.equal(layer.keys, own.keys)
            assert torch.equal(layer.values, own.values)


def run(model: Any, works: list[Callable[[], None]]) -> list[BaseException | None]:
    """Let all begin at once, and say how each ended."""
    runner = ModelRunner(model)
    coroutines = [runner.coroutines.add(work) for work in works]
    while runner.coroutines.active:
        runner.run(runner.coroutines.active)
    runner.coroutines.close()
    return [coroutine.error for coroutine in coroutines]


UNPACKED: dict[str, dict[str, Any]] = {
    "no cache": {"use_cache": False},
    "hidden states": {"output_hidden_states": True},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 2, "output_logits": False},
    "looked up": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("way", UNPACKED)
def test_packed_together_with_an_unpacked_sequence(folder: Path, way: str) -> None:
    """In the same passes: each unit is brought once for both kinds."""
    model = load(split(folder), 0)
    inputs, texts = prompts(), {}
    expected = alone(model, inputs)
    settings = UNPACKED[way]
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 7, **settings}
    reference = model.generate(inputs[1], **options)

    def work(index: int) -> Callable[[], None]:
        def generate() -> None:
            texts[index] = generated(model, inputs[index])

        return generate

    def unpacked() -> None:
        texts["other"] = model.generate(inputs[1], **options)

    brought: list[Any] = []
    unit = model.model.layers[1]
    hook = unit.register_forward_pre_hook(lambda module, args: brought.append(module))
    assert run(model, [unpacked, work(0), work(2)]) == [None] * 3
    hook.remove()
    assert torch.equal(texts.pop("other"), reference)
    assert_alike([texts[0], texts[2]], [expected[0], expected[2]])
    assert len(brought) <= 8


def test_a_padded_prompt_is_not_packed(folder: Path) -> None:
    model = load(split(folder), 0)
    inputs = prompts()
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), inputs[0]], 1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 5}
    expected = model.generate(padded, attention_mask=mask, **options)
    texts: dict[int, Any] = {}

    def one() -> None:
        texts[0] = model.generate(padded, attention_mask=mask, **options)

    def other() -> None:
        texts[1] = generated(model, inputs[1])

    assert run(model, [one, other]) == [None, None]
    assert torch.equal(texts[0], expected)
    assert_alike([texts[1]], [generated(model, inputs[1])])


class Fails(LogitsProcessor):  # type: ignore[misc]
    """Raises at the third token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= LENGTHS[1] + 2:
            raise ZeroDivisionError("on purpose")
        return scores


def test_an_error_of_one_sequence_ends_it_alone(folder: Path) -> None:
    """Its own code, ids that the model does not have, and more positions than it has."""
    model = load(split(folder), 0)
    inputs, texts = prompts(), {}
    unknown = torch.tensor([[5, 70_000, 9]])

    def fails() -> None:
        generated(model, inputs[1], logits_processor=LogitsProcessorList([Fails()]))

    def goes_on() -> None:
        texts[2] = generated(model, inputs[2])

    errors = run(model, [fails, goes_on, lambda: generated(model, unknown) and None])
    assert isinstance(errors[0], ZeroDivisionError)
    assert errors[1] is None
    assert isinstance(errors[2], IndexError)
    assert_alike([texts[2]], [generated(model, inputs[2])])


def test_gradient_mode_is_unchanged(folder: Path) -> None:
    """`generate` switches them off for the thread; those that end must not switch them on for others."""
    model = load(split(folder), 0)
    inputs, states = prompts(), []
    hook = model.register_forward_pre_hook(lambda module, args: states.append(torch.is_grad_enabled()))
    works = [lambda n=n: generated(model, inputs[n], new_tokens=2 + 3 * n) and None for n in range(3)]
    assert run(model, works) == [None] * 3
    hook.remove()
    assert torch.is_grad_enabled()
    assert states
    assert not any(states)


def test_another_thread_uses_the_model_meanwhile(folder: Path) -> None:
    """With resident weights threads take no turns: the other thread gets the same results as alone."""
    model = load(split(folder), ALL)
    inputs, logits_seen = prompts(), []
    expected = generated(model, inputs[2])

    def use(module: Any, args: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: logits_seen.append(generated(model, inputs[2])))
            thread.start()
            thread.join()

    hook = model.model.layers[1].register_forward_pre_hook(use)
    works = [lambda n=n: generated(model, inputs[n], new_tokens=2) and None for n in range(2)]
    assert run(model, works) == [None] * 2
    hook.remove()
    assert len(logits_seen) == 2
    for logits_ in logits_seen:
        assert torch.equal(logits_.logits, expected.logits)


def test_angles_that_depend_on_the_longest_sequence(tmp_path: Path) -> None:
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    plain = FAMILIES["llama"]
    family = Family("llama", {**plain.settings, "rope_parameters": scaled, "max_position_embeddings": 64})
    model = load(split(build_checkpoint(tmp_path / "model", family)), 0)
    assert not can_be_packed(model)


def test_a_modified_model_continues_unpacked(folder: Path, caplog: Any) -> None:
    """As with another version of transformers: those of that pass fail, later ones do not."""
    model = load(split(folder), 0)
    inputs, texts = prompts(), {}
    layer = model.model.layers[1].self_attn
    ordinary = type(layer).forward

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs[CACHE_ARGUMENT]

        class Copies:
            def update(self, *new: Any, **more: Any) -> Any:
                return tuple(tensor.clone() for tensor in cache.update(*new, **more))

        return ordinary(self, *args, **{**kwargs, CACHE_ARGUMENT: Copies()})

    layer.forward = other.__get__(layer)
    expected: list[Text] = [generated(model, inputs[0])]
    runner = ModelRunner(model)
    lost = runner.coroutines.add(lambda: generated(model, inputs[0]) and None)
    runner.run(runner.coroutines.active)
    assert "other keys than the cache returned" in str(lost.error)

    def again() -> None:
        texts[0] = generated(model, inputs[0])

    runner.coroutines.add(again)
    while runner.coroutines.active:
        runner.run(runner.coroutines.active)
    runner.coroutines.close()
    assert "Packed passes are disabled" in caplog.text
    assert_alike([texts[0]], expected)


def test_attention_that_sees_all_sequences_is_noticed(folder: Path, caplog: Any) -> None:
    """A model that calls its attention function itself, past the interface: its rows would attend to each other."""
    model = load(split(folder), 0)
    inputs, texts = prompts(), {}
    layer = model.model.layers[1].self_attn
    ordinary = type(layer).forward

    def by_itself(self: Any, *args: Any, **kwargs: Any) -> Any:
        implementation = self.config._attn_implementation_internal
        self.config._attn_implementation_internal = "sdpa"
        try:
            return ordinary(self, *args, **{**kwargs, "attention_mask": None})
        finally:
            self.config._attn_implementation_internal = implementation

    expected = [generated(model, inputs[0])]
    layer.forward = by_itself.__get__(layer)
    errors = run(model, [lambda: generated(model, inputs[0]) and None, lambda: generated(model, inputs[2]) and None])
    assert [str(error) for error in errors] == ["attention was not computed by transformers' attention interface"] * 2
    assert "Packed passes are disabled" in caplog.text
    del layer.forward

    def again() -> None:
        texts[0] = generated(model, inputs[0])

    assert run(model, [again]) == [None]
    assert_alike([texts[0]], expected)


ALONE = PACKABLE - {name + "_text" for name in WITH_IMAGES if name.startswith("qwen")}
"""Types that stand by themselves; the others are only parts of models that see, too."""
SHORT = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3")
"""Full attention alone, with sliding windows, attention by the model's own function, and latent attention."""
SETTINGS: dict[str, Family] = {family.model_type: family for family in (*FAMILIES.values(), *HYBRIDS.values())}
"""Where there are some in which windows are shorter than prompts; of the others those of the sweep are taken."""


def checkpoint(folder: Path, name: str) -> Path:
    family = SETTINGS.get(name)
    if family is None:
        build(folder, name)
        return folder
    return build_checkpoint(folder, family, tied=family.ties[0])


def in_parts(runner: ModelRunner, number: int) -> None:
    """Before a pass: let it compute four tokens of each call at most."""
    for coroutine in runner.coroutines.active:
        coroutine.rows = 4


def test_prompts_are_longer_than_windows() -> None:
    assert sorted(LENGTHS)[1] > WINDOW


_TEXT: dict[str, Any] = SMALL | {"head_dim": 16, "initializer_range": 0.08}
_WINDOWS: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_ROTARY = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
_QWEN: dict[str, Any] = {"text_config": _TEXT | {"rope_parameters": _ROTARY}, "vision_config": _QWEN_VISION}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 80}
IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": _TEXT | _WINDOWS | {"num_hidden_layers": 4, "model_type": "gemma3_text"},
        "vision_config": _VISION | {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": _TEXT
        | _WINDOWS
        | {"num_hidden_layers": 4, "model_type": "gemma4_text", "global_head_dim": 16, "num_kv_shared_layers": 2}
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": SMALL["vocab_size"]},
        "vision_config": None,
        "audio_config": None,
    },
    "llava": {
        "text_config": _TEXT | {"model_type": "llama"},
        "vision_config": _VISION | {"model_type": "clip_vision_model"},
    },
    "mistral3": {
        "text_config": _TEXT | {"model_type": "mistral", "sliding_window": WINDOW},
        "vision_config": _VISION | {"model_type": "pixtral"},
    },
    "qwen2_vl": _QWEN | {"vision_config": _QWEN_VISION | {"hidden_size": 64}},
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN | {"text_config": _QWEN["text_config"] | _MOE},
}
"""Settings of models that see, too."""


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(WITH_IMAGES))
def test_sequences_of_vision_models(tmp_path: Path, name: str) -> None:
    tokens = {"image_token_id": 270, "image_token_index": 270, "video_token_id": 271}
    config = transformers.AutoConfig.for_model(name, **IMAGES[name], **tokens)
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForImageTextToText
    auto.from_config(config, dtype=torch.float32).eval().save_pretrained(tmp_path / "model")
    model = load(split(tmp_path / "model"), 0)
    assert can_be_packed(model)
    inputs = prompts()
    expected = alone(model, inputs)
    with forwards(model) as rows:
        assert_alike(together(model, inputs), expected)
    assert rows[1] == 1 + 6 + 1
    assert_alike(together(model, inputs, in_parts), expected)


def test_every_type_is_tested() -> None:
    assert IMAGES.keys() == WITH_IMAGES
    assert {name + "_text" for name in IMAGES if name.startswith("qwen")} <= PACKABLE


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in sorted(ALONE)]
)
def test_packed_sequences(tmp_path: Path, name: str) -> None:
    directory = split(checkpoint(tmp_path / "model", name))
    for budget in (0,) if name in SHORT else (0, 1 << 34):
        model = load(directory, budget)
        assert can_be_packed(model)
        inputs = prompts()
        expected = alone(model, inputs)
        with forwards(model) as rows:
            assert_alike(together(model, inputs), expected)
        assert rows[:2] == [LENGTHS[0] + 6 + LENGTHS[2], 1 + 6 + 1]
        with forwards(model) as rows:
            assert_alike(together(model, inputs, in_parts), expected)
        assert rows[:2] == [4 + 4 + 4, 1 + 2 + 4]
