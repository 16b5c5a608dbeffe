"""Tiny checkpoints that are published quantized: the same random models, their weights as codes and scales.

bitsandbytes' and torchao's are saved by transformers itself; the others are written here by the published rule of
their format, and it is transformers that says in the tests what they mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.support.builders import SINGLE_NAME, build_checkpoint, make_tokenizer, read_tensors, reshard
from tests.support.tiny_configs import models

Named = Iterator[tuple[str, torch.Tensor]]

_LINEAR = re.compile(r"(_proj|_proj_with_mqa|\.w[123])\.weight$")
"""Weights that such checkpoints have as codes: those of Linears in layers, experts' among them."""
FP8_LARGEST = 448.0
"""The largest number of float8_e4m3fn."""
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes 0 to 7 stand for; 8 to 15 are the same, negative."""


def build_fp8(folder: Path, family: str, block: int = 16, *, shards: int = 1, **settings: Any) -> Path:
    """As DeepSeek-V3 and Qwen3-FP8 are published: a scale for each block of so many rows and columns."""
    build_checkpoint(folder, family, dtype=torch.bfloat16, **settings)
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    return rewrite(folder, lambda name, tensor: fp8_blocks(name, tensor, block), config, shards)


def build_fp8_static(folder: Path, family: str, *, shards: int = 1, **settings: Any) -> Path:
    """As Mistral publishes: one scale for each matrix and one for its inputs, bfloat16 scalars."""
    build_checkpoint(folder, family, dtype=torch.bfloat16, **settings)

    def change(name: str, tensor: torch.Tensor) -> Named:
        if not _LINEAR.search(name):
            yield name, tensor
            return
        scale = (tensor.float().abs().amax() / FP8_LARGEST).bfloat16()
        yield name, (tensor.float() / scale.float()).clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
        yield f"{name}_scale_inv", scale
        yield f"{name.removesuffix('weight')}activation_scale", torch.tensor(0.01).bfloat16()

    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    return rewrite(folder, change, {**config, "modules_to_not_convert": ["lm_head"]}, shards)


def build_fp8_fused(folder: Path, plain: Path, family: str = "qwen3_moe", *, shards: int = 1) -> Path:
    """As Mistral Small 4 is published: the codes of all experts in one tensor, a scale for each of them.

    Into `plain` goes the model that the codes stand for.
    """
    build_fp8_static(folder, family)
    build_checkpoint(plain, family, dtype=torch.bfloat16)
    stored, expert = read_tensors(folder), re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight$")
    fused: dict[str, dict[str, list[torch.Tensor]]] = {}
    matrices = {}
    for name in [name for name in stored if name.endswith(".weight") and f"{name}_scale_inv" in stored]:
        codes, scale = stored[name], stored[f"{name}_scale_inv"]
        if match := expert.fullmatch(name):
            for part in ("weight", "weight_scale_inv", "activation_scale"):
                del stored[f"{name.removesuffix('weight')}{part}"]
            fused.setdefault(match[1], {}).setdefault(match[3], []).append(codes.float() * scale.float())
        else:
            matrices[name] = (codes.float() * scale.float()).bfloat16()
    for path, own in fused.items():
        gate_up = torch.cat([torch.stack(own["gate_proj"]), torch.stack(own["up_proj"])], 1)
        for leaf, stack in (("gate_up_proj", gate_up), ("down_proj", torch.stack(own["down_proj"]))):
            scales = (stack.abs().amax((1, 2), keepdim=True) / FP8_LARGEST).bfloat16()
            codes = (stack / scales.float()).clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)
            stored |= {f"{path}.{leaf}": codes, f"{path}.{leaf}_scale_inv": scales}
            stored[f"{path}.{leaf}_activation_scale"] = torch.full((len(codes),), 0.01).bfloat16()
            meant = (codes.float() * scales.float()).bfloat16()
            parts = {"gate_proj": 0, "up_proj": 1} if leaf == "gate_up_proj" else {"down_proj": 0}
            for number, matrix in enumerate(meant):
                for name, index in parts.items():
                    matrices[f"{path}.{number}.{name}.weight"] = matrix.chunk(len(parts))[index].contiguous()
    save_file(stored, folder / SINGLE_NAME, metadata={"format": "pt"})
    _spread(folder, shards)
    save_file(read_tensors(plain) | matrices, plain / SINGLE_NAME, metadata={"format": "pt"})
    return folder


def build_fp8_table(folder: Path, family: Any, *, shards: int = 1, **settings: Any) -> Path:
    """As Qwen3.8-Flash-Next-FP8 is published: experts in blocks, a table of n-grams in parts with one scale for all."""
    build_checkpoint(folder, family, dtype=torch.bfloat16, **settings)
    tables = {name: tensor for name, tensor in read_tensors(folder).items() if ".ngram_embedding." in name}
    scale = (max(part.abs().amax() for part in tables.values()).float() / FP8_LARGEST).bfloat16()

    def change(name: str, tensor: torch.Tensor) -> Named:
        if name in tables:
            yield name, (tensor.float() / scale.float()).to(torch.float8_e4m3fn)
            yield f"{name.partition('.shard_')[0]}.weight_scale", scale.view(1)
        else:
            yield from fp8_blocks(name, tensor, 16) if ".experts." in name else iter([(name, tensor)])

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    left = ["self_attn", "linear_attn", "shared_expert", "lm_head"]
    said = {"modules_to_convert": ["ngram_embedding"], "modules_to_not_convert": left}
    return rewrite(folder, change, {**config, **said}, shards)


def build_mxfp8(folder: Path, family: str, *, shards: int = 1, **settings: Any) -> Path:
    """FP8 with a power of two for each 32 elements of a row, as the byte of its exponent."""
    build_checkpoint(folder, family, dtype=torch.bfloat16, **settings)
    config = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
    return rewrite(folder, _mxfp8, {**config, "scale_fmt": "ue8m0"}, shards)


def build_mxfp4(folder: Path, *, shards: int = 1, **settings: Any) -> Path:
    """As GPT-OSS is published: experts at 4 bits, with a power of two for each 32 elements, all else bfloat16."""
    build_checkpoint(folder, "gpt_oss", dtype=torch.bfloat16, **settings)
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return rewrite(folder, _mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": left}, shards)


def build_bitsandbytes(
    folder: Path, family: str, bits: int, *, shards: int = 1, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Path:
    """A model that transformers loaded at 4bit or 8bit and saved; `options` as BitsAndBytesConfig takes them."""
    plain = build_checkpoint(folder / "plain", family, dtype=dtype)
    config = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True, **options})
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_pretrained(plain, dtype=dtype, quantization_config=config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    for path in plain.iterdir():
        path.unlink()
    plain.rmdir()
    _spread(folder, shards)
    return folder


@dataclass(frozen=True)
class Integers:
    """A matrix (out, in) in small integers: those, and the scales and zeros of groups of inputs, (out, groups)."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group: torch.Tensor
    """Of each input."""

    @property
    def matrix(self) -> torch.Tensor:
        """What they stand for, in the dtype of scales throughout."""
        centred = self.codes - self.zeros[:, self.group]
        return centred.to(self.scales.dtype) * self.scales[:, self.group]


def integers_of(tensor: torch.Tensor, bits: int, inputs: int = 16, *, disordered: bool = False) -> Integers:
    """Round a matrix (out, in) in groups of so many inputs, one after the other or any."""
    columns = tensor.shape[1]
    group = torch.arange(columns) // inputs
    if disordered:
        group = group[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    members = torch.stack([tensor[:, group == number].float() for number in range(columns // inputs)], 1)
    low, high = members.amin(2).clamp(max=0), members.amax(2).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).to(torch.float16 if tensor.dtype is torch.float32 else tensor.dtype)
    zeros = (-low / scales.float()).round().clamp(1, 2**bits - 1).to(torch.int64)
    codes = (tensor.float() / scales.float()[:, group] + zeros[:, group]).round().clamp(0, 2**bits - 1)
    return Integers(codes.to(torch.int64), scales, zeros, group)


def build_awq(folder: Path, family: str, plain: Path, *, shards: int = 1, group: int = 16, **settings: Any) -> Path:
    """As AutoAWQ publishes ("gemm", 4 bits), or GPTQModel in bfloat16, and into `plain` the model that its integers
    stand for."""
    config = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": True}
    return _build_integers(folder, family, plain, config, _awq, shards, bits=4, **settings)


def build_gptq(
    folder: Path,
    family: str,
    plain: Path,
    bits: int = 4,
    form: str = "gptq",
    *,
    shards: int = 1,
    group: int = 16,
    ordered: bool = False,
    **settings: Any,
) -> Path:
    """As AutoGPTQ publishes, and into `plain` the model that its integers stand for; with groups in no order, or
    `ordered`."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": form}
    config["desc_act"] = not ordered
    offset = 1 if form == "gptq" else 0

    def change(integers: Integers) -> dict[str, torch.Tensor]:
        return _gptq(integers, bits, offset)

    return _build_integers(folder, family, plain, config, change, shards, bits=bits, disordered=not ordered, **settings)


def build_auto_round(folder: Path, family: str, plain: Path, layout: str, *, shards: int = 1, **settings: Any) -> Path:
    """As auto-round publishes: in the layout of another tool, without the order of groups; some matrices are plain."""
    config = {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 16,
        "sym": True,
        "data_type": "int",
        "packing_format": layout,
        "autoround_version": "0.13.0",
        "block_name_to_quantize": "model.layers",
        "extra_config": {"model.layers.1.mlp.up_proj": {"bits": 16, "data_type": "fp"}},
    }

    def change(integers: Integers) -> dict[str, torch.Tensor]:
        if "awq" in layout:
            return _awq(integers)
        parts = _gptq(integers, 4, 0 if layout.endswith("gptqmodel") else 1)
        return {name: part for name, part in parts.items() if name != "g_idx"}

    return _build_integers(folder, family, plain, config, change, shards, bits=4, **settings)


def _build_integers(
    folder: Path,
    family: str,
    plain: Path,
    config: Mapping[str, Any],
    parts: Callable[[Integers], dict[str, torch.Tensor]],
    shards: int,
    *,
    bits: int,
    disordered: bool = False,
    dtype: torch.dtype = torch.float16,
    **settings: Any,
) -> Path:
    for target in (folder, plain):
        build_checkpoint(target, family, dtype=dtype, **settings)

    def change(name: str, tensor: torch.Tensor, *, packed: bool) -> Named:
        if not _LINEAR.search(name) or name.removesuffix(".weight") in config.get("extra_config", ()):
            yield name, tensor
            return
        integers = integers_of(tensor, bits, config["group_size"], disordered=disordered)
        if not packed:
            yield name, integers.matrix.contiguous()
            return
        for part, value in parts(integers).items():
            yield name.removesuffix("weight") + part, value

    rewrite(plain, lambda name, tensor: change(name, tensor, packed=False), None, 1)
    return rewrite(folder, lambda name, tensor: change(name, tensor, packed=True), config, shards)


def _awq(integers: Integers) -> dict[str, torch.Tensor]:
    turns = (0, 2, 4, 6, 1, 3, 5, 7)

    def packed(rows: torch.Tensor) -> torch.Tensor:
        """(rows, out) -> (rows, out / 8)."""
        eight = rows.reshape(rows.shape[0], -1, 8)
        return _int32(sum(eight[:, :, output] << 4 * place for place, output in enumerate(turns)))

    return {
        "qweight": packed(integers.codes.t()),
        "qzeros": packed(integers.zeros.t()),
        "scales": integers.scales.t().contiguous(),
    }


def _gptq(integers: Integers, bits: int, offset: int) -> dict[str, torch.Tensor]:
    count = 32 // bits

    def packed(rows: torch.Tensor) -> torch.Tensor:
        """(n, others) -> (n / count, others)."""
        several = rows.reshape(-1, count, rows.shape[1])
        return _int32(sum(several[:, place] << bits * place for place in range(count)))

    return {
        "qweight": packed(integers.codes.t()),
        "qzeros": packed(integers.zeros - offset).t().contiguous(),
        "scales": integers.scales.t().contiguous(),
        "g_idx": integers.group.to(torch.int32),
    }


def _int32(bits: Any) -> torch.Tensor:
    """int64 whose lower 32 bits are meant, as int32."""
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).contiguous()


def rewrite(
    folder: Path, change: Callable[[str, torch.Tensor], Named], quantized: Mapping[str, Any] | None, shards: int
) -> Path:
    """Replace the tensors of a checkpoint by what `change` makes of each, and say so in its config, if it is to."""
    changed = dict(entry for name, tensor in read_tensors(folder).items() for entry in change(name, tensor))
    save_file(changed, folder / SINGLE_NAME, metadata={"format": "pt"})
    if quantized is not None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": dict(quantized)}))
    _spread(folder, shards)
    return folder


def _spread(folder: Path, shards: int) -> None:
    """Over so many shards, so that codes and their scales lie apart now and then."""
    if shards > 1:
        names = list(read_tensors(folder))
        reshard(folder, lambda name: names.index(name) * shards // len(names))


def fp8_blocks(name: str, tensor: torch.Tensor, block: int) -> Named:
    if not _LINEAR.search(name):
        yield name, tensor
        return
    rows, columns = tensor.shape
    whole = torch.nn.functional.pad(tensor.float(), (0, -columns % block, 0, -rows % block))
    blocks = whole.unflatten(1, (-1, block)).unflatten(0, (-1, block))
    scales = blocks.abs().amax((1, 3)) / FP8_LARGEST
    codes = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)
    yield name, codes[:rows, :columns].to(torch.float8_e4m3fn).contiguous()
    yield f"{name}_scale_inv", scales


def _mxfp8(name: str, tensor: torch.Tensor) -> Named:
    if not _LINEAR.search(name) or tensor.shape[1] % 32:
        yield name, tensor
        return
    groups = tensor.float().unflatten(1, (-1, 32))
    exponents = torch.ceil(torch.log2(groups.abs().amax(2) / FP8_LARGEST))
    yield name, (groups / torch.exp2(exponents)[:, :, None]).flatten(1).to(torch.float8_e4m3fn)
    yield f"{name}_scale_inv", (exponents + 127).to(torch.uint8)


def _mxfp4(name: str, tensor: torch.Tensor) -> Named:
    """Of experts (E, in, out): `_blocks` (E, out, in / 32, 16), two codes a byte, the lower half first; `_scales`."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield name, tensor
        return
    groups = tensor.float().transpose(1, 2).unflatten(2, (-1, 32))
    exponents = torch.ceil(torch.log2(groups.abs().amax(3) / FP4_VALUES[-1]))
    yield f"{name}_blocks", _fours(groups / torch.exp2(exponents)[..., None])
    yield f"{name}_scales", (exponents + 127).to(torch.uint8)


def _fours(scaled: torch.Tensor) -> torch.Tensor:
    """(…, n) -> (…, n / 2), two codes a byte, the lower half first."""
    codes = (scaled.abs()[..., None] - torch.tensor(FP4_VALUES)).abs().argmin(-1).to(torch.uint8)
    codes += 8 * (scaled < 0).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


_DEEPSEEK = re.compile(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|w[123])\.weight$")


def build_deepseek_fp4(folder: Path, family: Any, *, shards: int = 1, **settings: Any) -> Path:
    """As DeepSeek-V4 is published: experts in FP4, all else in FP8, scales that are exponents of a byte; its names."""
    build_checkpoint(folder, family, dtype=torch.bfloat16, moe_intermediate_size=64, **settings)

    def change(name: str, tensor: torch.Tensor) -> Named:
        name = name.removeprefix("model.")
        if not _DEEPSEEK.search(name) or ".compressor." in name:
            yield name, tensor
            return
        block = (1, 32) if ".experts." in name else (16, 16)
        largest = FP4_VALUES[-1] if ".experts." in name else FP8_LARGEST
        blocks = tensor.float().unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
        exponents = torch.ceil(torch.log2(blocks.abs().amax((1, 3)) / largest))
        scaled = (blocks / torch.exp2(exponents)[:, None, :, None]).flatten(2).flatten(0, 1)
        yield name, _fours(scaled).view(torch.int8) if ".experts." in name else scaled.to(torch.float8_e4m3fn)
        yield f"{name.removesuffix('weight')}scale", (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
    return rewrite(folder, change, {**config, "scale_fmt": "ue8m0"}, shards)


MODELOPT_FORMS = ("NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP4", "MXFP8", "MIXED_PRECISION")


def build_modelopt(
    folder: Path, family: str, form: str, plain: Path, *, alone: bool = False, shards: int = 1, **settings: Any
) -> Path:
    """As NVIDIA's ModelOpt publishes, and into `plain` the model that the parts stand for by its formula.

    The settings are in config.json, or `alone` in hf_quant_config.json.
    """
    for target in (folder, plain):
        build_checkpoint(target, family, dtype=torch.bfloat16, **settings)
    layers: dict[str, Any] = {}

    def change(name: str, tensor: torch.Tensor, *, published: bool) -> Named:
        if not _LINEAR.search(name):
            yield name, tensor
            return
        own = form
        if form == _MIXED:
            own = "NVFP4" if ".mlp." in name else "FP8"
            layers[name.removesuffix(".weight")] = {"quant_algo": own}
        parts, matrix = _modelopt(own, tensor)
        if not published:
            yield name, matrix
            return
        for part, value in parts.items():
            yield f"{name}{part}", value.contiguous()
        yield f"{name.removesuffix('weight')}input_scale", torch.tensor(0.01)

    rewrite(plain, lambda name, tensor: change(name, tensor, published=False), None, 1)
    said = {"quant_algo": form, "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    if layers:
        said["quantized_layers"] = layers
    config = None if alone else {**said, "quant_method": "modelopt"}
    if alone:
        content = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": said}
        (folder / "hf_quant_config.json").write_text(json.dumps(content))
    return rewrite(folder, lambda name, tensor: change(name, tensor, published=True), config, shards)


_MIXED = "MIXED_PRECISION"


def _modelopt(form: str, tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The parts of a matrix by the endings of their names, and the matrix that they stand for."""
    size = {"NVFP4": 16, "MXFP4": 32, "MXFP8": 32, "FP8_PB_WO": 16}.get(form, tensor.shape[1])
    groups = tensor.float().unflatten(1, (-1, size))
    largest = FP4_VALUES[-1] if "FP4" in form else FP8_LARGEST
    if form == "FP8":
        scales = (tensor.float().abs().amax() / FP8_LARGEST).reshape(())
    elif form == "FP8_PB_WO":
        scales = groups.unflatten(0, (-1, size)).abs().amax((1, 3), keepdim=True) / FP8_LARGEST  # (n, 1, k, 1)
    else:
        scales = groups.abs().amax(2) / largest
    if form == "FP8_PER_CHANNEL_PER_TOKEN":
        scales = scales.flatten()
    values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])

    def packed(scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = _fours(scaled.flatten(1))
        return codes, values[torch.stack((codes & 15, codes >> 4), 2).int()].flatten(1).unflatten(1, (-1, size))

    if form == "NVFP4":
        of_matrix = tensor.float().abs().amax() / (6.0 * FP8_LARGEST)
        kept = (scales / of_matrix).to(torch.float8_e4m3fn)
        of_groups = (kept.float() * of_matrix)[:, :, None]
        codes, meant = packed(groups / of_groups)
        parts = {"": codes, "_scale": kept, "_scale_2": of_matrix}
        return parts, (meant * of_groups).flatten(1).to(tensor.dtype)
    if form.startswith("MX"):
        exponents = torch.ceil(torch.log2(scales))
        of_groups = torch.exp2(exponents)[:, :, None]
        if form == "MXFP4":
            codes, meant = packed(groups / of_groups)
        else:
            codes = (groups / of_groups).flatten(1).to(torch.float8_e4m3fn)
            meant = codes.float().unflatten(1, (-1, size))
        parts = {"": codes, "_scale": (exponents + 127).to(torch.uint8)}
        return parts, (meant * of_groups).flatten(1).to(tensor.dtype)
    wide = scales
    if form == "FP8_PB_WO":
        wide = scales.flatten(2).flatten(0, 1).repeat_interleave(size, 0).repeat_interleave(size, 1)
    elif form == "FP8_PER_CHANNEL_PER_TOKEN":
        wide = scales[:, None]
    codes = (tensor.float() / wide).to(torch.float8_e4m3fn)
    return {"": codes, "_scale": scales}, codes.to(tensor.dtype) * wide.to(tensor.dtype)


TORCHAO_FORMS = ("Int8WeightOnly", "Int8DynamicActivation", "Float8WeightOnly", "Intx4", "Intx4-asymmetric", "ByName")


def build_torchao(folder: Path, form: str, plain: Path, **settings: Any) -> Path:
    """As transformers saves a Llama that torchao quantized, in shards; into `plain` the matrices of torchao itself."""
    from torchao import quantization as torchao
    from torchao.quantization.granularity import PerAxis, PerGroup

    groups = {"weight_dtype": torch.int4, "granularity": PerGroup(16)}
    embedding = torchao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    layers = torchao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(16))
    quant_type = {
        "Int8WeightOnly": lambda: torchao.Int8WeightOnlyConfig(version=2),
        "Int8DynamicActivation": lambda: torchao.Int8DynamicActivationInt8WeightConfig(version=2),
        "Float8WeightOnly": torchao.Float8WeightOnlyConfig,
        "Intx4": lambda: torchao.IntxWeightOnlyConfig(**groups),
        "Intx4-asymmetric": lambda: torchao.IntxWeightOnlyConfig(**groups, mapping_type=torchao.MappingType.ASYMMETRIC),
        "ByName": lambda: torchao.FqnToConfig({"model.embed_tokens": embedding, "_default": layers}),
    }[form]()
    build_checkpoint(plain, "llama", dtype=torch.bfloat16, **settings)
    config = transformers.TorchAoConfig(quant_type, include_input_output_embeddings=form == "ByName")
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype="auto", quantization_config=config)
    model.save_pretrained(folder, max_shard_size="60KB")
    state = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    quantized = {name for name, tensor in state.items() if hasattr(tensor, "qdata")}
    assert len(quantized) > 10

    def change(name: str, tensor: torch.Tensor) -> Named:
        yield name, state[name].dequantize().contiguous() if name in quantized else tensor

    rewrite(plain, change, None, 1)
    return folder


def build_torchao_int8(folder: Path, plain: Path, group: int = 0) -> Path:
    """As torchao publishes int8, without that package: with a zero for groups of inputs, or a float32 scale for each
    row and zeros that are 0; into `plain` the matrices."""
    for target in (folder, plain):
        build_checkpoint(target, "llama", dtype=torch.bfloat16)

    def change(name: str, tensor: torch.Tensor, *, published: bool) -> Named:
        if not name.endswith("_proj.weight"):
            yield name, tensor
            return
        path, groups = name.removesuffix("weight"), tensor.float().unflatten(1, (-1, group or tensor.shape[1]))
        high, low = groups.amax(2, keepdim=True), groups.amin(2, keepdim=True)
        scales = ((high - low) / 255).bfloat16() if group else groups.abs().amax(2, keepdim=True) / 127
        zeros = ((-128 - low / scales.float()).round().clamp(-128, 127) * bool(group)).to(torch.int8)
        codes = (groups / scales.float() + zeros.float()).round().clamp(-128, 127).to(torch.int8)
        if not published:
            yield name, ((codes.float() - zeros.float()) * scales.float()).flatten(1).bfloat16()
            return
        yield f"{path}_weight_qdata", codes.flatten(1)
        yield f"{path}_weight_scale", scales.flatten(1)
        yield f"{path}_weight_zero_point", zeros.flatten(1)

    scheme = {"_type": "IntxWeightOnlyConfig" if group else "Int8WeightOnlyConfig", "_data": {}}
    rewrite(plain, lambda name, tensor: change(name, tensor, published=False), None, 1)
    config = {"quant_method": "torchao", "quant_type": {"default": scheme}}
    return rewrite(folder, lambda name, tensor: change(name, tensor, published=True), config, 3)


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
"""A scheme of compressed-tensors: eight codes in an int32, a scale for 16 elements of a row."""
_CHANNEL = {"num_bits": 8, "symmetric": True, "strategy": "channel"}
_TOKEN = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
_TENSOR = {"num_bits": 8, "symmetric": True, "strategy": "tensor"}
_BLOCK = {"strategy": "block", "block_structure": [16, 16]}
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16} | {
    "scale_dtype": "torch.float8_e4m3fn"
}
_MX = {"type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
SCHEMES: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any] | None]] = {
    "W4A16": ("pack-quantized", INT4, None),
    "W8A16": ("pack-quantized", {**_CHANNEL, "type": "int"}, None),
    "W8A8": ("int-quantized", {**_CHANNEL, "type": "int"}, {**_TOKEN, "type": "int"}),
    "FP8-dynamic": ("float-quantized", {**_CHANNEL, "type": "float"}, {**_TOKEN, "type": "float"}),
    "FP8-static": ("float-quantized", {**_TENSOR, "type": "float"}, {**_TENSOR, "type": "float"}),
    "INT8": ("int-quantized", {**_CHANNEL, "type": "int"}, None),
    "FP8_BLOCK": ("float-quantized", {**_TENSOR, "type": "float", **_BLOCK}, None),
    "FP8_BLOCK-dynamic": (
        "float-quantized",
        {**_TENSOR, "type": "float", **_BLOCK},
        {**_TOKEN, "type": "float", "strategy": "group", "group_size": 16},
    ),
    "W4A16-asymmetric": ("pack-quantized", {**INT4, "symmetric": False}, None),
    "W8A16-asymmetric": ("pack-quantized", {**_CHANNEL, "type": "int", "symmetric": False}, None),
    "INT8-asymmetric": ("int-quantized", {**_CHANNEL, "type": "int", "symmetric": False}, None),
    "NVFP4A16": ("nvfp4-pack-quantized", NVFP4, None),
    "NVFP4": ("nvfp4-pack-quantized", NVFP4, {**NVFP4, "dynamic": "local"}),
    "MXFP4A16": ("mxfp4-pack-quantized", {**_MX, "num_bits": 4}, None),
    "MXFP8A16": ("mxfp8-quantized", {**_MX, "num_bits": 8}, None),
    "MXFP4": ("mxfp4-pack-quantized", {**_MX, "num_bits": 4}, {**_MX, "num_bits": 4, "dynamic": True}),
    "MXFP8": ("mxfp8-quantized", {**_MX, "num_bits": 8}, {**_MX, "num_bits": 8, "dynamic": True}),
}
"""Name -> format, weights, activations, as compressed-tensors' config has them."""


def build_compressed_tensors(
    folder: Path,
    family: Any,
    scheme: str,
    *,
    shards: int = 1,
    packed: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    **settings: Any,
) -> Path:
    """As llm-compressor publishes: every Linear but the head, experts too, compressed by compressed-tensors itself.

    Without `packed` only the config says so, and the package need not be there.
    """
    build_checkpoint(folder, family, dtype=dtype, **settings)
    form, weights, activations = SCHEMES[scheme]
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": activations, "format": form}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*per_layer.*"],
    }
    change = _compressed(form, weights, group) if packed else lambda name, tensor: iter([(name, tensor)])
    return rewrite(folder, change, config, shards)


MIXED = {"self_attn": "INT8", "mlp": "NVFP4A16"}
"""Part of a module's name -> its scheme."""


def build_mixed(folder: Path, family: str, *, shards: int = 1, **settings: Any) -> Path:
    """As llm-compressor publishes a model with a scheme for attention and another one for the rest of a layer."""
    build_checkpoint(folder, family, dtype=torch.bfloat16, **settings)
    changes, groups = {}, {}
    for part, scheme in MIXED.items():
        form, weights, _ = SCHEMES[scheme]
        groups[part] = {"targets": [f"re:.*{part}.*"], "weights": dict(weights), "format": form}
        changes[part] = _compressed(form, weights, {**groups[part], "targets": ["Linear"]})

    def change(name: str, tensor: torch.Tensor) -> Named:
        own = next((rule for part, rule in changes.items() if part in name), None)
        yield from own(name, tensor) if own is not None else iter([(name, tensor)])

    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "quantization_status": "compressed"}
    return rewrite(folder, change, {**config, "config_groups": groups, "ignore": ["lm_head"]}, shards)


def build_kimi(folder: Path, plain: Path, *, shards: int = 1) -> Path:
    """As Kimi-K2.6 is published: experts of the language model in int4, said in its part of the config; its names.

    Into `plain` goes the model that the codes stand for.
    """
    form, weights, _ = SCHEMES["W4A16"]
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": None, "format": form}
    torch.manual_seed(0)
    model = next(iter(models(transformers.AutoModelForImageTextToText, "kimi_k25", []))).to(torch.bfloat16)
    for target in (folder, plain):
        model.save_pretrained(target)
        make_tokenizer().save_pretrained(target)
    compressed = _compressed(form, weights, group)

    def change(name: str, tensor: torch.Tensor) -> Named:
        if name.startswith("language_model"):  # saved by transformers as "blocks"
            name = name.replace(".blocks.", ".layers.")
        yield from compressed(name, tensor) if ".mlp.experts." in name else iter([(name, tensor)])

    rewrite(folder, change, None, shards)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = ["KimiK25ForConditionalGeneration"]
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_kimi_k25.KimiK25ForConditionalGeneration"}
    config["text_config"]["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
        "kv_cache_scheme": None,
    }
    path.write_text(json.dumps(config))
    save_file(_decompressed(read_tensors(folder), "W4A16"), plain / SINGLE_NAME, metadata={"format": "pt"})
    return folder


def decompressed(folder: Path, published: Path, scheme: str, family: str, **settings: Any) -> Path:
    """The plain model that a published one stands for, each matrix decompressed by compressed-tensors itself."""
    plain = _decompressed(read_tensors(published), scheme)
    build_checkpoint(folder, family, dtype=torch.bfloat16, **settings)
    assert plain.keys() == read_tensors(folder).keys()
    save_file(plain, folder / SINGLE_NAME, metadata={"format": "pt"})
    return folder


def _decompressed(stored: dict[str, torch.Tensor], scheme: str) -> dict[str, torch.Tensor]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    form, weights, _ = SCHEMES[scheme]
    compressor = BaseCompressor.get_value_from_registry(form)
    matrices: dict[str, dict[str, torch.Tensor]] = {}
    for name in [name for name in stored if ".weight_" in name or f"{name}_scale" in stored]:
        path, _, part = name.rpartition(".")
        matrices.setdefault(path, {})[part] = stored.pop(name)
    said = QuantizationScheme(targets=["Linear"], weights=dict(weights))
    plain = {name: tensor for name, tensor in stored.items() if not name.endswith("input_global_scale")}
    for path, parts in matrices.items():
        plain[f"{path}.weight"] = compressor.decompress(parts, said)["weight"].to(torch.bfloat16).contiguous()
    return plain


def _compressed(
    form: str, weights: Mapping[str, Any], group: Mapping[str, Any]
) -> Callable[[str, torch.Tensor], Named]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = QuantizationScheme(**{**group, "weights": dict(weights)})
    compressor = BaseCompressor.get_value_from_registry(form)

    def change(name: str, tensor: torch.Tensor) -> Named:
        if not _LINEAR.search(name):
            yield name, tensor
            return
        if weights["strategy"] == "block":
            codes, scales = fp8_blocks(name, tensor, weights["block_structure"][0])
            yield codes
            yield f"{name}_scale", scales[1].to(tensor.dtype)
            return
        groups = tensor.unflatten(1, (-1, weights.get("group_size", tensor.shape[1])))
        within = (tensor.reshape(1, -1) if weights["strategy"] == "tensor" else groups).float()
        state = {"weight": tensor}
        if weights["strategy"] == "tensor_group":
            state["weight_global_scale"] = generate_gparam(tensor.min().float(), tensor.max().float())
        of_all = state.get("weight_global_scale")
        scale, zero = calculate_qparams(within.amin(-1), within.amax(-1), scheme.weights, global_scale=of_all)
        state["weight_scale"] = scale.to(tensor.dtype) if of_all is None else scale
        if not weights["symmetric"]:
            state["weight_zero_point"] = zero
        parts = compressor.compress(state, scheme)
        path = name.removesuffix("weight")
        for part, value in parts.items():
            yield path + part, value.contiguous()
        if scheme.input_activations is not None and scheme.input_activations.dynamic == "local":
            yield f"{path}input_global_scale", torch.full((1,), 200.0)
        elif scheme.input_activations is not None and not scheme.input_activations.dynamic:
            yield f"{path}input_scale", torch.full((1,), 0.02, dtype=tensor.dtype)

    return change
