"""Rotary frequencies of GGUF files: what llama.cpp's converter writes becomes what the config said."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rabbitllm
from rabbitllm.checkpoints.gguf_rotary import FACTORS, rope_parameters, rotary_factors, scaling_metadata
from rabbitllm.errors import UnreadableFormatError
from tests.support.gguf_files import VOCABULARY, write_gguf

IDS = torch.arange(3, 120)[None] % VOCABULARY
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
PLAIN = {"rope_type": "default", "rope_theta": 500000.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}


def llama(rope: dict[str, Any], **more: Any) -> Any:
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "max_position_embeddings": 131072}
    return transformers.LlamaConfig(**{**sizes, **more}, rope_parameters=dict(rope))


@pytest.mark.parametrize("original", [256, 2048, 8192])
@pytest.mark.parametrize("factor", [8.0, 16.0, 32.0])
@pytest.mark.parametrize("head", [64, 128])
def test_llama_3_parameters_from_divisors(factor: float, original: int, head: int) -> None:
    config = llama({**LLAMA3, "factor": factor, "original_max_position_embeddings": original}, head_dim=head)
    factors = rotary_factors(config)
    assert factors is not None
    assert (factors.min(), factors.max()) == (1.0, factor)
    assert rope_parameters(llama(PLAIN, head_dim=head), {}, {FACTORS: factors}) == config.rope_parameters


@pytest.mark.parametrize(
    "rope",
    [
        PLAIN,
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        YARN,
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    ],
)
def test_rope_parameters_survive_a_round_trip(rope: dict[str, Any]) -> None:
    said = {key: value for key, value in scaling_metadata(llama(rope)).items() if value is not None}
    read = rope_parameters(llama({"rope_type": "default", "rope_theta": rope["rope_theta"]}), said, {})
    assert read == llama(rope).rope_parameters


def test_layers_with_a_window_are_not_scaled() -> None:
    config = transformers.Gemma3TextConfig()
    read = rope_parameters(config, {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, {})
    assert read is not None
    assert read["full_attention"] == {**config.rope_parameters["full_attention"], "rope_type": "linear", "factor": 8.0}
    assert read["sliding_attention"] == config.rope_parameters["sliding_attention"]


@pytest.mark.parametrize("partial", [1.0, 0.75])
def test_two_sets_of_divisors_of_phi_3(partial: float) -> None:
    """llama.cpp writes the number of rotated elements, and the factor of attention."""
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 4096}
    sizes["original_max_position_embeddings"] = 1024
    count = int(64 * partial) // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": partial,
        "short_factor": [1.0 + index / 64 for index in range(count)],
        "long_factor": [2.0 + index for index in range(count)],
        "original_max_position_embeddings": 1024,
    }
    config = transformers.Phi3Config(**sizes, rope_parameters=rope)
    attention = math.sqrt(1 + math.log(4) / math.log(1024))
    said = {
        "rope.dimension_count": int(64 * partial),
        "rope.scaling.original_context_length": 1024,
        "rope.scaling.attn_factor": attention,
    }
    factors = {SHORT: np.float32(rope["short_factor"]), LONG: np.float32(rope["long_factor"])}
    read = transformers.Phi3Config(**sizes)
    parameters = rope_parameters(read, said, factors)
    read.rope_parameters = parameters
    for length in (1000, 2000):
        actual, expected = (ROPE_INIT_FUNCTIONS["longrope"](model, "cpu", seq_len=length) for model in (read, config))
        assert torch.equal(actual[0], expected[0])
        assert actual[1] == pytest.approx(expected[1])


@pytest.mark.parametrize(
    ("said", "factors", "message"),
    [
        ({"rope.scaling.type": "dynamic"}, {}, "is 'dynamic'; linear, yarn, longrope and none are read"),
        ({"rope.scaling.type": "yarn"}, {}, "has no rope.scaling.factor"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": -2.0}, {}, "is -2.0; it must be above 0"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": "8"}, {}, "rope.scaling.factor is not a number"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": math.nan}, {}, "rope.scaling.factor is not a number"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, {}, "metadata lack .* or context_length"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.1},
            {},
            "does not support rope.scaling.yarn_log_multiplier",
        ),
        ({"rope.scaling.type": "longrope"}, {}, f"needs the tensors {SHORT} and {LONG}"),
        ({}, {FACTORS: np.ones(7, np.float32)}, r"has shape \(7,\), expected \(64,\)"),
        ({}, {FACTORS: np.zeros(64, np.float32)}, "not positive"),
        ({}, {FACTORS: np.full(64, np.nan, np.float32)}, "not positive"),
        ({}, {SHORT: np.ones(64, np.float32)}, "requires rope_factors_short"),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
            {FACTORS: np.ones(64, np.float32)},
            "and scaling of type linear",
        ),
    ],
)
def test_inexpressible_scaling_is_refused(said: dict[str, Any], factors: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_parameters(llama(PLAIN), said, factors)


def test_default_scaling_types_are_those_of_llama_cpp() -> None:
    linear = {**PLAIN, "rope_type": "linear", "factor": 2.0}
    assert rope_parameters(llama(PLAIN), {"rope.scale_linear": 2.0}, {}) == linear
    assert rope_parameters(llama(PLAIN), {"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, {}) == PLAIN
    assert rope_parameters(llama(PLAIN), {"rope.scaling.factor": 0.0}, {}) == PLAIN
    assert rope_parameters(transformers.GPT2Config(), {}, {}) is None


# In files.


def with_factors(writer: gguf.GGUFWriter, factors: np.ndarray[Any, Any]) -> None:
    writer.add_tensor(FACTORS, factors)


@pytest.mark.bits
def test_file_with_custom_divisors(tmp_path: Path) -> None:
    """Powers of two, by which dividing does not round: the frequencies of transformers, divided, have the same bits."""
    factors = np.float32([2 ** (index % 3) for index in range(32)])
    file = write_gguf(tmp_path / "model.gguf", changed=lambda writer: with_factors(writer, factors))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    ignored = logits(plain)
    plain.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    model = rabbitllm.AutoModel.from_pretrained(file, device="cpu", dtype="float32", exact=True)
    assert torch.equal(logits(model), logits(plain))
    assert not torch.equal(logits(plain), ignored)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        outputs: torch.Tensor = model(IDS).logits
    return outputs


def test_inexpressible_scaling_is_refused_before_deletion(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", changed=lambda writer: writer.add_string("llama.rope.scaling.type", "x"))
    with pytest.raises(UnreadableFormatError, match=r"The rotary frequencies of model.gguf cannot be read: .* 'x'"):
        rabbitllm.AutoModel.from_pretrained(file, device="cpu", sequential_shard_processing=True)
    assert file.exists()


def test_divisors_in_another_file_than_the_metadata_are_refused(tmp_path: Path) -> None:
    """The file may be used up and deleted when a split goes on, and the config is made again."""
    first = write_gguf(tmp_path / "model.gguf", files=2)
    second = sorted(tmp_path.iterdir())[1]
    reader = gguf.GGUFReader(second)
    writer = gguf.GGUFWriter(tmp_path / "again.gguf", "llama")
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", 2)
    writer.add_tensor(FACTORS, np.ones(32, np.float32))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "again.gguf").replace(second)
    with pytest.raises(UnreadableFormatError, match=r"expected F32, at most .* in model-00001-of-00002.gguf"):
        rabbitllm.AutoModel.from_pretrained(first, device="cpu")
