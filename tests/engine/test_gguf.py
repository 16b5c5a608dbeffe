"""Models from GGUF files: the bits and tokens of transformers, which reads the same file whole."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers

import rabbitllm
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.engine import _first_use
from rabbitllm.engine.weight_tensors import QuantizedWeight
from rabbitllm.errors import CheckpointNotFoundError, IncompleteCheckpointError, UnknownArchitectureError
from rabbitllm.formats.gguf_types import BLOCK_TYPES
from rabbitllm.quant import _vectors
from rabbitllm.storage.files import map_now
from rabbitllm.store.checkpoint_folder import PlainReader
from rabbitllm.store.layer_store import LayerStore, verify
from tests.support.gguf_files import CONVERTED, FAMILIES, VOCABULARY, write_converted, write_gguf
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.mappings import flags_of
from tests.support.rounding import assert_as_near
from tests.support.splitting import contents, split

IDS = torch.arange(3, 40)[None] % VOCABULARY
FAST = ("llama", "gemma3", "qwen3moe")
NARROW = ("qwen3moe",)
"""Transformers does not read the width of an expert from the metadata."""
TEXTS = ("hello rabbits", "  two spaces\n\nand lines", "<s>x</s>y", "\u00e9t\u00e9 12345 \U0001f407", "a  b   c\tq")


def plain(file: Path, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype, **more)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(IDS).logits
    return output


@pytest.mark.bits
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in FAST else pytest.mark.long) for name in sorted(FAMILIES)]
)
def test_logits_and_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", family)
    for options, dtype in (({"dtype": "float32"}, torch.float32), ({}, torch.bfloat16)):
        model = rabbitllm.AutoModel.from_pretrained(file, device="cpu", exact=True, **options)
        own_sizes = {"config": model.config} if family in NARROW else {}
        assert model.dtype is dtype
        assert torch.equal(logits(model), logits(plain(file, dtype, **own_sizes)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in TEXTS:
        assert model.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert model.tokenizer.chat_template == tokenizer.chat_template
    assert model.generation_config.eos_token_id == 2


def assert_weights_are_those_of_transformers(model: Any, theirs: Any) -> None:
    """Of `A_log` up to the last bit: a logarithm that torch computes there, and numpy here."""
    weights = model.state_dict()
    for name, expected in theirs.state_dict().items():
        if name.endswith("A_log"):
            torch.testing.assert_close(weights[name], expected, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(weights[name], expected), name


@pytest.mark.bits
@pytest.mark.parametrize(
    ("family", "grouped"), [("lfm2", True), *itertools.product(("qwen35", "qwen35moe"), (True, False))]
)
def test_model_converted_by_llama_cpp_equals_the_original(family: str, grouped: bool, tmp_path: Path) -> None:
    """Heads in another order, convolutions of one dimension less, norms plus one, negative exponentials."""
    converted = write_converted(tmp_path / "model.gguf", family, grouped=grouped)
    model = rabbitllm.AutoModel.from_pretrained(tmp_path / "model.gguf", device="cpu", exact=True)
    torch.testing.assert_close(logits(model), logits(converted), rtol=0, atol=1e-4)
    assert_weights_are_those_of_transformers(model, plain(tmp_path / "model.gguf"))


@pytest.mark.bits
@pytest.mark.parametrize("types", ["Q8_0", "F16"])
@pytest.mark.parametrize("family", sorted(CONVERTED))
def test_blocks_of_tensors_in_another_order_are_kept(family: str, types: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_converted(file, family, types)
    cpu: dict[str, Any] = {"device": "cpu", "exact": True, "dtype": torch.float32}
    model = rabbitllm.AutoModel.from_pretrained(file, **cpu)
    assert_weights_are_those_of_transformers(model, plain(file))  # of float16 files too: vectors are float32
    stored = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert stored < 1.1 * file.stat().st_size
    in_turns = rabbitllm.AutoModel.from_pretrained(file, max_memory={"cpu": 0}, sequential_shard_processing=True, **cpu)
    assert torch.equal(logits(in_turns), logits(model))


@pytest.mark.bits
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_bits_without_a_split_equal_those_of_a_split(
    family: str, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a Llama the rows of queries and keys are in another order in the file, of a Gemma norms have other values."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "source").mkdir()
    file = write_gguf(tmp_path / "source" / "model.gguf", family, files=files)
    before = contents(tmp_path / "source")
    whole = rabbitllm.AutoModel.from_pretrained(file, device="cpu", layer_shards_saving_path=tmp_path / "split")
    expected = logits(whole)
    whole.save_pretrained(tmp_path / "saved of split")
    for room in ("1GiB", 0):
        model = rabbitllm.AutoModel.from_pretrained(file, device="cpu", split=False, max_memory={"cpu": room})
        assert model.placement.is_resident == (room != 0)
        assert torch.equal(logits(model), expected)
        assert model.tokenizer(TEXTS[0])["input_ids"] == whole.tokenizer(TEXTS[0])["input_ids"]
    model.save_pretrained(tmp_path / "saved")
    saved, of_split = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "saved of split"))
    assert saved.keys() == of_split.keys()
    assert all(torch.equal(saved[name], value) for name, value in of_split.items())
    assert contents(tmp_path / "source") == before
    assert list((tmp_path / "scratch").iterdir())
    del model
    gc.collect()
    assert not list((tmp_path / "scratch").iterdir())


def test_a_mixture_without_a_split_is_freed(tmp_path: Path) -> None:
    """Of its experts, one matrix is a copy in memory, the other one in the file."""
    file = write_gguf(tmp_path / "model.gguf", "qwen3moe")
    model = rabbitllm.AutoModel.from_pretrained(file, device="cpu", split=False)
    logits(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_repository_without_a_split(tmp_path: Path, hub_environment: HubEnvironment) -> None:
    (tmp_path / "hub" / "acme/tiny").mkdir(parents=True)
    file = write_gguf(tmp_path / "hub" / "acme/tiny" / "tiny-Q4_K_M.gguf")
    model = rabbitllm.AutoModel.from_pretrained("acme/tiny:q4_k_m", device="cpu", split=False, max_memory={"cpu": 0})
    expected = logits(rabbitllm.AutoModel.from_pretrained(file, device="cpu"))
    assert torch.equal(logits(model), expected)
    assert list(hub_environment.cache.rglob("*.gguf"))
    assert not list(hub_environment.home.rglob("split*"))


@pytest.mark.parametrize("options", [{"split": False}, {}])
def test_cached_repository_without_the_hub(
    tmp_path: Path, hub_environment: HubEnvironment, local_hub: LocalHub, options: dict[str, Any]
) -> None:
    for name in ("Q4_K_M/tiny", "Q8_0/tiny"):
        (tmp_path / "hub" / "acme/tiny" / name).parent.mkdir(parents=True, exist_ok=True)
        write_gguf(tmp_path / "hub" / "acme/tiny" / f"{name}.gguf", files=3, seed=len(name))
    load_options = {"device": "cpu", "max_memory": {"cpu": 0}, **options}
    expected = logits(rabbitllm.AutoModel.from_pretrained("acme/tiny:q4_k_m", **load_options))
    local_hub.stop()
    for name in ("acme/tiny:q4_k_m", "acme/tiny"):
        again = rabbitllm.AutoModel.from_pretrained(name, local_files_only=True, **load_options)
        assert torch.equal(logits(again), expected)
    with pytest.raises(CheckpointNotFoundError, match="0 of them match 'Q8_0'"):
        rabbitllm.AutoModel.from_pretrained("acme/tiny:q8_0", local_files_only=True, **load_options)


@pytest.mark.parametrize("sentencepiece", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokenizer_equals_transformers_own_class(family: str, sentencepiece: bool, tmp_path: Path) -> None:
    """Which `AutoTokenizer` takes a minute to find for a large vocabulary."""
    file = write_gguf(tmp_path / "model.gguf", family, sentencepiece=sentencepiece)
    ours = json.loads(LocalCheckpoint(tmp_path, entry=file.name).derived()["tokenizer.json"])
    transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name).save_pretrained(tmp_path / "theirs")
    theirs = json.loads((tmp_path / "theirs" / "tokenizer.json").read_bytes())
    for content in (ours, theirs):  # the classes add tokens that the file does not have
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < VOCABULARY]
    assert ours == theirs


def tokenizer_of(file: Path) -> Tokenizer:
    """The tokenizer made from a file; else that in its folder."""
    derived = LocalCheckpoint(file.parent, entry=file.name).derived()
    content = derived.get("tokenizer.json") or (file.parent / "tokenizer.json").read_bytes()
    return Tokenizer.from_str(content.decode())


def split_by(file: Path, pre: str) -> Path:
    return write_gguf(file, changed=lambda writer: setattr(writer.kv_data[0]["tokenizer.ggml.pre"], "value", pre))


def test_digits_are_split_as_in_llama_cpp(tmp_path: Path) -> None:
    """As the tokenizer.json of SmolLM2 says: spaces and line ends before a digit are then one piece."""
    gpt2, smollm = (tokenizer_of(split_by(tmp_path / f"{pre}.gguf", pre)) for pre in ("gpt-2", "smollm"))
    assert isinstance(gpt2.pre_tokenizer, pre_tokenizers.ByteLevel)
    splitting = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in ("x = 5\n 6\t7", "3.14159  22"):
        assert smollm.pre_tokenizer.pre_tokenize_str(text) == splitting.pre_tokenize_str(text)
        assert smollm.pre_tokenizer.pre_tokenize_str(text) != gpt2.pre_tokenizer.pre_tokenize_str(text)


def test_unknown_pre_tokenizer_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = split_by(tmp_path / "unknown.gguf", "zebra")
    guessed = tokenizer_of(file)
    assert "does not recognise this vocabulary's pre-tokenizer ('zebra')" in caplog.text
    tokenizer = Tokenizer.from_str(guessed.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_of(file).to_str() == tokenizer.to_str()


@pytest.mark.bits
@pytest.mark.parametrize(("types", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_file_without_blocks_keeps_its_dtype(types: str, dtype: torch.dtype, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", "gemma3", types=types)
    model = rabbitllm.AutoModel.from_pretrained(file, device="cpu")
    assert model.dtype is dtype
    assert torch.equal(logits(model), logits(plain(file, dtype)))


@pytest.mark.skipif(sys.platform != "linux", reason="smaps is Linux's")
@pytest.mark.parametrize("is_split", [True, False])
def test_experts_between_mapped_weights_are_not_read_ahead(
    is_split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pages would evict those of the weights, which half of the memory cannot hold: 408 MB were read a token.

    Once the weights are read, their use counts: as pages that are read at random they were evicted first.
    """
    file = write_gguf(tmp_path / "model.gguf", "qwen3moe", types="Q4_K")
    named = split(file, sequential=False) if is_split else file
    before = list[bool]()

    def mapped(memory: memoryview, begin: int, end: int) -> None:
        before.append("rr" in flags_of(np.frombuffer(memory, np.uint8).ctypes.data + begin))
        map_now(memory, begin, end)

    monkeypatch.setattr(_first_use, "map_now", mapped)
    expected = None
    for memory, flag in (("1GB", False), ("1.2MB", True)):
        before.clear()
        model = rabbitllm.AutoModel.from_pretrained(named, "cpu", split=is_split, max_memory={"cpu": memory})
        assert bool(model.placement.pools) == flag
        for thread in [each for each in threading.enumerate() if each.name == "read-ahead"]:
            thread.join(600)
        assert before[0] == flag
        weight = model.model.layers[1].self_attn.q_proj.weight
        assert "rr" not in flags_of(weight.matrix.payload.data_ptr())
        expected = logits(model) if expected is None else expected
        assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_blocks_are_stored_unchanged_and_equal_transformers_weights(family: str, tmp_path: Path) -> None:
    """The rows of a Llama's queries and keys are in another order in the file; experts are one tensor there."""
    file = write_gguf(tmp_path / "model.gguf", family)
    directory = split(file, sequential=False)
    store = LayerStore(directory)
    forms = {name: tensor.quantized.scheme for name, tensor in store.tensors.items() if tensor.quantized}
    assert set(forms.values()) >= {"Q4_K", "Q6_K"}
    assert all(scheme in BLOCK_TYPES for scheme in forms.values())
    assert any(".q_proj." in name for name in forms)
    assert sum(store.tensors[name].nbytes for name in forms) < file.stat().st_size
    assert not verify(directory).damaged
    own_sizes = {"config": transformers.AutoConfig.from_pretrained(directory)} if family in NARROW else {}
    theirs = plain(file, **own_sizes).state_dict()
    with contextlib.closing(PlainReader(store)) as reader:
        for name in forms.keys() & theirs.keys():
            assert torch.equal(reader.read(store.tensors[name], torch.float32), theirs[name]), name


def test_every_route_makes_the_same_layer_files(
    local_hub: LocalHub, hub_environment: HubEnvironment, tmp_path: Path
) -> None:
    """With kept and with deleted sources, with three files, and streamed from a hub."""
    splits = []
    for index, files in enumerate((1, 1, 3)):
        (tmp_path / str(index)).mkdir()
        file = write_gguf(tmp_path / str(index) / "model.gguf", "llama", files=files)
        splits.append(layers_of(split(file, sequential=index > 0)))
    repository = tmp_path / "hub" / "acme" / "blocks"
    repository.mkdir(parents=True)
    write_gguf(repository / "model.gguf", "llama")
    splits.append(layers_of(split("acme/blocks", tmp_path / "out", shard_transfer="stream")))
    assert splits[0]
    assert all(files_of_split == splits[0] for files_of_split in splits[1:])


def layers_of(directory: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(directory).items() if name.endswith(".safetensors")}


def test_8bit_compresses_tensors_of_blocks(tmp_path: Path) -> None:
    """At 8bit nothing but tensors that compression leaves alone is stored as blocks."""
    file = write_gguf(tmp_path / "model.gguf", "llama")
    store = LayerStore(split(file, compression="8bit"))
    assert {tensor.quantized.scheme for tensor in store.tensors.values() if tensor.quantized} == {"8bit"}


@pytest.mark.skipif(not _vectors.lanes(), reason="no vectors of a kind that is used here")
def test_logits_from_codes_are_as_close_as_transformers(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", "llama", types="Q8_0")
    model = rabbitllm.AutoModel.from_pretrained(file, device="cpu", dtype="bfloat16")
    assert any(isinstance(weight, QuantizedWeight) for weight in model.model.layers[0].self_attn.parameters())
    exact = plain(file, torch.float32).double()
    assert_as_near(logits(model), logits(plain(file, torch.bfloat16)), logits(exact))


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", changed=lambda writer: setattr(writer, "arch", "llama"))
    data = file.read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0zebra")
    file.write_bytes(data)
    with pytest.raises(UnknownArchitectureError, match=r"cannot read model\.gguf, of architecture 'zebra'"):
        rabbitllm.AutoModel.from_pretrained(file, device="cpu", sequential_shard_processing=True)
    assert file.read_bytes() == data


def test_wrong_shapes_are_refused_before_deletion(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", "qwen3", changed=with_eight_heads)
    size = file.stat().st_size
    with pytest.raises(IncompleteCheckpointError, match=r"self_attn\.[qo]_proj\.weight has shape"):
        rabbitllm.AutoModel.from_pretrained(file, device="cpu", sequential_shard_processing=True)
    assert file.stat().st_size == size


def with_eight_heads(writer: Any) -> None:
    writer.kv_data[0]["qwen3.attention.head_count"].value = 8
