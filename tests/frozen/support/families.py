"""Tiny checkpoints of 22 architectures whose bytes are the same on every machine.

Weights come from integer arithmetic: a hash of the tensor's name begins a sequence of 64 bit integers, and each weight
is a small integer over a power of two. No random numbers of torch and no rounding of a library have a part in it.

Knows transformers and safetensors; knows nothing of rabbitllm.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from safetensors.torch import save_file

from tests.support.builders import SINGLE_NAME, make_tokenizer, read_tensors, reshard

VOCABULARY = 272
"""As many tokens as the tokenizer has."""
INPUT = torch.tensor([[1, 40, 81, 7, 200, 33, 160, 5, 92, 11, 64]])
"""A prompt longer than every sliding window."""

_WINDOW = 8
_COMMON: Mapping[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_NARROW: Mapping[str, object] = {"head_dim": 16}
_TWO_KINDS = ["sliding_attention", "full_attention"]
_LINEAR = re.compile(r"(_proj|_proj_with_mqa|\.w[123])\.weight$")
"""Weights that checkpoints in FP8 have as codes."""
_NEVER_COMPRESSED = re.compile(r"(^|\.)(gate|router|shared_expert_gate)\.weight$|conv|A_log$|[._]bias$")
_FP8_LARGEST = 448.0
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Family:
    """One architecture at its smallest.

    Attributes:
        model_type: of transformers.
        settings: of its config, over the common ones.
        dtype: of the weights in the checkpoint.
        auto: the auto class of transformers that makes and loads it.
        quantized: "fp8" or "mxfp4" for a checkpoint that is published so.
    """

    model_type: str
    settings: Mapping[str, object] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    auto: str = "AutoModelForCausalLM"
    quantized: str | None = None

    @property
    def auto_class(self) -> Any:
        return getattr(transformers, self.auto)

    def config(self) -> Any:
        if self.model_type == "llava":
            text = transformers.AutoConfig.for_model("llama", **_COMMON)
            vision = transformers.AutoConfig.for_model("clip_vision_model", **_VISION)
            return transformers.LlavaConfig(
                vision_config=vision, text_config=text, image_token_id=271, image_seq_length=4
            )
        return transformers.AutoConfig.for_model(self.model_type, **{**_COMMON, **self.settings})


_VISION: Mapping[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 32,
}
_GPT_OSS: Mapping[str, object] = {
    **_NARROW,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": _WINDOW,
    "layer_types": _TWO_KINDS,
}

FAMILIES: Mapping[str, Family] = {
    # with matrices large enough for 4bit-double to differ from 4bit
    "llama": Family("llama", {"intermediate_size": 512}),
    "llama-tied-float32": Family("llama", {"tie_word_embeddings": True}, torch.float32),
    "qwen3": Family("qwen3", {**_NARROW, "tie_word_embeddings": True}),
    "gemma3": Family(
        "gemma3_text",
        {
            **_NARROW,
            "query_pre_attn_scalar": 16,
            "sliding_window": _WINDOW,
            "layer_types": _TWO_KINDS,
            "tie_word_embeddings": True,
        },
    ),
    "gpt2": Family("gpt2", {"tie_word_embeddings": True}, torch.float32),
    "phi3": Family("phi3"),
    "mistral": Family("mistral", {"sliding_window": _WINDOW}),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": Family(
        "qwen3_moe",
        {
            **_NARROW,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 80,
            "decoder_sparse_step": 1,
        },
    ),
    "gpt_oss": Family("gpt_oss", _GPT_OSS),
    "deepseek_v3": Family(
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 80,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "llama4": Family(
        "llama4_text",
        {
            **_NARROW,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 16,
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "mamba": Family("mamba", {"state_size": 8, "expand": 2, "time_step_rank": 8}, torch.float32),
    "falcon_h1": Family(
        "falcon_h1",
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 16,
        },
        torch.float32,
    ),
    "qwen3_next": Family(
        "qwen3_next",
        {
            **_NARROW,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 80,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "lfm2": Family("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "t5": Family(
        "t5",
        {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "tie_word_embeddings": True,
        },
        torch.float32,
        "AutoModelForSeq2SeqLM",
    ),
    "bart": Family(
        "bart",
        {
            "d_model": 64,
            **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
            "decoder_start_token_id": 2,
            "forced_eos_token_id": None,
            "tie_word_embeddings": True,
        },
        torch.float32,
        "AutoModelForSeq2SeqLM",
    ),
    "bert": Family("bert", {"tie_word_embeddings": True}, torch.float32, "AutoModelForMaskedLM"),
    "llava": Family("llava", auto="AutoModelForImageTextToText"),
    "qwen3-fp8": Family("qwen3", _NARROW, quantized="fp8"),
    "gpt_oss-mxfp4": Family("gpt_oss", _GPT_OSS, quantized="mxfp4"),
}


def build(folder: Path, name: str, *, shards: int = 3, **settings: object) -> Path:
    """Write the checkpoint of a family, with a tokenizer, and return the folder.

    Args:
        folder: made if it is not there.
        name: of `FAMILIES`.
        shards: files that the weights are spread over; 1 has no index.
        settings: of the config, over the family's own; such a checkpoint has no golden digest.
    """
    family = FAMILIES[name]
    model = family.auto_class.from_config(_with(family.config(), settings), dtype=torch.float32).eval()
    _fill(model)
    model.to(family.dtype)
    model.save_pretrained(folder, max_shard_size="1TB")
    make_tokenizer().save_pretrained(folder)
    if family.quantized is not None:
        _publish(folder, family.quantized)
    if shards > 1:
        names = list(read_tensors(folder))
        place = {one: index * shards // len(names) for index, one in enumerate(names)}
        reshard(folder, place.__getitem__)
    return folder


def weights_digest(folder: Path) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of all tensors of a checkpoint, whatever its shards."""
    digest = hashlib.sha256()
    for name, tensor in sorted(read_tensors(folder).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def arguments(name: str) -> dict[str, torch.Tensor]:
    """Inputs of a forward call."""
    if name == "llava":
        pixels = _integers("pixels", 3 * 28 * 28).reshape(1, 3, 28, 28) / 256
        places = torch.full((1, 4), 271)
        return {
            "input_ids": torch.cat([INPUT[:, :3], places, INPUT[:, 3:]], 1),
            "pixel_values": torch.from_numpy(pixels).to(torch.bfloat16),
        }
    if FAMILIES[name].auto == "AutoModelForSeq2SeqLM":
        return {"input_ids": INPUT, "decoder_input_ids": INPUT[:, :7]}
    return {"input_ids": INPUT}


def plain_model(folder: Path, family: str | None = None, **options: Any) -> Any:
    """The model as transformers loads it, each weight at an address that suits every kernel."""
    auto = FAMILIES[family].auto_class if family else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, **{"dtype": "auto", **options}).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def dequantized(folder: Path, target: Path, compression: str) -> Path:
    """Write the checkpoint that a compressed one stands for, by bitsandbytes itself, and return its folder.

    Args:
        folder: of an uncompressed checkpoint.
        target: a folder that is not there yet.
        compression: "4bit", "4bit-double" or "8bit".
    """
    from bitsandbytes import functional

    target.mkdir()
    for path in (*folder.glob("*.json"), *folder.glob("*.jinja")):
        if not path.name.endswith(".index.json"):
            shutil.copy(path, target)
    tensors = read_tensors(folder)
    for name, tensor in tensors.items():
        if not is_compressed(name, tensor):
            continue
        if compression == "8bit":
            codes, state = functional.quantize_blockwise(tensor, blocksize=2048)
            state.dtype = tensor.dtype
            changed = functional.dequantize_blockwise(codes, state)
        else:
            doubled = compression == "4bit-double" and tensor.numel() >= 32768
            codes, state = functional.quantize_4bit(tensor, blocksize=64, quant_type="nf4", compress_statistics=doubled)
            state.shape = torch.Size([tensor.numel()])  # its kernel for the CPU begins a block with each row
            changed = functional.dequantize_4bit(codes, state)
        tensors[name] = changed.reshape(tensor.shape)
    save_file(tensors, target / SINGLE_NAME, metadata={"format": "pt"})
    return target


def is_compressed(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor becomes codes: large matrices and stacks of them, but for routers and convolutions."""
    large = tensor.is_floating_point() and 2 <= tensor.ndim <= 3 and tensor.numel() >= 4096
    return large and not _NEVER_COMPRESSED.search(name)


def _with(config: Any, settings: Mapping[str, object]) -> Any:
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def _fill(model: torch.nn.Module) -> None:
    """Give every stored tensor its values: small ones, around one where the model begins with ones."""
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not tensor.is_floating_point():
                continue
            offset = 1 if tensor.ndim < 2 and bool((tensor == 1).all()) else 0
            values = _integers(name, tensor.numel()).reshape(tuple(tensor.shape)) / 2048 + offset
            tensor.data = torch.from_numpy(values.astype(numpy.float32))
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()


def _integers(label: str, count: int) -> Any:
    """float64 array of integers from -510 to 510, bell-shaped: sums of the bytes of splitmix64's outputs."""
    start = numpy.uint64(int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "little"))
    with numpy.errstate(over="ignore"):
        state = start + numpy.arange(1, count + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        state ^= state >> numpy.uint64(31)
    four = state.astype("<u8").view(numpy.uint8).reshape(count, 8)[:, :4]
    return four.sum(1, dtype=numpy.int64).astype(numpy.float64) - 510


def _publish(folder: Path, form: str) -> None:
    """Rewrite a checkpoint as it would be published in FP8 with blocks of 16, or with MXFP4 experts."""
    changed = dict(
        entry
        for name, tensor in read_tensors(folder).items()
        for entry in (_fp8(name, tensor) if form == "fp8" else _mxfp4(name, tensor))
    )
    save_file(changed, folder / SINGLE_NAME, metadata={"format": "pt"})
    settings: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    settings["weight_block_size"] = [16, 16]
    if form == "mxfp4":
        left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        settings = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))


Named = Iterator[tuple[str, torch.Tensor]]


def _fp8(name: str, tensor: torch.Tensor) -> Named:
    """Codes (out, in) and the scales (out / 16, in / 16) of their blocks, powers of two."""
    if not _LINEAR.search(name):
        yield name, tensor
        return
    blocks = tensor.float().unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
    scales = _power_of_two(blocks.abs().amax((1, 3)) / _FP8_LARGEST)
    yield name, (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
    yield f"{name}_scale_inv", scales


def _mxfp4(name: str, tensor: torch.Tensor) -> Named:
    """Of experts (E, in, out): `_blocks` (E, out, in / 32, 16), two codes a byte, the lower half first; `_scales`."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield name, tensor
        return
    groups = tensor.float().transpose(1, 2).unflatten(2, (-1, 32))
    scales = _power_of_two(groups.abs().amax(3) / _FP4_VALUES[-1])
    scaled = groups / scales[..., None]
    codes = (scaled.abs()[..., None] - torch.tensor(_FP4_VALUES)).abs().argmin(-1).to(torch.uint8)
    codes += 8 * (scaled < 0).to(torch.uint8)
    yield f"{name}_blocks", codes[..., 0::2] | (codes[..., 1::2] << 4)
    yield f"{name}_scales", (torch.frexp(scales).exponent + 126).to(torch.uint8)


def _power_of_two(values: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below each value, exactly."""
    mantissa, exponent = torch.frexp(values)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(values), exponent)
