"""The metadata of a GGUF file for a model of transformers: its config, its tokenizer and its chat template.

The keys are those from which transformers reads a config (`GGUF_CONFIG_MAPPING`), and those that llama.cpp needs in
addition (https://github.com/ggml-org/llama.cpp, `conversion/`). The config that transformers makes of the metadata must
equal the model's.

Invariants: a model that would be another one after reading is refused by the name of the entry.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rabbitllm.base.logs import warn_once
from rabbitllm.base.terminal import error_line, listed
from rabbitllm.checkpoints.config import quantized_as, read_config
from rabbitllm.checkpoints.gguf_rotary import of_full_attention, scaling_metadata
from rabbitllm.errors import CorruptVocabularyError, UnknownArchitectureError
from rabbitllm.formats.bounded import read_json, short
from rabbitllm.storage import durable

if TYPE_CHECKING:
    import gguf

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A model type of transformers that can be written.

    Attributes:
        architecture: llama.cpp's name.
        model_type: the type that transformers makes of it.
        table: its key in `GGUF_CONFIG_MAPPING`.
    """

    architecture: str
    model_type: str
    table: str


FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily("llama", "llama", "llama"),
    "mistral": GgufFamily("llama", "llama", "llama"),
    "qwen2": GgufFamily("qwen2", "qwen2", "qwen2"),
    "qwen3": GgufFamily("qwen3", "qwen3", "qwen3"),
    "qwen3_moe": GgufFamily("qwen3moe", "qwen3_moe", "qwen3_moe"),
    "gemma2": GgufFamily("gemma2", "gemma2", "gemma2"),
    "gemma3_text": GgufFamily("gemma3", "gemma3_text", "gemma3"),
}
"""Model type -> how it is written. Each has a test that writes a model and reads it with transformers."""
_WITHOUT_MEANING = (
    *("attention_dropout", "bos_token_id", "eos_token_id", "initializer_range", "max_window_layers", "pad_token_id"),
    *("output_router_logits", "pretraining_tp", "router_aux_loss_coef", "use_cache"),
)
"""Entries of configs that change no weights and no logits."""
_REMEDY = "Use safetensors (without --to gguf), which RabbitLLM and transformers run. Nothing was written."
_SAMPLES = (
    "The quick brown fox, 12345 times: it's 3.14!",
    "  two spaces\n\nand\ttabs",
    "\u00c7a co\u00fbte 20 \u20ac \u2014 na\u00efve \u0444\u043e\u0440\u043c\u0430 \u03bb\u03cc\u03b3\u03bf\u03c2",
    "\u6211\u60f3\u5728\u5de5\u4f5c \u3053\u3093\u306b\u3061\u306f \uc548\ub155 \u0645\u0631\u062d\u0628\u0627",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \U0001f407\U0001f3fd def f(x):\n    return x",
)
"""Texts on which the tokenizer that is read back is compared with the original."""


def family_of(folder: Path, name: str) -> GgufFamily:
    """How the model in a folder is written, by its config.json alone.

    Raises:
        UnknownArchitectureError: it cannot be written.
    """
    config = read_config(folder)
    model_type = config.get("model_type")
    if (method := quantized_as(config)) is not None:
        raise UnknownArchitectureError(
            f"The weights of {name} are published quantized ({method}); export to GGUF is not supported.",
            "Use the model's original weights in 16 or 32 bits. Nothing was written.",
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnknownArchitectureError(
            f"{name} is of type {short(model_type, 40)}; GGUF export supports {', '.join(sorted(FAMILIES))}.", _REMEDY
        )
    return FAMILIES[model_type]


def config_of(folder: Path, family: GgufFamily, name: str) -> Any:
    """The model's config, of the class that transformers makes of a GGUF file.

    Raises:
        UnknownArchitectureError: transformers does not accept it, or it has an entry that this class lacks.
    """
    from transformers import CONFIG_MAPPING

    content = read_config(folder)
    try:
        config = CONFIG_MAPPING[content["model_type"]].from_dict(content)
        read = CONFIG_MAPPING[family.model_type].from_dict({**content, "model_type": family.model_type})
    except Exception as error:  # a config of strangers makes transformers raise any error
        raise UnknownArchitectureError(
            f"transformers cannot read the config.json of {name}: {error_line(error, 200)}",
            "Use the config.json that was published with the weights. Nothing was written.",
        ) from error
    window = getattr(config, "sliding_window", None)
    if type(config) is not type(read) and window is not None and window < config.max_position_embeddings:
        raise _not_stored_error(name, "sliding_window", window, None)
    return read


def _not_stored_error(name: str, entry: str, value: object, read: object) -> UnknownArchitectureError:
    return UnknownArchitectureError(
        f"GGUF cannot store {entry}={short(value, 80)} of {name}; it would be read as {short(read, 80)}.", _REMEDY
    )


def require_same_config(config: Any, read: Any, name: str) -> None:
    """Refuse a model whose config changes when it is written and read.

    Args:
        config: of the model.
        read: of the file, as read by transformers.
        name: of the model, for messages.

    Raises:
        UnknownArchitectureError: an entry differs.
    """
    from transformers import PreTrainedConfig

    entries, read_entries, defaults = config.to_dict(), read.to_dict(), type(config)().to_dict()
    for entry in sorted(defaults.keys() - {*_WITHOUT_MEANING} - PreTrainedConfig().to_dict().keys()):
        value, read_value = entries.get(entry), read_entries.get(entry)
        if entry == "rope_parameters":
            value, read_value = _without_nones(value), _without_nones(read_value)
        if not _is_same(value, read_value):
            raise _not_stored_error(name, entry, value, read_value)


def _without_nones(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_nones(entry) for key, entry in value.items() if entry is not None}


def _is_same(value: object, read: object) -> bool:
    """Whether two entries are equal; numbers are compared in float32, as a file has them."""
    if isinstance(value, float | int) and isinstance(read, float | int):
        return _as_float32(value) == _as_float32(read)
    if isinstance(value, Mapping) and isinstance(read, Mapping):
        return value.keys() == read.keys() and all(_is_same(value[key], read[key]) for key in value)
    return value == read


def _as_float32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.inf


def add_config(writer: gguf.GGUFWriter, config: Any, family: GgufFamily, name: str) -> None:
    """Add the entries of a config.

    Args:
        writer: of the file.
        config, family: of the model.
        name: of the model.

    Raises:
        UnknownArchitectureError: a file cannot store the scaling of its rotary frequencies.
    """
    from rabbitllm.checkpoints.transformers_gguf import GGUF_CONFIG_MAPPING

    rope, architecture = of_full_attention(config), family.architecture
    try:
        scaling = scaling_metadata(config)
    except ValueError as error:
        raise _not_stored_error(name, "rope_parameters", dict(rope), str(error)) from None
    values = {key: getattr(config, entry, None) for key, entry in GGUF_CONFIG_MAPPING[family.table].items() if entry}
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values |= {"attention.key_length": head, "attention.value_length": head, "rope.freq_base": rope.get("rope_theta")}
    values |= {
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
    }
    for key, value in (values | scaling).items():
        if value is None:
            continue
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        elif isinstance(value, float) or key in ("rope.freq_base", "attention.layer_norm_rms_epsilon"):
            writer.add_float32(f"{architecture}.{key}", float(value))
        else:
            writer.add_uint32(f"{architecture}.{key}", int(value))


def tokenizer_in(folder: Path, name: str) -> Any | None:
    """The model's tokenizer; None if the folder has none.

    Raises:
        CorruptVocabularyError: transformers cannot load it.
    """
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((folder / file).exists() for file in names):
        logger.warning("%s has no tokenizer; the GGUF file will have none either, and llama.cpp needs one.", name)
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # files of strangers make transformers raise any error
        raise CorruptVocabularyError(
            f"transformers cannot load the tokenizer of {name}: {error_line(error, 200)}",
            "Put the tokenizer files that were published with the weights into the folder. Nothing was written.",
        ) from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise CorruptVocabularyError(
            f"The tokenizer of {name} is {type(tokenizer).__name__}, which has no tokenizer.json; expected one.",
            "Use a checkpoint with a tokenizer.json. Nothing was written.",
        )
    return tokenizer


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, config: Any, folder: Path, name: str) -> None:
    """Add a vocabulary, its merges, special tokens and chat template.

    Args:
        writer: of the file.
        tokenizer: of transformers, with a `backend_tokenizer`.
        config: of the model.
        folder: has its config.json, and its generation_config.json if there is one.
        name: of the model, for messages.

    Raises:
        CorruptVocabularyError: no llama.cpp tokenizer matches it.
    """
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    if model.get("type") != "BPE":
        raise _tokenizer_error(name, f"its model is {model.get('type')}, not BPE")
    count = config.vocab_size
    words: dict[int, str] = {index: token for token, index in model["vocab"].items()}
    added = {entry["id"]: entry for entry in content.get("added_tokens", ())}
    words |= {index: entry["content"] for index, entry in added.items()}
    if excess := [words[index] for index in sorted(words) if index >= count]:
        text = "%s: the model has no embeddings for %s; the GGUF file lacks them."
        warn_once(logger, text, name, listed(excess))  # the header is made twice
    in_pieces = bool(model.get("byte_fallback"))
    types = [_token_type(index, words, added, tokenizer.unk_token, in_pieces) for index in range(count)]
    texts = [words.get(index, f"[PAD{index}]") for index in range(count)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    if in_pieces:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        texts = [
            text.replace("\u2581", " ") if token_type == _USER_DEFINED else text
            for text, token_type in zip(texts, types, strict=True)
        ]
        writer.add_token_scores(_scores(texts, types, model["merges"]))
        writer.add_add_space_prefix(_begins_with_space(content))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer(content, name))
    writer.add_token_list(texts)
    writer.add_token_types(types)
    if merges and all(merge.count(" ") == 1 for merge in merges):
        writer.add_token_merges(merges)
    for role, index in _special_ids(tokenizer, config, folder).items():
        if 0 <= index < count:
            writer.add_uint32(f"tokenizer.ggml.{role}_token_id", index)
    begins, ends = _adds_special_tokens(tokenizer)
    writer.add_add_bos_token(begins)
    writer.add_add_eos_token(ends)
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("default")
    if template:
        writer.add_chat_template(template)


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
"""gguf.TokenType"""


def _token_type(
    index: int, words: Mapping[int, str], added: Mapping[int, Mapping[str, Any]], unknown: str | None, in_pieces: bool
) -> int:
    """The type of a token."""
    if index not in words:
        return _UNUSED
    text = words[index]
    if in_pieces and text == unknown:
        return _UNKNOWN
    if index in added:
        return _CONTROL if added[index].get("special") else _USER_DEFINED
    if in_pieces and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return _BYTE
    return _NORMAL


def _scores(texts: Sequence[str], types: Sequence[int], merges: Sequence[Any]) -> list[float]:
    """Scores by which llama.cpp merges in the order of the merges: the rank of a token's first merge, negated.

    A vocabulary of SentencePiece has such scores; characters, which no merge makes, come after all merges in it.
    """
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    scores, last = [], len(merges)
    for text, token_type in zip(texts, types, strict=True):
        if token_type != _NORMAL:
            scores.append(0.0 if token_type in (_CONTROL, _UNKNOWN, _BYTE) else -1000.0)
        elif text in ranks:
            scores.append(-float(ranks[text]))
        else:
            scores.append(-float(last))
            last += 1
    return scores


def _begins_with_space(content: Mapping[str, Any]) -> bool:
    """Whether a space is put before a text, by a tokenizer.json."""
    parts = []
    for place in ("normalizer", "pre_tokenizer"):
        part = content.get(place) or {}
        parts += [part, *part.get("normalizers", ()), *part.get("pretokenizers", ())]
    return any(
        part.get("type") == "Prepend" or (part.get("type") == "Metaspace" and part.get("prepend_scheme") != "never")
        for part in parts
    )


def _pre_tokenizer(content: Mapping[str, Any], name: str) -> str:
    """llama.cpp's name of the way in which text is split before the merges, by a tokenizer.json."""
    from rabbitllm.checkpoints.transformers_gguf import GGUF_PRE_TOKENIZER_SPLITS

    pre_tokenizer = content.get("pre_tokenizer") or {}
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    *earlier, last = parts
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        if not earlier and last.get("use_regex", True):
            return "gpt-2"
        if len(earlier) == 1 and earlier[0].get("type") == "Digits" and last.get("use_regex", True):
            if earlier[0].get("individual_digits"):
                return "smollm"
        elif len(earlier) == 1 and earlier[0].get("type") == "Split" and not last.get("use_regex", True):
            regex = (earlier[0].get("pattern") or {}).get("Regex")
            plain = earlier[0].get("behavior") == "Isolated" and not earlier[0].get("invert")
            names = [str(key) for key, split in GGUF_PRE_TOKENIZER_SPLITS.items() if split == regex]
            if plain and names:
                return _USUAL.get(names[0], names[0])
    raise _tokenizer_error(name, f"its pre-tokenizer is {short(json.dumps(pre_tokenizer), 200)}")


_USUAL = {"llama3": "llama-bpe"}
"""Names that llama.cpp's converter writes, of those that have the same regular expression."""


def _tokenizer_error(name: str, why: str) -> CorruptVocabularyError:
    return CorruptVocabularyError(f"No known llama.cpp tokenizer matches that of {name}: {why}.", _REMEDY)


def _special_ids(tokenizer: Any, config: Any, folder: Path) -> dict[str, int]:
    """The ids of special tokens by llama.cpp's names; further ids that end a text end a turn or a message there."""
    ids: dict[str, int] = {}
    for key, attribute in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        index = getattr(tokenizer, f"{attribute}_token_id", None)
        if index is None and attribute != "unk":
            index = getattr(config, f"{attribute}_token_id", None)
        if isinstance(index, int):
            ids[key] = index
    path = folder / "generation_config.json"
    stops = read_json(path).get("eos_token_id") if path.exists() else config.eos_token_id
    ordered = [ids.get("eos"), *(stops if isinstance(stops, list) else [stops])]
    unique = list(dict.fromkeys(stop for stop in ordered if isinstance(stop, int)))
    return ids | dict(zip(("eos", "eot", "eom"), unique, strict=False))


def _adds_special_tokens(tokenizer: Any) -> tuple[bool, bool]:
    """Whether the tokenizer puts the first and the last special token around a text."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    begins = bool(whole) and whole[0] == tokenizer.bos_token_id and whole[: len(plain)] != plain
    return begins, whole[-1:] == [tokenizer.eos_token_id] and whole[-len(plain) :] != plain


def warn_of_other_ids(tokenizer: Any, files: Mapping[str, bytes], folder: Path, name: str) -> None:
    """Warn if the tokenizer that transformers makes of the metadata is another one.

    Args:
        tokenizer: the original.
        files: of the one that was read: name -> content.
        folder: a scratch folder, which they are written to.
        name: of the model.
    """
    from transformers import AutoTokenizer

    for file, content in files.items():
        durable.write_scratch(folder / file, content)
    read = AutoTokenizer.from_pretrained(folder)
    for text in _SAMPLES:
        if read.encode(text) != tokenizer.encode(text):
            logger.warning(
                "%s: the tokenizer that transformers reads from the GGUF file differs from the original on %s. "
                "llama.cpp uses the tokenizer that the file names.",
                name,
                short(text, 60),
            )
            return
