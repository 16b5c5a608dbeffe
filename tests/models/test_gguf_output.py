"""Models written as GGUF: what transformers and RabbitLLM read of the file is the model, bit for bit."""

from __future__ import annotations

import errno
import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from tokenizers import decoders, pre_tokenizers, trainers

import rabbitllm
from rabbitllm.errors import (
    CorruptVocabularyError,
    IncompleteCheckpointError,
    NotEnoughSpaceException,
    OptionError,
    RabbitLLMError,
    UnknownArchitectureError,
    UnreadableFormatError,
)
from rabbitllm.lazy.load import lazy_load
from rabbitllm.models import gguf_output
from rabbitllm.models._gguf_metadata import FAMILIES
from rabbitllm.models.convert import convert
from rabbitllm.models.gguf_output import OUTTYPES
from rabbitllm.quant import block_encoders
from rabbitllm.quant.block_encoders import ENCODED, encode
from rabbitllm.storage import durable
from rabbitllm.store.layer_store import LayerStore
from tests.support.gguf_files import TEMPLATE, write_gguf
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.meta_files import tiny_llama, write_meta
from tests.support.small_disk import small_disk
from tests.support.splitting import names_in, split
from tests.support.tiny_models import one_thread  # noqa: F401  a fixture that applies by itself

ROOT = Path(__file__).parent.parent.parent
IDS = torch.arange(3, 60)[None]
WORDS = 320
SHARED = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 256,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 32, **_EXPERTS}),
    "gemma2": ("Gemma2Config", {"head_dim": 32, "sliding_window": 32}),
    "gemma3_text": ("Gemma3TextConfig", {"head_dim": 32, "sliding_window": 32}),
}
FAST = ("llama",)
TEXTS = (
    "The quick brown fox: it's 12345 times 3.14!",
    "  two spaces\n\nand\ttabs, then  more   of them ",
    "\u00c7a co\u00fbte 20 \u20ac \u2014 \u0444\u043e\u0440\u043c\u0430 \u03bb\u03cc\u03b3\u03bf\u03c2",
    "\u6211\u60f3\u5728\u5de5\u4f5c \u3053\u3093\u306b\u3061\u306f \uc548\ub155 \u0645\u0631\u062d\u0628\u0627",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \U0001f407\U0001f3fd<|end|>\ndef f(x):\n    return x",
)


def config_of(family: str, **more: Any) -> Any:
    name, own = CONFIGS[family]
    return getattr(transformers, name)(**{**SHARED, **own, **more})


def build(folder: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16, **more: Any) -> Path:
    """A checkpoint with random weights of few bits, so that a norm plus one minus one is the norm."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family, **more))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn(parameter.shape) * 16).round() / 64)
    model.to(dtype).save_pretrained(folder)
    return folder


def theirs(path: Path, config: Any = None, **options: Any) -> Any:
    """What transformers makes of a folder or a GGUF file."""
    if path.is_dir():
        return transformers.AutoModelForCausalLM.from_pretrained(path, **options)
    own = {} if config is None else {"config": config}
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **own, **options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def stored(file: Path) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """Tensors of a file: name -> its type, and its bytes or values."""
    return {one.name: (one.tensor_type.name, np.asarray(one.data)) for one in gguf.GGUFReader(file).tensors}


def test_every_family_has_a_model_here_and_every_encoder_of_the_package_a_name() -> None:
    assert CONFIGS.keys() == FAMILIES.keys()
    encoders = set()
    for kind in gguf.GGMLQuantizationType:
        try:
            gguf.quants.quantize(np.ones((1, 512), np.float32), kind)
        except NotImplementedError:
            continue
        encoders.add(kind.name)
    assert {*OUTTYPES.values()} == encoders | {*ENCODED}


@pytest.mark.bits
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if family in FAST and dtype is torch.bfloat16 else pytest.mark.long)
        for family in CONFIGS
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ],
)
def test_what_is_read_back_is_the_model(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """transformers reads no width of heads and experts of some types; RabbitLLM takes it from the shapes."""
    folder, file = build(tmp_path / "model", family, dtype), tmp_path / "model.gguf"
    made = convert(folder, file, to="gguf")
    assert made.folder == file
    expected = logits(theirs(folder, dtype=dtype))
    narrow = config_of(family) if family.startswith("qwen3") else None
    assert torch.equal(logits(theirs(file, narrow, dtype=dtype)), expected)
    read = rabbitllm.AutoModel.from_pretrained(file, device="cpu", exact=True)
    assert read.dtype is dtype
    assert torch.equal(logits(read), expected)
    assert names_in(tmp_path, "*.part") == []


@pytest.mark.long
@pytest.mark.bits
def test_wider_types_hold_the_same_numbers(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", "llama")
    plain = theirs(folder, dtype=torch.float32)
    for outtype in ("f32", "f16", "bf16"):
        file = tmp_path / f"{outtype}.gguf"
        convert(folder, file, to="gguf", outtype=outtype)
        assert {kind for kind, data in stored(file).values() if data.ndim > 1} == {outtype.upper()}
        assert torch.equal(logits(theirs(file, dtype=torch.float32)), logits(plain))


def test_an_empty_array_of_the_metadata_is_left_out(tmp_path: Path) -> None:
    """The package gguf writes none: here one takes the place of a text of as many bytes."""
    (tmp_path / "in").mkdir()
    source = write_gguf(tmp_path / "in" / "model.gguf", changed=lambda to: to.add_string("general.tags", "text"))
    text, empty = struct.pack("<IQ", 8, 4) + b"text", struct.pack("<IIQ", 9, 8, 0)
    source.write_bytes(source.read_bytes().replace(b"general.tags" + text, b"general.tags" + empty))
    convert(source, tmp_path / "same.gguf", to="gguf")
    old, new = (gguf.GGUFReader(path).fields for path in (source, tmp_path / "same.gguf"))
    assert old["general.tags"].contents() == []
    assert old.keys() - new.keys() == {"general.tags"}


def test_a_head_that_differs_from_the_embedding_is_written_although_the_config_ties_it(tmp_path: Path) -> None:
    folder = build(tmp_path / "in", "qwen2")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    for name, head in (
        ("own", weights["model.embed_tokens.weight"] * 2),
        ("tied", weights["model.embed_tokens.weight"]),
    ):
        both = {**weights, "lm_head.weight": head.clone()}
        safetensors.torch.save_file(both, folder / "model.safetensors", {"format": "pt"})
        expected = logits(theirs(folder))
        convert(folder, tmp_path / f"{name}.gguf", to="gguf")
        assert torch.equal(logits(theirs(tmp_path / f"{name}.gguf", dtype=torch.bfloat16)), expected)
        assert ("output.weight" in stored(tmp_path / f"{name}.gguf")) == (name == "own")


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of a Llama's queries or keys in the order of GGUF (llama.cpp, conversion/llama.py)."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, rows, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("outtype", ["q8_0", *(pytest.param(one, marks=pytest.mark.long) for one in OUTTYPES)])
def test_blocks_are_those_of_the_encoder_or_the_package_gguf(outtype: str, tmp_path: Path) -> None:
    folder, file = build(tmp_path / "model", "llama", hidden_size=256, intermediate_size=512), tmp_path / "model.gguf"
    convert(folder, file, to="gguf", outtype=outtype)
    tensors, found = lazy_load(folder), stored(file)
    kind = OUTTYPES[outtype]
    layer = "model.layers.1."
    expected = {
        "blk.1.attn_q.weight": permuted(tensors[f"{layer}self_attn.q_proj.weight"].float(), 4),
        "blk.1.attn_k.weight": permuted(tensors[f"{layer}self_attn.k_proj.weight"].float(), 2),
        "blk.1.attn_v.weight": tensors[f"{layer}self_attn.v_proj.weight"].float(),
        "blk.1.ffn_down.weight": tensors[f"{layer}mlp.down_proj.weight"].float(),
    }
    for name, weight in expected.items():
        assert found[name][0] == kind
        own = kind in ENCODED and kind != "Q8_0"
        blocks = encode(kind, weight) if own else gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
        assert found[name][1].tobytes() == np.asarray(blocks).tobytes(), name
    assert found["blk.1.attn_norm.weight"][0] == found["output_norm.weight"][0] == "F32"


@pytest.mark.long
def test_rows_that_blocks_do_not_divide_have_smaller_ones_or_are_float16(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", "llama", intermediate_size=80)
    for outtype, of_64 in (("q8_0", "Q8_0"), ("q5_k", "Q5_1"), ("q4_k", "Q5_0"), ("iq4_xs", "IQ4_NL")):
        file = tmp_path / f"{outtype}.gguf"
        convert(folder, file, to="gguf", outtype=outtype)
        found = stored(file)
        assert found["blk.0.ffn_down.weight"][0] == "F16"
        assert found["blk.0.ffn_up.weight"][0] == of_64


@pytest.mark.parametrize("files", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_gguf_source_keeps_its_metadata_and_the_blocks_of_the_same_type(files: int, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = write_gguf(tmp_path / "in" / "model.gguf", "llama", files=files)
    before: dict[str, Any] = {}
    for path in sorted((tmp_path / "in").iterdir()):
        before |= stored(path)
    convert(source, tmp_path / "same.gguf", to="gguf")
    after = stored(tmp_path / "same.gguf")
    assert after.keys() == before.keys()
    for name, (kind, data) in before.items():
        assert after[name][0] == kind
        assert after[name][1].tobytes() == data.tobytes()
    old, new = (gguf.GGUFReader(path).fields for path in (source, tmp_path / "same.gguf"))
    kept = {key for key in old if not key.startswith(("GGUF.", "split.", "general.quant", "general.file_type"))}
    assert kept == {key for key in new if not key.startswith(("GGUF.", "general.quant", "general.file_type"))}
    assert all(old[key].contents() == new[key].contents() for key in kept)
    convert(source, tmp_path / "eight.gguf", to="gguf", outtype="q8_0")
    eight = stored(tmp_path / "eight.gguf")
    assert {kind for kind, data in eight.values() if data.ndim > 1} == {"Q8_0"}
    assert any(kind == "Q8_0" for kind, _ in before.values())
    for name, (kind, data) in before.items():
        if kind == "Q8_0":
            assert eight[name][1].tobytes() == data.tobytes()
        elif data.ndim > 1:
            values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
            blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            assert eight[name][1].tobytes() == blocks.tobytes()


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_a_split_of_blocks_becomes_the_same_blocks(family: str, tmp_path: Path) -> None:
    """Also those of queries, whose rows the split has in another order, and of experts, which it has one by one."""
    (tmp_path / "in").mkdir()
    source = write_gguf(tmp_path / "in" / "model.gguf", family, types="Q8_0")
    directory = split(source, sequential=False)
    convert(directory, tmp_path / "again.gguf", to="gguf")
    before, after = stored(source), stored(tmp_path / "again.gguf")
    assert {name for name, (kind, _) in before.items() if kind == "Q8_0"} >= {"blk.0.attn_q.weight"}
    for name, (kind, data) in before.items():
        if name != "output.weight" or name in after:
            assert (after[name][0], after[name][1].tobytes()) == (kind, data.tobytes()), name


@pytest.mark.parametrize("compression", ["q4_k_m", pytest.param("q5_k", marks=pytest.mark.long)])
def test_blocks_that_a_split_made_are_copied(compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build(tmp_path / "model", "llama", hidden_size=256, intermediate_size=512)
    directory = split(folder, sequential=False, compression=compression)

    def refuse(*_: object) -> None:
        raise AssertionError("nothing is encoded again")

    monkeypatch.setattr(block_encoders, "encode", refuse)
    convert(directory, tmp_path / "model.gguf", to="gguf")
    found, store = stored(tmp_path / "model.gguf"), LayerStore(directory)
    same = {"blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight", "output.weight": "lm_head.weight"}
    for name, of_split in same.items():
        tensor = store.tensors[of_split]
        assert tensor.quantized is not None
        assert found[name][0] == tensor.quantized.scheme
        raw = (directory / tensor.parts[0].file).read_bytes()
        begin = tensor.parts[0].offset
        assert found[name][1].tobytes() == raw[begin : begin + tensor.parts[0].nbytes]
    convert(directory, tmp_path / "plain")
    plain = logits(theirs(tmp_path / "plain", dtype=torch.float32))
    assert float((logits(theirs(tmp_path / "model.gguf")) - plain).norm() / plain.norm()) < 1e-2  # plain is bfloat16


@pytest.mark.long
def test_a_compressed_split_becomes_the_dtype_of_its_config(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", "qwen2", hidden_size=128, intermediate_size=256)
    directory = split(folder, sequential=False, compression="8bit")
    convert(directory, tmp_path / "model.gguf", to="gguf")
    convert(directory, tmp_path / "plain")
    assert torch.equal(
        logits(theirs(tmp_path / "model.gguf", dtype=torch.bfloat16)),
        logits(theirs(tmp_path / "plain", dtype=torch.bfloat16)),
    )


@pytest.mark.long
def test_a_repository(local_hub: LocalHub, hub_environment: HubEnvironment, tmp_path: Path) -> None:
    folder = build(tmp_path / "hub" / "acme" / "tiny", "qwen2")
    convert("acme/tiny", tmp_path / "hub.gguf", to="gguf")
    convert(folder, tmp_path / "folder.gguf", to="gguf")
    assert (tmp_path / "hub.gguf").read_bytes() == (tmp_path / "folder.gguf").read_bytes()


@pytest.mark.parametrize("outtype", ["auto", "q8_0"])
def test_tensors_larger_than_a_piece(outtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and encoded in pieces that end within rows and within the rows of a head, which are rearranged together."""
    folder = build(tmp_path / "model", "llama")
    convert(folder, tmp_path / "whole.gguf", to="gguf", outtype=outtype)
    monkeypatch.setattr(gguf_output, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(gguf_output, "PIECE_ELEMENTS", 96)
    convert(folder, tmp_path / "pieces.gguf", to="gguf", outtype=outtype)
    assert (tmp_path / "pieces.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_a_single_file_is_as_its_folder(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", "llama")
    convert(folder, tmp_path / "folder.gguf", to="gguf")
    convert(folder / "model.safetensors", tmp_path / "file.gguf", to="gguf")
    assert bytes_in(tmp_path / "file.gguf") == bytes_in(tmp_path / "folder.gguf")


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_of_meta_are_as_the_safetensors_of_the_same_model(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_output, "CHUNK_BYTES", 1000)
    model = tiny_llama()
    convert(write_meta(tmp_path / "meta", model, ranks), tmp_path / "meta.gguf", to="gguf")
    model.save_pretrained(tmp_path / "plain")
    convert(tmp_path / "plain", tmp_path / "plain.gguf", to="gguf")
    assert bytes_in(tmp_path / "meta.gguf") == bytes_in(tmp_path / "plain.gguf")


def bytes_in(file: Path) -> dict[str, tuple[str, bytes]]:
    return {name: (kind, data.tobytes()) for name, (kind, data) in stored(file).items()}


# Tokenizers.


def trained(byte_level: bool) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=not byte_level))
    special = ["<unk>", "<s>", "</s>"] + ([] if byte_level else [f"<0x{code:02X}>" for code in range(256)])
    made.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False)
        if byte_level
        else pre_tokenizers.Metaspace(prepend_scheme="never")
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    made.train_from_iterator(
        [text for text in TEXTS for _ in range(3)],
        trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return made


def tokenizer_of(kind: str) -> Any:
    content = json.loads(trained(kind in ("qwen2", "llama3", "gpt2")).to_str())["model"]
    vocabulary, merges = content["vocab"], [tuple(merge) for merge in content["merges"]]
    names = {"llama": "LlamaTokenizer", "gemma": "GemmaTokenizer", "qwen2": "Qwen2Tokenizer", "gpt2": "GPT2Tokenizer"}
    options = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    made = getattr(transformers, names[kind])(vocab=vocabulary, merges=merges, **options)
    made.add_tokens([tokenizers.AddedToken("<|end|>", special=True, normalized=False)])
    made.add_tokens([tokenizers.AddedToken("<think>", special=False, normalized=False)])
    made.chat_template = TEMPLATE
    return made


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        pytest.param(kind, family, marks=() if kind == "qwen2" else pytest.mark.long)
        for kind, family in (("llama", "llama"), ("gemma", "gemma3_text"), ("qwen2", "qwen2"), ("gpt2", "llama"))
    ],
)
def test_the_tokenizer_gives_the_same_ids(
    kind: str, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tokenizer_of(kind)
    folder = build(tmp_path / "model", family, vocab_size=len(tokenizer) + 5)
    tokenizer.save_pretrained(folder)
    stops = {"eos_token_id": [tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.eos_token_id]}
    (folder / "generation_config.json").write_text(json.dumps(stops))
    file = tmp_path / "model.gguf"
    convert(folder, file, to="gguf")
    assert "another tokenizer" not in caplog.text
    original = transformers.AutoTokenizer.from_pretrained(folder)
    model = rabbitllm.AutoModel.from_pretrained(file, device="cpu")
    for read in (transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name), model.tokenizer):
        for text in (*TEXTS, "a <think> b"):
            assert read.encode(text) == original.encode(text), text
        assert read.chat_template == TEMPLATE
        assert read.eos_token == "</s>"
    assert sorted(model.generation_config.eos_token_id) == sorted(stops["eos_token_id"])


def test_tokens_without_embeddings_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tokenizer_of("qwen2")
    folder = build(tmp_path / "model", "qwen2", vocab_size=len(tokenizer) - 1)
    tokenizer.save_pretrained(folder)
    convert(folder, tmp_path / "model.gguf", to="gguf")
    last = tokenizer.convert_ids_to_tokens(len(tokenizer) - 1)
    (warning,) = [message for message in caplog.messages if "has no embeddings for" in message]
    assert warning.endswith(f": the model has no embeddings for {last}; the GGUF file lacks them.")
    assert last not in gguf.GGUFReader(tmp_path / "model.gguf").fields["tokenizer.ggml.tokens"].contents()


@pytest.mark.long
def test_scores_rise_with_the_merges_as_in_sentencepiece(tmp_path: Path) -> None:
    """llama.cpp has no merges for such vocabularies: it joins the pair whose token has the highest score."""
    tokenizer = tokenizer_of("llama")
    folder = build(tmp_path / "model", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    convert(folder, tmp_path / "model.gguf", to="gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    tokens, scores = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "scores"))
    by_token = dict(zip(tokens, scores, strict=True))
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    found = [by_token["".join(merge)] for merge in merges]
    assert len(found) > 50
    assert found == sorted(found, reverse=True)
    kinds = dict(zip(tokens, fields["tokenizer.ggml.token_type"].contents(), strict=True))
    assert (kinds["<unk>"], kinds["<s>"], kinds["<0x41>"], kinds["<think>"], kinds["<|end|>"]) == (2, 3, 6, 4, 3)


@pytest.mark.long
def test_an_unknown_way_to_split_text_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("gpt2")
    folder = build(tmp_path / "model", "llama", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(CorruptVocabularyError, match=r"its pre-tokenizer is .*Whitespace"):
        convert(folder, tmp_path / "model.gguf", to="gguf")


# Rotary frequencies.


SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": (
        "llama",
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "linear": ("qwen2", {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "yarn": (
        "qwen3",
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "in full attention": (
        "gemma3_text",
        {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}


@pytest.mark.bits
@pytest.mark.parametrize("name", SCALED)
def test_scaled_rotary_frequencies_come_back(name: str, tmp_path: Path) -> None:
    """transformers with `gguf_file=` ignores them, so the checkpoint is compared."""
    family, rope = SCALED[name]
    folder = build(tmp_path / "model", family, torch.float32, rope_parameters=rope)
    convert(folder, tmp_path / "model.gguf", to="gguf")
    model = rabbitllm.AutoModel.from_pretrained(tmp_path / "model.gguf", device="cpu", exact=True)
    assert model.config.rope_parameters == rope
    assert torch.equal(logits(model), logits(theirs(folder, dtype=torch.float32)))


def test_scaled_rotary_frequencies_are_written_for_llama_cpp(tmp_path: Path) -> None:
    for name in ("llama3", "yarn"):
        family, rope = SCALED[name]
        convert(build(tmp_path / name, family, rope_parameters=rope), tmp_path / f"{name}.gguf", to="gguf")
    kind, factors = stored(tmp_path / "llama3.gguf")["rope_freqs.weight"]
    assert (kind, factors.shape, factors.min(), factors.max()) == ("F32", (16,), 1.0, 8.0)
    assert ((factors[1:] - factors[:-1]) >= 0).all()
    fields = gguf.GGUFReader(tmp_path / "yarn.gguf").fields
    said = {
        key: fields[f"qwen3.rope.scaling.{key}"].contents() for key in ("type", "factor", "original_context_length")
    }
    assert said == {"type": "yarn", "factor": 4.0, "original_context_length": 64}


# What is refused.

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def test_biases_that_transformers_leaves_out_of_its_config_are_read(tmp_path: Path) -> None:
    """llama.cpp takes the tensors that are there; transformers computes without them."""
    folder = build(tmp_path / "in", attention_bias=True, mlp_bias=True)
    convert(folder, tmp_path / "model.gguf", to="gguf")
    assert {"blk.1.attn_q.bias", "blk.1.ffn_down.bias"} <= stored(tmp_path / "model.gguf").keys()
    model = rabbitllm.AutoModel.from_pretrained(tmp_path / "model.gguf", device="cpu", exact=True)
    assert torch.equal(logits(model), logits(theirs(folder)))


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "cannot store hidden_act='gelu'"),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (
                ("qwen3_moe", {"norm_topk_prob": False}, "cannot store norm_topk_prob=False"),
                ("gemma3_text", {"query_pre_attn_scalar": 168}, "cannot store query_pre_attn_scalar=168"),
                ("mistral", {"sliding_window": 32}, "cannot store sliding_window=32"),
                ("llama", {"rope_parameters": DYNAMIC}, "cannot store rope_parameters=.*dynamic"),
            )
        ),
    ],
)
def test_a_config_that_a_file_cannot_say_is_refused(
    family: str, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = build(tmp_path / "model", family, **more)
    seen: list[durable.Step] = []
    with durable.observe_steps(seen.append), pytest.raises(UnknownArchitectureError, match=message):
        convert(folder, tmp_path / "model.gguf", to="gguf")
    assert seen == []


def test_other_families_are_refused_by_name_before_a_shard_is_fetched(
    local_hub: LocalHub, hub_environment: HubEnvironment, tmp_path: Path
) -> None:
    folder = tmp_path / "hub" / "acme" / "bloom"
    config = transformers.BloomConfig(hidden_size=64, n_layer=1, n_head=4, vocab_size=300)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with pytest.raises(UnknownArchitectureError, match="acme/bloom is of type 'bloom'; GGUF export supports gemma2"):
        convert("acme/bloom", tmp_path / "model.gguf", to="gguf")
    assert not list(tmp_path.rglob("blobs/*.safetensors"))
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.long
def test_other_weights_than_the_config_s_are_refused(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(IncompleteCheckpointError, match=r"layers\.2\.\S+ is missing"):
        convert(folder, tmp_path / "model.gguf", to="gguf")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(IncompleteCheckpointError, match=r"layers\.1\.\S+ has no place in a GGUF file"):
        convert(folder, tmp_path / "model.gguf", to="gguf")


@pytest.mark.long
def test_a_value_that_float16_cannot_hold_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = transformers.AutoModelForCausalLM.from_config(config_of("llama"))
    with torch.no_grad():
        model.lm_head.weight[7, 3] = 1e6
    model.save_pretrained(folder)
    with pytest.raises(UnreadableFormatError, match=r"lm_head.weight has the value 1000000.0, which exceeds float16"):
        convert(folder, tmp_path / "model.gguf", to="gguf", outtype="f16")
    assert names_in(tmp_path, "*.gguf*") == []
    convert(folder, tmp_path / "model.gguf", to="gguf", outtype="bf16")


def test_options(tmp_path: Path) -> None:
    folder = build(tmp_path / "model")
    for options, message in (
        ({"to": "gguf", "outtype": "q1_k"}, "outtype='q1_k' is not a type"),
        ({"to": "gguf", "sequential": True}, "apply only to safetensors"),
        ({"outtype": "q8_0"}, "expected safetensors with auto, f32, f16, bf16, or gguf"),
        ({"to": "ggml"}, "to='ggml'"),
    ):
        with pytest.raises(OptionError, match=re.escape(message)):
            convert(folder, tmp_path / "model.gguf", **options)
    with pytest.raises(OptionError, match=r"Use a name such as .*out\.gguf"):
        convert(folder, tmp_path / "out", to="gguf")
    (tmp_path / "model.gguf").write_bytes(b"mine")
    with pytest.raises(OptionError, match="exists already"):
        convert(folder, tmp_path / "model.gguf", to="gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"mine"


def test_a_disk_without_room_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    folder = build(tmp_path / "model", "llama", vocab_size=9000)
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        disk.leave(1 << 20)
        seen: list[durable.Step] = []
        with durable.observe_steps(seen.append), pytest.raises(NotEnoughSpaceException, match="are free on the disk"):
            convert(folder, disk.path / "model.gguf", to="gguf", min_free_disk=0)
        assert seen == []
        disk.give_back()
        convert(folder, disk.path / "model.gguf", to="gguf", min_free_disk=0)
    with pytest.raises(NotEnoughSpaceException, match="allowed by max_disk"):
        convert(folder, tmp_path / "model.gguf", to="gguf", max_disk="1MiB")


def fail_after(count: int, folder: Path, file: Path) -> None:
    """Convert to a disk that fails at the write after `count` lines of the log."""
    lines: list[durable.Step] = []

    def observe(step: durable.Step) -> None:
        if step.path.name.endswith(gguf_output.LOG_SUFFIX) and step.kind == "sync":
            lines.append(step)
        elif len(lines) == count and step.kind == "write":
            raise OSError(errno.EIO, "failing disk")

    with durable.observe_steps(observe), pytest.raises(RabbitLLMError, match="failing disk"):
        convert(folder, file, to="gguf")


def data_written(folder: Path, file: Path) -> list[int]:
    """Convert; the offsets of what is written into the file."""
    steps: list[durable.Step] = []
    with durable.observe_steps(steps.append):
        convert(folder, file, to="gguf")
    part = file.name + durable.PART_SUFFIX
    return [step.offset for step in steps if step.kind == "write" and step.path.name == part]


def test_a_resumed_conversion_writes_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_output, "SYNC_BYTES", 1)
    folder, file = build(tmp_path / "model", "llama"), tmp_path / "model.gguf"
    whole = data_written(folder, tmp_path / "other.gguf")
    fail_after(7, folder, file)
    assert data_written(folder, file) == [0, *whole[8:]]  # the header, and tensors from the eighth on
    assert file.read_bytes() == (tmp_path / "other.gguf").read_bytes()
    assert names_in(tmp_path, "*.gguf*") == ["model.gguf", "other.gguf"]


@pytest.mark.parametrize("suffix", [".part", ".progress", ".progress.part"])
def test_files_of_others_beside_it_are_kept(tmp_path: Path, suffix: str) -> None:
    folder, file = build(tmp_path / "model", "llama"), tmp_path / "model.gguf"
    other = tmp_path / f"model.gguf{suffix}"
    other.write_text("mine")
    with pytest.raises(OptionError, match=rf"{other.name} was not written by an earlier conversion"):
        convert(folder, file, to="gguf")
    assert (other.read_text(), names_in(tmp_path)) == ("mine", sorted(["model", other.name]))
    other.unlink()
    convert(folder, file, to="gguf")
    other.write_text("mine")
    assert convert(folder, file, to="gguf").before
    assert other.read_text() == "mine"


def test_a_damaged_unfinished_file_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finished one has no checksums."""
    monkeypatch.setattr(gguf_output, "SYNC_BYTES", 1)
    folder, file = build(tmp_path / "model", "llama"), tmp_path / "model.gguf"
    whole = data_written(folder, tmp_path / "other.gguf")
    fail_after(7, folder, file)
    with (tmp_path / "model.gguf.part").open("r+b") as part:
        part.seek(whole[3])
        part.write(b"?")
    assert data_written(folder, file) == whole
    assert file.read_bytes() == (tmp_path / "other.gguf").read_bytes()


@pytest.mark.parametrize("line", [b"", b"9", b"x\n"])
def test_a_damaged_log_costs_work_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    monkeypatch.setattr(gguf_output, "SYNC_BYTES", 1)
    folder, file = build(tmp_path / "model", "llama"), tmp_path / "model.gguf"
    fail_after(3, folder, file)
    log = tmp_path / "model.gguf.progress"
    log.write_bytes(log.read_bytes() + line if line else b"")
    convert(folder, file, to="gguf")
    convert(folder, tmp_path / "other.gguf", to="gguf")
    assert file.read_bytes() == (tmp_path / "other.gguf").read_bytes()


def test_other_weights_than_those_of_an_unfinished_file_are_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_output, "SYNC_BYTES", 1)
    folder, file = build(tmp_path / "model", "llama"), tmp_path / "model.gguf"
    fail_after(7, folder, file)
    weights = folder / "model.safetensors"
    changed = {name: tensor + 1 for name, tensor in safetensors.torch.load_file(weights).items()}
    safetensors.torch.save_file(changed, weights, {"format": "pt"})
    convert(folder, file, to="gguf")
    convert(folder, tmp_path / "other.gguf", to="gguf")
    assert file.read_bytes() == (tmp_path / "other.gguf").read_bytes()
