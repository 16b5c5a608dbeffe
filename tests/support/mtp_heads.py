"""Heads for multi-token prediction, added to tiny checkpoints under the names that families publish."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.support.builders import FAMILIES, ROUTED, SINGLE_NAME, Family, build_checkpoint, read_tensors
from tests.support.hybrid_families import HYBRIDS

QWEN = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Families whose heads are called `mtp.*`."""
NUMBERED = ("deepseek_v3", "glm4_moe")
"""Families whose heads are numbered behind the last layer."""
INDEXED = ("deepseek_v32", "glm_moe_dsa")
"""The same, and they choose tokens by an index: transformers cannot compute these."""
LIKE_QWEN = ("exaone_moe", "mimo_v2_flash")
"""Other families whose heads have Qwen's names."""

SLIDING = ("mellum",)
"""Families whose heads have Qwen's names, and see a window only."""
OF_BLOCKS = "nemotron_h"
"""The family whose head is two of the model's blocks."""
CONVOLVED = ("inkling",)
"""Families whose heads have short convolutions, and so states."""


_GLM = Family(
    "glm4_moe",
    {
        **ROUTED,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 80,
        "n_group": 1,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "use_qk_norm": True,
    },
)


_BLOCKS = HYBRIDS[OF_BLOCKS]
# more blocks than fit with the head
_OF_BLOCKS = replace(_BLOCKS, settings={**_BLOCKS.settings, "layers_block_type": ["mamba", "attention", "moe"] * 3})


def family_of(name: str) -> Family:
    if name in ("glm4_moe", OF_BLOCKS):
        return _GLM if name == "glm4_moe" else _OF_BLOCKS
    return FAMILIES[name] if name in FAMILIES else HYBRIDS[name]


def build_with_head(
    folder: Path, name: str, *, seed: int = 0, tied: bool = False, count: int = 1, **settings: Any
) -> Path:
    """A random checkpoint with random heads."""
    family = family_of(name)
    build_checkpoint(folder, family, tied=tied, seed=seed, **settings)
    for index in range(count):
        add_head(folder, family, seed + 1 + index, index)
    return folder


def add_head(folder: Path, family: Family, seed: int = 1, index: int = 0) -> Path:
    """Add a random head to a checkpoint of a family, after `index` others."""
    if family.model_type == "inkling_text":
        return _add_convolved(folder, seed)
    if family.model_type == OF_BLOCKS:
        return _add_blocks(folder, seed)
    tensors, head = read_tensors(folder), random_head(folder, family, seed)
    if family.model_type in (*NUMBERED, *INDEXED, *SLIDING):
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**settings, "num_nextn_predict_layers": index + 1}))
    if family.model_type in (*NUMBERED, *INDEXED):
        layers = _layers(folder) + index
        names = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
        renamed = {f"model.layers.{layers}.{new}.weight": head.pop(old) for old, new in names.items()}
        tensors |= renamed | {f"model.layers.{layers}.{name}": tensor for name, tensor in head.items()}
    else:
        names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "norm": "norm"}
        renamed = {f"mtp.{new}.weight": head.pop(old) for old, new in names.items()}
        tensors |= renamed | {f"mtp.layers.0.{name}": tensor for name, tensor in head.items()}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / SINGLE_NAME, {"format": "pt"})
    return folder


def _add_convolved(folder: Path, seed: int) -> Path:
    from transformers.modeling_layers import MtpModel

    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "num_mtp_layers": 1}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = MtpModel(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), 1).state_dict()
        published = {"mtp_block": "transformer_block", "enorm": "embed_norm", "hnorm": "hidden_norm"}
        tensors = read_tensors(folder)
        for name, tensor in head.items():
            if name.startswith("layers.0."):
                parts = [{**published, "eh_proj": "input_proj"}.get(part, part) for part in name.split(".")]
                tensors["model.mtp." + ".".join(parts)] = torch.randn_like(tensor) * 0.08 + ("norm" in name)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / SINGLE_NAME, {"format": "pt"})
    return folder


def _add_blocks(folder: Path, seed: int) -> Path:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "num_nextn_predict_layers": 1}))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = settings["layers_block_type"]
        tensors, width = read_tensors(folder), settings["hidden_size"]
        for place, block_type in enumerate(settings["mtp_layers_block_type"]):
            path = f"backbone.layers.{blocks.index(block_type)}."
            for name in [name for name in tensors if name.startswith(path)]:
                random = torch.randn_like(tensors[name]) * 0.08 + name.endswith("norm.weight")
                tensors[f"mtp.layers.{place}.{name.removeprefix(path)}"] = random
        for name in ("0.enorm", "0.hnorm", f"{place}.final_layernorm"):
            tensors[f"mtp.layers.{name}.weight"] = torch.randn(width) * 0.1 + 1
        tensors["mtp.layers.0.eh_proj.weight"] = torch.randn(width, 2 * width) * width**-0.5
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / SINGLE_NAME, {"format": "pt"})
    return folder


def random_head(folder: Path, family: Family, seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a random head: its norms and projection, and those of its layer by their names in a layer."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = family.auto_class.from_config(config, dtype=torch.float32)
        layer = {name: torch.randn_like(tensor) * 0.08 for name, tensor in model.model.layers[-1].state_dict().items()}
        width = config.hidden_size
        others = {name: torch.randn(width) * 0.1 + 1 for name in ("enorm", "hnorm", "norm")}
        others["eh_proj"] = torch.randn(width, 2 * width) * width**-0.5
    for name in [name for name in layer if name.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))]:
        if family.model_type != "qwen3_5_moe_text":  # published with a tensor for each expert
            stacked, path = layer.pop(name), name.rpartition(".")[0]
            for index, matrix in enumerate(stacked):
                parts = matrix.chunk(2) if name.endswith("gate_up_proj") else [matrix]
                leaves = ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",)
                layer |= {f"{path}.{index}.{leaf}.weight": part for leaf, part in zip(leaves, parts, strict=True)}
    return {**others, **layer}


_EMBEDDING = "model.embed_tokens.weight"
FIRST, LAST = 3, 270
"""The tokens of a predictable model."""


def _layers(folder: Path) -> int:
    settings = json.loads((folder / "config.json").read_text())
    return int(settings.get("num_hidden_layers") or len(settings["layers_block_type"]))


def next_token(token: int) -> int:
    """The token that follows another one in a predictable model."""
    return FIRST + (7 * (token - FIRST) + 1) % (LAST - FIRST)


def make_predictable(folder: Path, how: str) -> Path:
    """Make the next token follow from the last one; the head is right, sometimes wrong ("noisy"), or never right."""
    tensors, noise = read_tensors(folder), torch.Generator().manual_seed(0)
    embedding = tensors["backbone.embeddings.weight" if "backbone.embeddings.weight" in tensors else _EMBEDDING]
    embedding.copy_(torch.randn(embedding.shape, generator=noise))
    head = tensors["lm_head.weight"].zero_()
    for token in range(FIRST, LAST):
        head[next_token(token)] = embedding[token]
    of_head = re.compile(rf"mtp\.|model\.layers\.[{_layers(folder)}-9]\.")
    for name, tensor in tensors.items():
        if of_head.match(name) and how == "noisy":
            tensor *= 0.3 if "o_proj" in name else 1.0
        elif re.search(r"(o_proj\.weight|out_proj\.weight|down_proj(\.weight)?)$", name):
            tensor.zero_()
        if name.endswith(("mtp.fc.weight", ".eh_proj.weight")):
            width = len(tensor)
            sign = -1.0 if how == "wrong" else 1.0
            tensor.copy_(torch.cat((sign * torch.eye(width), torch.zeros(width, width)), dim=1))
            if how == "noisy":
                tensor += 0.22 * torch.randn(tensor.shape, generator=noise)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / SINGLE_NAME, {"format": "pt"})
    return folder
