"""Tensor name -> layer: by block, and by a user's own patterns."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rabbitllm
from rabbitllm.checkpoints import naming as naming_module
from rabbitllm.checkpoints.naming import (
    LayerName,
    assign_layers,
    layer_order,
    naming,
    naming_by_block,
    naming_for,
    register_layer_naming,
)
from rabbitllm.errors import OptionError


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Forget what a test registers."""
    before = dict(naming_module._registered)
    yield
    naming_module._registered.clear()
    naming_module._registered.update(before)


def ids(tensors: list[str], family: str | None) -> dict[str, str]:
    return {tensor: layer.id for tensor, layer in assign_layers(tensors, family).items()}


# The requirement's own examples, and the file names of RabbitLLM 1.1


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral", "qwen3_moe", "gemma2", "phi3", "deepseek_v3"])
@pytest.mark.parametrize(
    ("tensor", "layer"),
    [
        ("model.layers.0.self_attn.q_proj.weight", LayerName("layers.0", "model.layers.0")),
        ("model.layers.0.input_layernorm.weight", LayerName("layers.0", "model.layers.0")),
        ("model.layers.1.mlp.down_proj.weight", LayerName("layers.1", "model.layers.1")),
        ("model.layers.10.self_attn.q_proj.bias", LayerName("layers.10", "model.layers.10")),
        ("model.layers.79.mlp.experts.127.gate_proj.weight", LayerName("layers.79", "model.layers.79")),
        ("model.layers.3.mlp.gate.e_score_correction_bias", LayerName("layers.3", "model.layers.3")),
        ("model.embed_tokens.weight", LayerName("embed_tokens", "model.embed_tokens")),
        ("model.norm.weight", LayerName("norm", "model.norm")),
        ("lm_head.weight", LayerName("lm_head", "lm_head")),
        ("lm_head.weight_scale_inv", LayerName("lm_head", "lm_head")),
        ("lm_head.weight.nested_absmax", LayerName("lm_head", "lm_head")),
        ("lm_head.weight.quant_state.bitsandbytes__nf4", LayerName("lm_head", "lm_head")),
        ("model.layers.2.mlp.up_proj.weight.absmax", LayerName("layers.2", "model.layers.2")),
        ("model.layers.2.mlp.experts.gate_up_proj_blocks", LayerName("layers.2", "model.layers.2")),
        ("model.rotary_emb.inv_freq", LayerName("rotary_emb", "model.rotary_emb")),
        ("mtp.layers.0.self_attn.q_proj.weight", LayerName("mtp.layers.0", "mtp.layers.0")),
        ("model.mtp.norm.weight", LayerName("mtp", "model.mtp")),
    ],
)
def test_layer_of_a_tensor(family: str, tensor: str, layer: LayerName) -> None:
    assert assign_layers([tensor], family) == {tensor: layer}


@pytest.mark.parametrize(
    ("family", "tensor", "layer"),
    [
        ("gpt2", "h.11.attn.c_attn.weight", "h.11"),
        ("gpt2", "wte.weight", "wte"),
        ("gpt_neox", "gpt_neox.layers.3.attention.dense.weight", "layers.3"),
        ("gpt_neox", "embed_out.weight", "embed_out"),
        ("gpt_neox", "gpt_neox.final_layer_norm.bias", "final_layer_norm"),
        ("falcon_mamba", "backbone.layers.7.mixer.A_log", "layers.7"),
        ("gemma3", "language_model.model.layers.5.mlp.up_proj.weight", "language_model.model.layers.5"),
        (
            "gemma3",
            "vision_tower.vision_model.encoder.layers.5.mlp.fc1.weight",
            "vision_tower.vision_model.encoder.layers.5",
        ),
        ("qwen2_5_vl", "visual.blocks.2.attn.qkv.weight", "visual.blocks.2"),
        ("qwen2_5_vl", "model.layers.2.self_attn.q_proj.weight", "layers.2"),
        ("qwen3_vl", "model.language_model.layers.2.self_attn.q_proj.weight", "language_model.layers.2"),
        ("llava", "multi_modal_projector.linear_1.weight", "multi_modal_projector.linear_1"),
    ],
)
def test_other_stacks(family: str, tensor: str, layer: str) -> None:
    assert ids([tensor], family) == {tensor: layer}


# Layers that would get one id


def test_two_layers_never_share_an_id() -> None:
    tensors = ["model.norm.weight", "norm.weight", "model.layers.0.norm.weight", "model.embed_tokens.weight"]
    assert ids(tensors, "llama") == {
        "model.norm.weight": "model.norm",
        "norm.weight": "norm",
        "model.layers.0.norm.weight": "layers.0",
        "model.embed_tokens.weight": "embed_tokens",
    }


WORDS = st.lists(st.sampled_from(["model", "layers", "0", "1", "h", "norm", "weight", "mtp"]), min_size=1, max_size=6)


@given(st.lists(WORDS.map(".".join), unique=True, max_size=12), st.sampled_from(["llama", None]))
def test_id_and_file_are_one_to_one(tensors: list[str], family: str | None) -> None:
    assigned = assign_layers(tensors, family)
    assert list(assigned) == tensors
    pairs = {(layer.id, layer.stem) for layer in assigned.values()}
    assert len({id for id, _ in pairs}) == len({stem for _, stem in pairs}) == len(pairs)
    assert all(tensor == layer.stem or tensor.startswith(layer.stem) for tensor, layer in assigned.items())


# A user's own patterns


def test_patterns_can_be_replaced(caplog: pytest.LogCaptureFixture) -> None:
    tensors = ["net.0.w", "net.0.v", "net.1.w", "head"]
    rabbitllm.register_layer_naming("mine", [r"(?P<id>net\.\d+)\."])
    assert ids(tensors, "mine") == {"net.0.w": "net.0", "net.0.v": "net.0", "net.1.w": "net.1", "head": "head"}
    register_layer_naming("mine", [r"(?P<id>net)\."])
    assert ids(tensors, "mine")["net.1.w"] == "net"
    assert not caplog.records


def test_rules_of_a_known_type_can_be_replaced() -> None:
    register_layer_naming("llama", [r"model\.(?P<id>layers)\."])
    assert ids(["model.layers.0.w", "model.layers.1.w"], "llama") == dict.fromkeys(
        ["model.layers.0.w", "model.layers.1.w"], "layers"
    )


def test_patterns_of_the_call_come_first() -> None:
    custom = naming([r"(?P<id>model)\."])
    assert assign_layers(["model.layers.0.w"], "llama", custom) == {"model.layers.0.w": LayerName("model", "model")}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("(", "is not a regular expression"), (r"model\.layers\.\d+", "has no group named 'id', as in"), ("", "no group")],
)
def test_unusable_pattern(pattern: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as refused:
        register_layer_naming("mine", [pattern])
    assert repr(pattern) in str(refused.value)
    assert naming_for("mine") == naming_by_block()


# Names that no pattern matches


@pytest.mark.parametrize("family", ["never_heard_of", None])
def test_names_like_a_llama(family: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """Its files have the names that earlier versions gave them."""
    tensors = {
        "model.layers.0.w": LayerName("layers.0", "model.layers.0"),
        "model.layers.12.a.b": LayerName("layers.12", "model.layers.12"),
        "layers.3.w": LayerName("layers.3", "layers.3"),
        "model.embed_tokens.weight": LayerName("embed_tokens", "model.embed_tokens"),
        "lm_head.weight": LayerName("lm_head", "lm_head"),
        "x": LayerName("x", "x"),
    }
    assert assign_layers(list(tensors), family) == tensors
    assert not caplog.records


@pytest.mark.parametrize(
    ("tensor", "layer"),
    [
        ("backbone.layers.7.mixer.A_log", "layers.7"),
        ("backbone.embeddings.weight", "embeddings"),
        ("bert.encoder.layer.3.attention.self.query.weight", "bert.encoder.layer.3"),
        ("transformer.h.2.attn.c_attn.weight", "h.2"),
        ("transformer.blocks.2.ffn.up_proj.weight", "blocks.2"),
        ("model.audio_tower.conformer.3.norm.weight", "audio_tower.conformer.3"),
        ("model.layers.5.mlp.experts.317.up_proj.weight", "layers.5"),
        ("vision_tower.stages.1.blocks.2.conv.weight", "vision_tower.stages.1"),
        ("rwkv.blocks.0.attention.time_decay", "rwkv.blocks.0"),
        ("encoder.1x1.layers.4.weight", "encoder.1x1.layers.4"),
        ("0.auto_model.encoder.layer.11.output.dense.bias", "0.auto_model.encoder.layer.11"),
        ("0.1.weight", "0.1"),
        ("2.weight", "2"),
        ("vision-tower.patch-embed.proj.weight", "vision-tower.patch-embed.proj"),
        ("lm_head.weight.quant_state.bitsandbytes__nf4", "lm_head"),
        ("logit_scale", "logit_scale"),
    ],
)
def test_a_tensor_is_grouped_by_the_block_of_the_outermost_list(tensor: str, layer: str) -> None:
    (name,) = assign_layers([tensor], "never_heard_of").values()
    assert name.id == layer
    assert tensor.startswith(name.stem)
    assert name.stem.endswith(layer)


def test_warning_if_most_tensors_are_in_no_block(caplog: pytest.LogCaptureFixture) -> None:
    tensors = ["tower.first.w", "tower.first.b", "tower.second.w", "tower.layers.0.w"]
    assert set(ids(tensors[1:], "odd").values()) == {"tower.first", "tower.second", "tower.layers.0"}
    (record,) = caplog.records
    assert record.message == (
        "Of the 3 tensors of model type 'odd', 2 do not belong to a numbered block such as 'model.layers.0.'; each of "
        "their modules gets a layer file. To set other layers: rabbitllm.register_layer_naming('odd', [...])."
    )
    caplog.clear()
    assert len(set(ids([*tensors, "tower.layers.0.b"], "odd").values())) == 3
    assert len(caplog.records) == 1
    caplog.clear()
    ids([*tensors, "tower.layers.0.b", "tower.layers.1.b"], "odd")
    assert not caplog.records


def test_names_without_modules_are_layers() -> None:
    tensors = ["encoder_0/kernel", "encoder_0/bias"]
    assert assign_layers(tensors, "odd") == {tensor: LayerName(tensor, tensor) for tensor in tensors}


def test_known_family_with_a_name_of_no_pattern() -> None:
    assert assign_layers(["plain"], "llama") == {"plain": LayerName("plain", "plain")}


def test_known_family_with_a_block_of_no_pattern() -> None:
    tensors = ["visual.merger.mlp.0.weight", "visual.merger.mlp.0.bias", "visual.merger.ln_q.weight"]
    assert ids(tensors, "qwen2_vl") == {
        "visual.merger.mlp.0.weight": "visual.merger.mlp.0",
        "visual.merger.mlp.0.bias": "visual.merger.mlp.0",
        "visual.merger.ln_q.weight": "visual.merger.ln_q",
    }


def test_blocks_do_not_change_layers_that_a_pattern_names() -> None:
    register_layer_naming("mine", [r"model\.(?P<id>layers\.\d+)\.", r"model\.(?P<id>norm)\."])
    layers = {
        "model.layers.0.w": LayerName("layers.0", "model.layers.0"),
        "model.norm.weight": LayerName("norm", "model.norm"),
    }
    unnamed = ["layers.0.w", "layers.0.b", "layers.1.w"]
    alone = {tensor: LayerName(tensor, tensor) for tensor in unnamed[:2]}
    blocks = {"layers.1.w": LayerName("layers.1", "layers.1")}
    assert assign_layers([*layers, *unnamed], "mine") == {**layers, **alone, **blocks}


@pytest.mark.parametrize("tensor", ["a." * 200_000 + "b", "0" * 400_000, "a" * 400_000 + ".", "." * 400_000])
def test_long_names_are_grouped_in_linear_time(tensor: str) -> None:
    (layer,) = assign_layers([tensor], None).values()
    assert tensor.startswith(layer.stem)


# The order of a pass


@pytest.mark.parametrize("layers", [3, 12])
def test_order_of_layers(layers: int) -> None:
    for lead, embedding, norm, head in (
        ("model.layers.", "model.embed_tokens", "model.norm", "lm_head"),
        ("transformer.h.", "transformer.wte", "transformer.ln_f", "lm_head"),
        ("gpt_neox.layers.", "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"),
    ):
        stack = [f"{lead}{index}" for index in range(layers)]
        expected = [embedding, *stack, norm, head]
        assert sorted(sorted(expected, key=lambda stem: re.sub(r"\d", "", stem)), key=layer_order) == expected
