"""Llama's weights as Meta publishes them, in transformers' terms: parameters, names, shapes, strides, and the config.

Format: `params.json`, whose fields are those of `ModelArgs` in https://github.com/meta-llama/llama (1 and 2), and of
https://github.com/meta-llama/llama-models, models/llama3/args.py (3); an unknown field might change the computation, so
it is refused, not ignored. And `consolidated.NN.pth`, one file for each process ("rank") of the tensor parallelism that
the model was made for, with the same names in each (https://github.com/meta-llama/llama, llama/model.py). Matrices are
cut along their output, the last ones of attention and feed-forward along their input, the embedding along either; every
rank has all norms.

Meta rotates neighbouring elements of a head together (https://arxiv.org/abs/2104.09864, as complex numbers),
transformers an element of the first half with one of the second. So the rows of each head of Q and K are permuted:
row `2 i + j` becomes row `j * half + i`. That is a view of the same bytes with other strides, without a copy.

Pure: opens nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rabbitllm.base.rounding import round_up
from rabbitllm.base.terminal import listed
from rabbitllm.checkpoints.index import CheckpointIndex, index_of
from rabbitllm.errors import InvalidIndexError, MissingShardError, UnreadableFormatError
from rabbitllm.formats.tensor_spec import DTYPES, Header, TensorPiece, TensorSpec

_INTEGERS = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of")
_NUMBERS = ("norm_eps", "rope_theta", "ffn_dim_multiplier", "rope_scaling_factor", "rope_high_freq_factor")
_WITHOUT_EFFECT = {"max_batch_size", "max_seq_len", "model_parallel_size"}
_REQUIRED = ("dim", "n_layers", "n_heads", "norm_eps")
_MAX_INTEGER = 1 << 31
MAX_LAYERS = 4096
_OTHERS = (
    (re.compile("moe|expert"), "a mixture of experts"),
    (re.compile("vision|image"), "a model that sees images"),
    (re.compile("quant|lora|spin"), "quantized weights"),
)
"""Field pattern -> model kind."""
_OWN = "Put the params.json that was published with the weights into their folder."


@dataclass(frozen=True, slots=True)
class MetaParams:
    """The content of params.json; None for absent values.

    Attributes:
        dim, n_layers, n_heads, n_kv_heads: sizes of the model.
        norm_eps: epsilon of the norms.
        vocab_size: None where the tokenizer determines it (Llama 1 and 2 have -1).
        intermediate: rows of a feed-forward matrix.
        rope_theta: base of the rotary frequencies.
        use_scaled_rope: whether they are scaled, as from Llama 3.1 on.
        rope_scaling_factor, rope_high_freq_factor: parameters of the scaling, where the file has them.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    norm_eps: float
    vocab_size: int | None = None
    intermediate: int | None = None
    rope_theta: float | None = None
    use_scaled_rope: bool = False
    rope_scaling_factor: float | None = None
    rope_high_freq_factor: float | None = None

    @property
    def head_dim(self) -> int:
        """Rows of an attention head."""
        return self.dim // self.n_heads


def parse_params(content: Mapping[str, Any], label: str) -> MetaParams:
    """Parse the fields and check them against each other.

    Args:
        content: content of the file, or its object under "model".
        label: the file's name in messages.

    Raises:
        InvalidIndexError: a field is missing, or has an impossible value.
        UnreadableFormatError: it belongs to another kind of model.
    """
    inner = content.get("model")
    fields = {key: value for key, value in (inner if isinstance(inner, dict) else content).items() if value is not None}
    _refuse_unknown_fields(fields, label)
    for key in _REQUIRED:
        if key not in fields:
            raise InvalidIndexError(f"{label} has no {key!r}; expected the parameters of a Llama.", _OWN)
    values: dict[str, Any] = {
        **{
            key: _integer(fields[key], key, label) for key in _INTEGERS if key in _REQUIRED or fields.get(key, -1) != -1
        },
        **{key: _number(fields[key], key, label) for key in _NUMBERS if key in fields},
    }
    dim, heads, layers = values["dim"], values["n_heads"], values["n_layers"]
    kv_heads = values.setdefault("n_kv_heads", heads)
    for contradiction, wrong in (
        (f"dim {dim} is not an even number of rows for each of {heads} heads", dim % (2 * heads)),
        (f"n_heads {heads} is not a multiple of n_kv_heads {kv_heads}", heads % kv_heads),
        (f"n_layers is {layers}, expected 1 to {MAX_LAYERS:,}", layers > MAX_LAYERS),
    ):
        if wrong:
            raise InvalidIndexError(f"{label} contradicts itself: {contradiction}.", _OWN)
    scaled = fields.get("use_scaled_rope", False)
    if not isinstance(scaled, bool):
        raise InvalidIndexError(f"{label} has use_scaled_rope {scaled!r}; expected true or false.", _OWN)
    intermediate = _intermediate(dim, values.pop("multiple_of", None), values.pop("ffn_dim_multiplier", 1.0))
    return MetaParams(**values, intermediate=intermediate, use_scaled_rope=scaled)


def _refuse_unknown_fields(fields: Mapping[str, Any], label: str) -> None:
    known = {*_INTEGERS, *_NUMBERS, *_WITHOUT_EFFECT, "use_scaled_rope"}
    unknown = sorted(key for key in fields if key not in known)
    if not unknown:
        return
    models = (model for pattern, model in _OTHERS for key in unknown if pattern.search(key))
    model = next(models, "another model")
    raise _not_llama(f"{label} has {listed(map(repr, unknown))}, which belongs to {model}")


def _not_llama(problem: str) -> UnreadableFormatError:
    """The error for what no Llama has that is read."""
    return UnreadableFormatError(
        f"{problem}; in Meta's own format the dense text models Llama 1 to 3 are read.",
        "Use the same model in transformers' format, from the hub.",
    )


def _integer(value: object, key: str, label: str) -> int:
    if type(value) is not int or not 0 < value < _MAX_INTEGER:
        raise InvalidIndexError(f"{label} has {key} {value!r}; expected a positive number.", _OWN)
    return value


def _number(value: object, key: str, label: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidIndexError(f"{label} has {key} {value!r}; expected a positive number.", _OWN)
    return float(value)


def _intermediate(dim: int, multiple_of: int | None, multiplier: float) -> int | None:
    """Two thirds of four times the width, times the multiplier, up to a multiple (model.py, `FeedForward`)."""
    if multiple_of is None:
        return None
    return round_up(int(multiplier * int(2 * 4 * dim / 3)), multiple_of)


_IN_LAYER: Mapping[str, tuple[str, tuple[str, ...], int | None]] = {
    "attention.wq": ("self_attn.q_proj", ("dim", "dim"), 0),
    "attention.wk": ("self_attn.k_proj", ("keys", "dim"), 0),
    "attention.wv": ("self_attn.v_proj", ("keys", "dim"), 0),
    "attention.wo": ("self_attn.o_proj", ("dim", "dim"), 1),
    "feed_forward.w1": ("mlp.gate_proj", ("rows", "dim"), 0),
    "feed_forward.w2": ("mlp.down_proj", ("dim", "rows"), 1),
    "feed_forward.w3": ("mlp.up_proj", ("rows", "dim"), 0),
    "attention_norm": ("input_layernorm", ("dim",), None),
    "ffn_norm": ("post_attention_layernorm", ("dim",), None),
}
"""Meta's module -> transformers', its shape, and the dimension along which ranks cut it; None where each has all."""
_EMBEDDING, _HEAD, _NORM = "tok_embeddings.weight", "output.weight", "norm.weight"
_LEFT_OUT = {"rope.freqs"}
"""Tensors left out, since they follow from the parameters."""
_FLOATING = ("F32", "F16", "BF16")
PIECE_MARK = "#"
"""Separates the name of a tensor from the rank number of a piece of it."""
LLAMA_3_VOCABULARY = 128_000
"""Minimum size of Llama 3's vocabulary; those of Llama 1 and 2 (and of Code Llama) are smaller."""
_OTHER = "Use files that were published together: params.json, and every consolidated.NN.pth."


@dataclass(frozen=True, slots=True)
class Shapes:
    """Properties of a model that only its tensors determine.

    Attributes:
        vocab_size, intermediate: rows of the whole embedding, and of a whole feed-forward matrix.
        embedding_dim: the dimension along which ranks cut the embedding.
        dtype: of the embedding, a key of `DTYPES`.
        tied: whether there is no output head, or it is the embedding itself.
    """

    vocab_size: int
    intermediate: int
    embedding_dim: int
    dtype: str
    tied: bool


@dataclass(frozen=True, slots=True)
class LlamaVocabulary:
    """Properties of a model that its tokenizer determines.

    Attributes:
        llama_3: whether the tokenizer is of Llama 3's kind.
        size: number of ids, special tokens included.
        bos: id of the token that begins a text.
        stops: ids of the tokens that end a text.
    """

    llama_3: bool
    size: int
    bos: int
    stops: tuple[int, ...]


def shapes_of(header: Header, params: MetaParams, ranks: int, file: str) -> Shapes:
    """Derive from one rank's tensors the properties that params.json lacks, and compare the others.

    Raises:
        InvalidIndexError, MissingShardError, UnreadableFormatError: see `translated`.
    """
    tensors = {tensor.name: tensor for tensor in header.tensors}
    _check_ranks(tensors, params, ranks, file)
    embedding = _required(tensors, _EMBEDDING, file)
    gate = _required(tensors, "layers.0.feed_forward.w1.weight", file)
    if len(embedding.shape) != 2 or embedding.shape[1] * ranks not in (params.dim, params.dim * ranks):
        uncut = f"(any, {params.dim})"
        raise _shape_error(embedding, file, uncut if ranks == 1 else f"{uncut} or (any, {params.dim // ranks})")
    by_rows = embedding.shape[1] == params.dim
    vocab_size = embedding.shape[0] * (ranks if by_rows else 1)
    if params.vocab_size is not None and params.vocab_size != vocab_size:
        raise InvalidIndexError(
            f"{file} has {_EMBEDDING!r} of shape {embedding.shape}, a vocabulary of {vocab_size:,} over {ranks} ranks; "
            f"params.json says {params.vocab_size:,}.",
            _OTHER,
        )
    intermediate = gate.shape[0] * ranks if gate.shape else 0
    if params.intermediate is not None and params.intermediate != intermediate:
        raise InvalidIndexError(
            f"{file} has {gate.name!r} of shape {gate.shape}, feed-forward layers of {intermediate:,} rows over "
            f"{ranks} ranks; multiple_of and ffn_dim_multiplier in params.json say {params.intermediate:,}.",
            _OTHER,
        )
    head = tensors.get(_HEAD)
    tied = head is None or head._replace(name=embedding.name) == embedding
    return Shapes(vocab_size, intermediate, 0 if by_rows else 1, embedding.dtype, tied)


def _check_ranks(tensors: Mapping[str, TensorSpec], params: MetaParams, ranks: int, file: str) -> None:
    """Refuse a wrong number of ranks first, since it would make every shape look wrong."""
    query = _required(tensors, "layers.0.attention.wq.weight", file)
    if len(query.shape) != 2 or query.shape[1] != params.dim:
        raise _shape_error(query, file, f"({params.dim // ranks}, {params.dim})")
    rows = query.shape[0]
    total = params.dim // rows if rows and params.dim % rows == 0 else 0
    if total > ranks:
        missing = ", ".join(f"consolidated.{rank:02}.pth" for rank in range(ranks, total))
        raise MissingShardError(
            f"{file} is one of {total} ranks by the shape of {query.name!r}, {query.shape}; found {ranks}: {missing} "
            "missing.",
            "Put them into the same folder. Nothing was changed.",
        )
    if total and total < ranks:
        raise InvalidIndexError(
            f"{file} is one of {total} ranks by the shape of {query.name!r}, {query.shape}; found {ranks}.", _OTHER
        )
    if params.n_kv_heads % ranks or params.n_heads % ranks:
        raise UnreadableFormatError(
            f"{file} is one of {ranks} ranks; {params.n_heads} attention heads and {params.n_kv_heads} KV heads cannot "
            "be divided evenly among them.",
            "Use the same model in transformers' format, or Meta's files for fewer ranks.",
        )


def _required(tensors: Mapping[str, TensorSpec], name: str, file: str) -> TensorSpec:
    if name not in tensors:
        raise InvalidIndexError(f"{file} has no tensor {name!r}; expected those of a Llama in Meta's format.", _OTHER)
    return tensors[name]


def translated(header: Header, params: MetaParams, rank: int, ranks: int, file: str) -> Header:
    """The header that a split uses for one rank: transformers' names, cut tensors as pieces, Q and K with strides.

    Args:
        header: header of the rank's file.
        params: the parameters of the model.
        rank: the file's number, from 0.
        ranks: the number of ranks.
        file: its name, for messages.

    Raises:
        InvalidIndexError: a tensor is missing, or its shape contradicts params.json.
        MissingShardError: the shapes belong to a larger number of ranks.
        UnreadableFormatError: a tensor does not belong to a dense Llama, or is not floating-point.
    """
    shapes = shapes_of(header, params, ranks, file)
    expected = _expected_tensors(params, shapes, ranks)
    tensors = {tensor.name: tensor for tensor in header.tensors if tensor.name not in _LEFT_OUT}
    for name, tensor in tensors.items():
        if name not in expected:
            raise _not_llama(f"{file} has a tensor {name!r}, which a Llama of {params.n_layers} layers does not have")
        if tensor.dtype not in _FLOATING:
            raise UnreadableFormatError(
                f"{file} has {name!r} in {tensor.dtype}: these weights are already quantized; expected one of "
                f"{', '.join(_FLOATING)}.",
                "Use the model's unquantized checkpoint with compression='4bit' or '8bit'.",
            )
        if tensor.shape != expected[name].shape:
            raise _shape_error(tensor, file, str(expected[name].shape))
    for name in expected:
        if name != _HEAD or not shapes.tied:
            _required(tensors, name, file)
    specs, copies = [], []
    for name, tensor in tensors.items():
        new_name, _, dim, heads = expected[name]
        if name == _HEAD and shapes.tied:
            continue
        if dim is None and rank > 0:
            copies.append(tensor._replace(name=new_name))
            continue
        turned = tensor if heads is None else _halves_first(tensor, heads // ranks)
        specs.append(_as_piece(turned, new_name, dim, rank, ranks))
    return dataclasses.replace(header, tensors=tuple(specs), copies=tuple(copies))


class _Expected(NamedTuple):
    """Transformers' name of a tensor, its shape in one rank, the dimension that ranks cut, heads if it is rotated."""

    name: str
    shape: tuple[int, ...]
    cut: int | None
    heads: int | None = None


def _expected_tensors(params: MetaParams, shapes: Shapes, ranks: int) -> dict[str, _Expected]:
    """Meta's name -> what it is."""
    sizes = {"dim": params.dim, "rows": shapes.intermediate, "keys": params.n_kv_heads * params.head_dim}
    heads = {"attention.wq": params.n_heads, "attention.wk": params.n_kv_heads}
    whole = {
        _EMBEDDING: _Expected("model.embed_tokens.weight", (shapes.vocab_size, params.dim), shapes.embedding_dim),
        _NORM: _Expected("model.norm.weight", (params.dim,), None),
        _HEAD: _Expected("lm_head.weight", (shapes.vocab_size, params.dim), 0),
    }
    for layer in range(params.n_layers):
        for module, (name, axes, cut) in _IN_LAYER.items():
            shape = tuple(sizes[axis] for axis in axes)
            new_name = f"model.layers.{layer}.{name}.weight"
            whole[f"layers.{layer}.{module}.weight"] = _Expected(new_name, shape, cut, heads.get(module))
    return {
        name: tensor._replace(
            shape=tuple(size // ranks if axis == tensor.cut else size for axis, size in enumerate(tensor.shape))
        )
        for name, tensor in whole.items()
    }


def _halves_first(tensor: TensorSpec, heads: int) -> TensorSpec:
    """A view of the same bytes with the even rows of each head before its odd ones."""
    rows, columns = tensor.shape
    row, column = tensor.strides or (columns, 1)
    half = rows // heads // 2
    view, strides = (heads, 2, half, columns), (2 * half * row, row, 2 * row, column)
    return tensor._replace(strides=strides, view=view)


def _as_piece(tensor: TensorSpec, name: str, dim: int | None, rank: int, ranks: int) -> TensorSpec:
    if dim is None or ranks == 1:
        return tensor._replace(name=name)
    shape = tuple(size * ranks if axis == dim else size for axis, size in enumerate(tensor.shape))
    piece = TensorPiece(name, shape, dim, rank * tensor.shape[dim])
    return tensor._replace(name=f"{name}{PIECE_MARK}{rank}", piece=piece)


def _shape_error(tensor: TensorSpec, file: str, expected: str) -> InvalidIndexError:
    return InvalidIndexError(
        f"{file} has {tensor.name!r} of shape {tensor.shape}; params.json says {expected}.", _OTHER
    )


def index_from(header: Header, params: MetaParams, ranks: tuple[str, ...], file: str) -> CheckpointIndex:
    """The rank of each tensor, or piece of one; from any one rank, since all have the same names.

    Raises:
        CheckpointError: see `translated`.
    """
    weight_map = {}
    for rank, name in enumerate(ranks):
        for tensor in translated(header, params, rank, len(ranks), file).tensors:
            weight_map[tensor.name] = name
    return index_of(weight_map)


def config_of(params: MetaParams, shapes: Shapes, vocabulary: LlamaVocabulary | None) -> dict[str, Any]:
    """The config.json of the same model for transformers.

    The rotary base is params.json's; if absent, 10,000 (Llama 1 and 2), or 500,000 (Llama 3). Where the frequencies
    are scaled without a given factor, it is 8, or 32 in the two small models of Llama 3.2, up to 3,072 wide: the values
    in the configs that Meta publishes at https://huggingface.co/meta-llama.
    """
    llama_3 = is_llama_3(params, shapes, vocabulary)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shapes.vocab_size,
        "hidden_size": params.dim,
        "intermediate_size": shapes.intermediate,
        "num_hidden_layers": params.n_layers,
        "num_attention_heads": params.n_heads,
        "num_key_value_heads": params.n_kv_heads,
        "head_dim": params.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": params.norm_eps,
        "max_position_embeddings": context_length(params, shapes, vocabulary),
        "rope_theta": params.rope_theta or (500_000.0 if llama_3 else 10_000.0),
        "tie_word_embeddings": shapes.tied,
        "dtype": DTYPES[shapes.dtype].torch_name,
        **token_ids(llama_3, shapes, vocabulary),
    }
    if params.use_scaled_rope:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": params.rope_scaling_factor or (32.0 if params.dim <= 3072 else 8.0),
            "low_freq_factor": 1.0,
            "high_freq_factor": params.rope_high_freq_factor or 4.0,
            "original_max_position_embeddings": 8192,
        }
    return config


def is_llama_3(params: MetaParams, shapes: Shapes, vocabulary: LlamaVocabulary | None) -> bool:
    """Whether the model is Llama 3 or later, by its tokenizer, or else by the size of its vocabulary."""
    if vocabulary is not None:
        return vocabulary.llama_3
    return params.use_scaled_rope or shapes.vocab_size >= LLAMA_3_VOCABULARY


def token_ids(llama_3: bool, shapes: Shapes, vocabulary: LlamaVocabulary | None) -> dict[str, Any]:
    """The ids that begin and end a text; without a tokenizer, those of the published ones."""
    if vocabulary is not None:
        stops = list(vocabulary.stops)
        return {"bos_token_id": vocabulary.bos, "eos_token_id": stops if len(stops) > 1 else stops[0]}
    if llama_3 and shapes.vocab_size > LLAMA_3_VOCABULARY:
        return {"bos_token_id": LLAMA_3_VOCABULARY, "eos_token_id": LLAMA_3_VOCABULARY + 1}
    return {"bos_token_id": 1, "eos_token_id": 2}


def context_length(params: MetaParams, shapes: Shapes, vocabulary: LlamaVocabulary | None) -> int:
    """`max_position_embeddings`, which none of Meta's files has: that of the generation, in tokens.

    131,072 where the rotary frequencies are scaled (from Llama 3.1 on), otherwise 8,192 for Llama 3, as in its model
    cards. For the others, 16,384 where the rotary base is above 10,000 (Code Llama, https://arxiv.org/abs/2308.12950);
    4,096 for Llama 2 (https://arxiv.org/abs/2307.09288) and 2,048 for Llama 1 (https://arxiv.org/abs/2302.13971). Llama
    1 was published in float16 with norm_eps 1e-6, without grouped heads or a multiplier for its feed-forward layers;
    Llama 2 differs in one of these. It limits no computation: transformers only warns beyond it.
    """
    if params.use_scaled_rope:
        return 131_072
    if is_llama_3(params, shapes, vocabulary):
        return 8192
    if (params.rope_theta or 0) > 10_000:
        return 16_384
    first = shapes.dtype == "F16" and params.norm_eps <= 1e-6 and params.n_kv_heads == params.n_heads
    return 2048 if first else 4096


def as_json(content: Mapping[str, Any]) -> bytes:
    """The content of a derived file."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
