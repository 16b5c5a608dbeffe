"""Tiny random checkpoints, written as transformers would publish them; the only place where tests make checkpoints.

A checkpoint is built from a small configuration of a real architecture, saved by ``save_pretrained`` (so that the names
and shapes in the file are the published ones, one tensor per expert included), and then cut into the wanted shards.
Weights depend on the family, its settings and the seed; another dtype gives the same weights rounded.

Knows transformers, safetensors and tokenizers; knows nothing of rabbitllm.
"""

from __future__ import annotations

import atexit
import copy
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, processors

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TORCH_INDEX_NAME = "pytorch_model.bin.index.json"
TORCH_SINGLE_NAME = "pytorch_model.bin"
SHARD_PATTERN = "model-{i:05d}-of-{n:05d}.safetensors"

Assignment = Callable[[str], int] | Sequence[Sequence[str]]
"""Which shard a tensor goes to: a function of its name, counted from 0, or the names of each shard."""

_SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
_MERGES = "t h|th e|i n|e r|a n|an d|o n|r e|Ġ the|Ġ and|in g|o r|e d"
VOCABULARY_SIZE = len(_SPECIAL_TOKENS) + 256 + len(_MERGES.split("|"))
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

# Some matrices above 4096 elements and some below; every row a multiple of 16 bytes, in 16 bit too.
SMALL: Mapping[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Settings of nearly every decoder."""
# The range is larger than usual, so that logits differ enough for a wrong weight to change the chosen token.
COMMON: Mapping[str, Any] = {**SMALL, "initializer_range": 0.08}
EXPERTS: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 80}
ROUTED: Mapping[str, Any] = {"n_routed_experts": 4, "n_shared_experts": 1, "topk_group": 1}
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
"""Keys and values of every head are made from one vector."""
DELTA: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
WINDOW = 8
"""Tokens that a sliding window has room for; prompts and what is generated are longer."""
SLIDING: Mapping[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


@dataclass(frozen=True)
class Family:
    """One architecture, and what of it can be varied."""

    model_type: str
    settings: Mapping[str, object] = field(default_factory=dict)
    ties: tuple[bool, ...] = (False, True)
    """Whether the output layer can share the weights of the input embedding."""
    encoder_decoder: bool = False

    def config(self, tied: bool, **settings: object) -> Any:
        if tied not in self.ties:
            raise ValueError(f"{self.model_type} cannot be built with tied={tied}")
        # a config keeps the lists that it is given, and a few change them
        values = copy.deepcopy({**COMMON, **self.settings, "tie_word_embeddings": tied, **settings})
        return transformers.AutoConfig.for_model(self.model_type, **values)

    @property
    def auto_class(self) -> Any:
        return _auto_class(self.encoder_decoder)


def _auto_class(encoder_decoder: bool) -> Any:
    """The class that loads a model; of type Any because transformers leaves it untyped."""
    return transformers.AutoModelForSeq2SeqLM if encoder_decoder else transformers.AutoModelForCausalLM


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama"),
    "mistral": Family("mistral", {"sliding_window": WINDOW}),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", {"head_dim": 16}),
    "gemma2": Family("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}),
    "gemma3": Family("gemma3_text", {**SLIDING, "head_dim": 16, "query_pre_attn_scalar": 16}),
    "phi3": Family("phi3"),
    "gpt_oss": Family(
        "gpt_oss",
        {**SLIDING, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": Family("qwen3_moe", {**EXPERTS, "head_dim": 16, "decoder_sparse_step": 1}),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": Family(
        "deepseek_v3",
        {
            **LATENT,
            **ROUTED,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 80,
            "n_group": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "qwen3_next": Family(
        "qwen3_next",
        {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 32},
    ),
    "opt": Family("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "gpt2": Family("gpt2"),
    "bloom": Family("bloom"),
    "falcon": Family("falcon"),
    "mamba2": Family("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16}),
    "jamba": Family(
        "jamba",
        {
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "t5": Family(
        "t5",
        {"d_kv": 16, "d_ff": 128, "num_decoder_layers": 3, "decoder_start_token_id": 0},
        ties=(True,),
        encoder_decoder=True,
    ),
}


@dataclass(frozen=True)
class Reference:
    """What plain transformers makes of a checkpoint."""

    logits: torch.Tensor
    tokens: torch.Tensor
    """The greedy continuation, input included (for an encoder-decoder: the decoder's tokens)."""


def build_checkpoint(
    folder: Path,
    family: str | Family,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    seed: int = 0,
    tokenizer: bool = True,
    **settings: object,
) -> Path:
    """Write a checkpoint into ``folder`` and return it.

    One shard is one ``model.safetensors`` without an index; more are exactly so many files and an index. ``settings``
    override the family's configuration.
    """
    chosen = FAMILIES[family] if isinstance(family, str) else family
    wanted = repr((chosen, tied, dtype, shards, seed, tokenizer, settings))
    if wanted not in _built:
        built = Path(tempfile.mkdtemp(dir=_room())) / "model"
        _write(built, _random_model(chosen, tied, dtype, seed, settings), shards, tokenizer)
        _built[wanted] = built
    return shutil.copytree(_built[wanted], folder, copy_function=shutil.copyfile, dirs_exist_ok=True)


_built: dict[str, Path] = {}
"""What this process has built, by all that it depends on: a copy takes a tenth of the time, and less."""
_TEMPORARY = tempfile.gettempdir()


@functools.cache
def _room() -> str:
    """Of this process, and removed with it."""
    room = tempfile.mkdtemp(prefix="checkpoints-", dir=_TEMPORARY)
    atexit.register(shutil.rmtree, room, ignore_errors=True)
    return room


def _write(folder: Path, model: Any, shards: int, tokenizer: bool) -> None:
    folder.mkdir()
    model.save_pretrained(folder, max_shard_size="1TB")
    if tokenizer:
        make_tokenizer().save_pretrained(folder)
    if shards > 1:
        names = list(read_tensors(folder))
        if shards > len(names):
            raise ValueError(f"{len(names)} tensors cannot fill {shards} shards")
        shard_of = {name: index * shards // len(names) for index, name in enumerate(names)}
        reshard(folder, shard_of.__getitem__)


def make_tokenizer() -> Any:
    """A fast byte-level tokenizer for any text, with as many tokens as the models' vocabulary."""
    merges = [(left, right) for left, right in (pair.split() for pair in _MERGES.split("|"))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = (*_SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    pad, bos, eos = _SPECIAL_TOKENS
    fast: Any = transformers.PreTrainedTokenizerFast
    wrapped = fast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, model_max_length=256)
    wrapped.chat_template = _CHAT_TEMPLATE
    return wrapped


def talking(tokenizer: Any, context: int | None = None) -> Any:
    """What prompts need of a model: its tokenizer and its context."""
    config = transformers.PretrainedConfig()
    if context is not None:
        config.max_position_embeddings = context
    table = SimpleNamespace(num_embeddings=VOCABULARY_SIZE)
    parts = {"config": config, "base_model": None, "get_input_embeddings": lambda: table, "name_or_path": "a/model"}
    return SimpleNamespace(tokenizer=tokenizer, **parts)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, in the order of the model's layers."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return {name: tensors[name] for name in sorted(tensors, key=_natural)}


def reshard(folder: Path, assignment: Assignment, pattern: str = SHARD_PATTERN) -> list[Path]:
    """Rewrite the weights of a checkpoint into other shards with an index, and return the files in order.

    ``pattern`` is formatted with ``i``, counted from 1, and ``n``.
    """
    tensors = read_tensors(folder)
    groups = _grouped(list(tensors), assignment)
    paths = [folder / pattern.format(i=index + 1, n=len(groups)) for index in range(len(groups))]
    if len(set(paths)) != len(paths):
        raise ValueError(f"{pattern} names two shards alike")
    for old in (*folder.glob("*.safetensors"), *folder.glob(INDEX_NAME)):
        old.unlink()
    for path, names in zip(paths, groups, strict=True):
        save_file({name: tensors[name] for name in names}, path, metadata={"format": "pt"})
    weight_map = {name: path.name for path, names in zip(paths, groups, strict=True) for name in names}
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
    return paths


def write_shards(
    folder: Path,
    shards: Mapping[str, Mapping[str, torch.Tensor]],
    model_type: str = "llama",
    *,
    index: bool = True,
) -> Path:
    """Write exactly these tensors into exactly these files, with a config that names the family.

    The tensors are whatever the caller wants: no model need be able to load them. With ``index`` there is one; without,
    there has to be one file, named as a single checkpoint is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in shards.items():
        (folder / file).parent.mkdir(exist_ok=True)
        save_file(dict(tensors), folder / file, metadata={"format": "pt"})
    if index:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    everything = {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}
    (folder / "config.json").write_text(json.dumps(_config_of(everything, model_type)))
    return folder


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a training checkpoint, which may lie a level deeper than other things of it."""
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from _flat(value)


def _config_of(tensors: Mapping[str, torch.Tensor], model_type: str) -> dict[str, Any]:
    """The config that tensors named like Llama's are of; else one of few layers, whose model has nothing of them."""
    try:
        embedding, query, key, gate = (
            tensors[name].shape
            for name in (
                "model.embed_tokens.weight",
                "model.layers.0.self_attn.q_proj.weight",
                "model.layers.0.self_attn.k_proj.weight",
                "model.layers.0.mlp.gate_proj.weight",
            )
        )
    except KeyError:
        return {"model_type": model_type, "num_hidden_layers": 2}
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    head = math.gcd(query[0], key[0])
    return {
        "model_type": model_type,
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "vocab_size": embedding[0],
        "hidden_size": embedding[1],
        "intermediate_size": gate[0],
        "num_attention_heads": query[0] // head,
        "num_key_value_heads": key[0] // head,
        "head_dim": head,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }


def write_torch(
    folder: Path,
    files: Mapping[str, Mapping[str, Any]],
    model_type: str = "llama",
    *,
    index: bool = False,
    protocol: int = 2,
    legacy: bool = False,
) -> Path:
    """Write each value by ``torch.save`` into the file of that name, with a config; with ``index``, of plain dicts.

    ``legacy``: in the format from before torch 1.6.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file, value in files.items():
        torch.save(dict(value), folder / file, pickle_protocol=protocol, _use_new_zipfile_serialization=not legacy)
    if index:
        weight_map = {name: file for file, tensors in files.items() for name in tensors}
        (folder / TORCH_INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    everything = {name: value for values in files.values() for name, value in _flat(values)}
    (folder / "config.json").write_text(json.dumps(_config_of(everything, model_type)))
    return folder


def torch_files(shards: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    """The same shards under the names of torch's files, each with its tensors laid out as ``laid_out_oddly`` says."""
    return {name: laid_out_oddly(tensors) for name, tensors in plain_torch_files(shards).items()}


def plain_torch_files(shards: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Mapping[str, torch.Tensor]]:
    """The same shards under the names of torch's files, each tensor in a storage of its own."""
    renamed = {name: name.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin") for name in shards}
    return {renamed[name]: tensors for name, tensors in shards.items()}


def laid_out_oddly(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Equal tensors that lie in memory, and so in a file of torch's, in all the ways that a tensor can.

    In turns: transposed, every second column of a wider one, as it is, a view into the middle of more, a parameter, and
    in one storage with an earlier one of its shape. What is no matrix has no strides.
    """
    laid_out: dict[str, torch.Tensor] = {}
    plain: dict[torch.Size, str] = {}
    counts = {True: 0, False: 2}
    for name, tensor in tensors.items():
        way = counts[tensor.ndim == 2] % 6
        counts[tensor.ndim == 2] += 1
        if way == 0 and tensor.ndim == 2:
            laid_out[name] = tensor.t().contiguous().t()
        elif way == 1 and tensor.ndim == 2:
            laid_out[name] = torch.stack([tensor, -tensor], dim=2)[:, :, 0]
        elif way == 3:
            whole = torch.zeros(tensor.numel() + 12, dtype=tensor.dtype)
            laid_out[name] = whole[5 : 5 + tensor.numel()].view(tensor.shape)
            laid_out[name].copy_(tensor)
        elif way == 4 and tensor.is_floating_point():
            laid_out[name] = torch.nn.Parameter(tensor.clone())
        elif way == 5 and (earlier := plain.pop(tensor.shape, None)) is not None:
            laid_out[earlier], laid_out[name] = torch.stack([laid_out[earlier], tensor])
        else:
            laid_out[name] = tensor.clone()
            plain[tensor.shape] = name
    assert all(torch.equal(laid_out[name], tensor) for name, tensor in tensors.items())
    return laid_out


def llama_tensors(
    layers: int = 3, hidden: int = 64, vocabulary: int = 160, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random tensors under the names of a Llama with ``layers`` layers, in the order of a pass."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        lead = f"model.layers.{layer}."
        shapes[lead + "input_layernorm.weight"] = (hidden,)
        shapes |= {f"{lead}self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
        shapes[lead + "post_attention_layernorm.weight"] = (hidden,)
        shapes |= {f"{lead}mlp.{part}_proj.weight": (2 * hidden, hidden) for part in ("gate", "up")}
        shapes[lead + "mlp.down_proj.weight"] = (hidden, 2 * hidden)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def cut(tensors: Mapping[str, torch.Tensor], shards: int) -> dict[str, dict[str, torch.Tensor]]:
    """Spread tensors over so many shards of about equal numbers, in their order: file name -> tensors."""
    cuts: dict[str, dict[str, torch.Tensor]] = {}
    for position, (name, tensor) in enumerate(tensors.items()):
        number = position * shards // len(tensors)
        cuts.setdefault(SHARD_PATTERN.format(i=number + 1, n=shards), {})[name] = tensor
    return cuts


def reference_logits(
    folder: Path,
    input_ids: torch.Tensor,
    dtype: torch.dtype,
    state_transform: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    *,
    new_tokens: int = 4,
) -> Reference:
    """Logits and greedy tokens of plain transformers; ``state_transform`` may replace each parameter once loaded."""
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    model = _auto_class(config.is_encoder_decoder).from_pretrained(folder, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        changed = state_transform(name, parameter.data) if state_transform else parameter.data
        parameter.data = _aligned(changed)
    decoder = {"decoder_input_ids": input_ids} if config.is_encoder_decoder else {}
    with torch.inference_mode():
        logits = model(input_ids, **decoder).logits
        tokens = model.generate(input_ids, max_new_tokens=new_tokens, do_sample=False)
    return Reference(logits, tokens)


def _random_model(family: Family, tied: bool, dtype: torch.dtype, seed: int, settings: Mapping[str, object]) -> Any:
    config = family.config(tied, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = family.auto_class.from_config(config, dtype=torch.float32).eval()
        _disturb_constants(model)
    exact = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to(dtype)
    # As published: what transformers insists on holding in float32 is also stored so.
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in exact and not set(kept).isdisjoint(name.split(".")):
            tensor.data = exact[name]
    return model


def _disturb_constants(model: torch.nn.Module) -> None:
    """Make norms differ from ones and biases from zeros: left as they are, mixing them up would go unnoticed."""
    persistent = model.state_dict().keys()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in persistent and tensor.is_floating_point() and (tensor.ndim < 2 or tensor.std() == 0):
                tensor.add_(torch.randn_like(tensor) * 0.05)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that starts at a multiple of 64 bytes.

    Where a weight lies in a mapped file decides its alignment, and matrix products may round differently with it.
    """
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    if copy.data_ptr() % 64:
        raise RuntimeError("torch returned memory that is not aligned to 64 bytes")
    return copy


def _grouped(names: list[str], assignment: Assignment) -> list[list[str]]:
    if callable(assignment):
        shard_of = {name: assignment(name) for name in names}
        groups = [[name for name in names if shard_of[name] == shard] for shard in range(max(shard_of.values()) + 1)]
    else:
        groups = [list(group) for group in assignment]
    if not all(groups):
        raise ValueError("a shard would be empty")
    if sorted(name for group in groups for name in group) != sorted(names):
        raise ValueError("the shards do not hold every tensor exactly once")
    return groups


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts layer 10 after layer 2."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in name.split("."))
