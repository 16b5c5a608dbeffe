"""The names of RabbitLLM 1.1 mean what they meant."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import rabbitllm
from rabbitllm import (
    AutoModel,
    NotEnoughSpaceException,
    RabbitLLMBaseModel,
    RabbitLLMLlama2,
    compress_layer_state_dict,
    rabbitllm_1_names,
    split_and_save_layers,
    uncompress_layer_state_dict,
)
from rabbitllm.errors import MissingShardError, OptionError, RabbitLLMError
from tests.support.builders import build_checkpoint, reference_logits
from tests.support.hub_fixtures import HubEnvironment
from tests.support.tiny_models import INPUT, assert_same, load, run, split
from tests.support.tiny_models import one_thread as one_thread

CLASSES = (
    "RabbitLLMBaseModel",
    "RabbitLLMBaichuan",
    "RabbitLLMChatGLM",
    "RabbitLLMInternLM",
    "RabbitLLMLlama2",
    "RabbitLLMMistral",
    "RabbitLLMMixtral",
    "RabbitLLMQWen",
    "RabbitLLMQWen2",
    "RabbitLLMQWen3",
)
FUNCTIONS = ("compress_layer_state_dict", "split_and_save_layers", "uncompress_layer_state_dict")
POSITIONAL = [
    "device",
    "dtype",
    "max_seq_len",
    "layer_shards_saving_path",
    "profiling_mode",
    "compression",
    "token",
    "hf_token",
    "prefetching",
    "prefetch_pin_memory",
    "delete_original",
    "attn_implementation",
    "persister",
    "show_layer_progress",
    "cache_layers",
    "use_gds",
    "kv_cache_dir",
    "offload_small_layers",
    "offload_small_layers_use_cpu_cache",
]
"""The constructor's arguments in RabbitLLM 1.1.0, after the path."""
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "model", "llama", shards=3)


@pytest.mark.parametrize("name", [*CLASSES, *FUNCTIONS, "AutoModel", "NotEnoughSpaceException"])
def test_names_are_importable(name: str) -> None:
    assert name in rabbitllm.__all__
    assert name in dir(rabbitllm)
    value = getattr(importlib.import_module("rabbitllm"), name)
    assert value is RabbitLLMBaseModel if name in CLASSES else value.__name__ == name
    assert value.__doc__


@pytest.mark.parametrize("name", CLASSES)
def test_constructing_any_class_gives_the_model(checkpoint: Path, name: str) -> None:
    model = getattr(rabbitllm, name)(str(checkpoint), device="cpu", max_memory={"cpu": 0}, show_layer_progress=False)
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert model.tokenizer is not None
    assert_same(run(model), reference_logits(checkpoint, INPUT, torch.float32))


def test_the_path_by_its_old_name(checkpoint: Path) -> None:
    model = RabbitLLMLlama2(model_local_path_or_repo_id=checkpoint, device="cpu", show_layer_progress=False)
    assert isinstance(model, transformers.PreTrainedModel)


def test_arguments_in_the_old_order(
    tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: dict[str, Any] = {}

    def note(path: Any, *by_position: Any, **arguments: Any) -> str:
        recorded.update(zip(POSITIONAL, by_position, strict=False), **arguments)
        return f"model of {path}"

    monkeypatch.setattr(AutoModel, "from_pretrained", note)
    values = [f"value {index}" for index in range(len(POSITIONAL))]
    model: Any = RabbitLLMLlama2("here", *values)
    assert model == "model of here"
    assert recorded == dict(zip(POSITIONAL, values, strict=True))


def test_arguments_in_the_old_order_load_a_model(tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "layers"
    model: Any = RabbitLLMLlama2(checkpoint, "cpu", torch.bfloat16, 512, str(folder), False, "8bit", cache_layers=1)
    assert model.dtype == torch.bfloat16
    assert (folder / "splitted_model.8bit" / "split.json").exists()


def test_too_many_arguments_or_one_twice(checkpoint: Path) -> None:
    with pytest.raises(TypeError, match="positional arguments"):
        RabbitLLMLlama2(checkpoint, *[None] * 20)
    with pytest.raises(TypeError, match="multiple values for argument 'device'"):
        RabbitLLMLlama2(checkpoint, "cpu", device="cuda:0")
    with pytest.raises(TypeError, match="Did you mean 'device'"):
        RabbitLLMLlama2(checkpoint, devise="cpu")


# split_and_save_layers


def test_the_signature_of_split_and_save_layers() -> None:
    parameters = inspect.signature(split_and_save_layers).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "checkpoint_path": inspect.Parameter.empty,
        "layer_shards_saving_path": None,
        "splitted_model_dir_name": "splitted_model",
        "compression": None,
        "layer_names": None,
        "delete_original": False,
        "repo_id": None,
        "token": None,
        "hf_token": None,
        "sequential_shard_processing": False,
    }


def layer_names(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(".safetensors") for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
def test_split_and_save_layers(checkpoint: Path, compression: str | None) -> None:
    where = split_and_save_layers(checkpoint, compression=compression)
    assert isinstance(where, str)
    assert Path(where) == checkpoint / ("splitted_model" if compression is None else f"splitted_model.{compression}")
    assert layer_names(Path(where)) == [
        "lm_head",
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.layers.2",
        "model.norm",
    ]
    assert all(Path(where, f"{name}.safetensors.done").exists() for name in layer_names(Path(where)))
    assert split_and_save_layers(checkpoint, compression=compression) == where
    expected = run(AutoModel.from_pretrained(checkpoint, device="cpu", compression=compression, exact=True))
    assert_same(run(load(Path(where), 0)), expected)


def test_a_wrong_folder_is_named_by_its_argument(checkpoint: Path) -> None:
    with pytest.raises(OptionError, match="layer_shards_saving_path is 5; expected a path"):
        split_and_save_layers(checkpoint, 5)  # type: ignore[arg-type]


def test_a_gpu_does_not_change_the_bits_of_layer_files(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes quantizes otherwise there. It is imported before it could see the GPU that is none."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    where = Path(split_and_save_layers(checkpoint, compression="4bit"))
    assert " on cpu" in json.dumps(json.loads((where / "split.json").read_text()))


def test_another_name_and_place(tmp_path: Path, checkpoint: Path) -> None:
    where = split_and_save_layers(str(checkpoint), tmp_path / "place", "mine", compression="8bit")
    assert Path(where) == tmp_path / "place" / "mine.8bit"
    assert not (checkpoint / "splitted_model.8bit").exists()


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("delete_original", [False, True])
def test_original_is_kept_or_deleted(checkpoint: Path, sequential: bool, delete_original: bool) -> None:
    expected = reference_logits(checkpoint, INPUT, torch.float32)
    where = split_and_save_layers(checkpoint, delete_original=delete_original, sequential_shard_processing=sequential)
    assert len(list(checkpoint.glob("model-*.safetensors"))) == (0 if sequential or delete_original else 3)
    assert_same(run(load(Path(where))), expected)


def test_the_old_table_of_layer_names(checkpoint: Path) -> None:
    table = {
        "embed": "model.embed_tokens",
        "layer_prefix": "model.layers",
        "norm": "model.norm",
        "lm_head": "lm_head",
    }
    by_table = split_and_save_layers(checkpoint, splitted_model_dir_name="table", layer_names=table)
    by_family = split_and_save_layers(checkpoint)
    assert layer_names(Path(by_table)) == layer_names(Path(by_family))
    for name in layer_names(Path(by_family)):
        assert (
            load_file(Path(by_table, f"{name}.safetensors")).keys()
            == load_file(Path(by_family, f"{name}.safetensors")).keys()
        )


def test_a_table_for_a_model_of_other_names(tmp_path: Path) -> None:
    """ChatGLM's, as RabbitLLM has it: without it these names would fall to the general rule."""
    from tests.support.builders import write_shards

    folder = write_shards(
        tmp_path,
        {
            "model.safetensors": {
                "transformer.embedding.word_embeddings.weight": torch.ones(8, 4),
                "transformer.encoder.layers.0.mlp.weight": torch.ones(4, 4),
                "transformer.encoder.layers.1.mlp.weight": torch.ones(4, 4),
                "transformer.encoder.final_layernorm.weight": torch.ones(4),
                "transformer.output_layer.weight": torch.ones(8, 4),
            }
        },
        "chatglm",
        index=False,
    )
    table = {
        "embed": "transformer.embedding.word_embeddings",
        "layer_prefix": "transformer.encoder.layers",
        "norm": "transformer.encoder.final_layernorm",
        "lm_head": "transformer.output_layer",
    }
    where = Path(split_and_save_layers(folder, layer_names=table))
    assert len(layer_names(where)) == 5
    content = {tuple(load_file(where / f"{name}.safetensors")) for name in layer_names(where)}
    assert content == {
        ("transformer.embedding.word_embeddings.weight",),
        ("transformer.encoder.layers.0.mlp.weight",),
        ("transformer.encoder.layers.1.mlp.weight",),
        ("transformer.encoder.final_layernorm.weight",),
        ("transformer.output_layer.weight",),
    }


def test_a_missing_shard_is_fetched_from_its_repository(
    tmp_path: Path, checkpoint: Path, hub_environment: HubEnvironment
) -> None:
    shutil.copytree(checkpoint, tmp_path / "hub" / "acme" / "tiny")
    expected = reference_logits(checkpoint, INPUT, torch.float32)
    missing = checkpoint / "model-00002-of-00003.safetensors"
    missing.unlink()
    with pytest.raises(MissingShardError, match=missing.name):
        split_and_save_layers(checkpoint)
    where = split_and_save_layers(checkpoint, repo_id="acme/tiny")
    assert_same(run(load(Path(where))), expected)


def test_a_compression_that_does_not_exist(checkpoint: Path) -> None:
    with pytest.raises(OptionError, match="compression='2bit' does not exist"):
        split_and_save_layers(checkpoint, compression="2bit")
    with pytest.raises(OptionError, match="compression='2bit' does not exist"):
        compress_layer_state_dict({}, "2bit")


def test_not_enough_space_is_the_exception_to_catch(checkpoint: Path) -> None:
    assert issubclass(NotEnoughSpaceException, RabbitLLMError)
    with pytest.raises(NotEnoughSpaceException) as caught:
        RabbitLLMBaseModel(checkpoint, device="cpu", max_disk=1000)
    assert "allowed by max_disk=1,000" in caught.value.problem
    assert len(list(checkpoint.glob("model-*.safetensors"))) == 3


# compress and uncompress


def layer(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.layers.0.mlp.up_proj.weight": torch.randn((96, 128), generator=generator).to(dtype),
        "model.layers.0.self_attn.q_proj.weight": torch.randn((64, 66), generator=generator).to(dtype),
        "model.layers.0.self_attn.k_proj.weight": torch.randn((63, 65), generator=generator).to(dtype),
        "model.layers.0.input_layernorm.weight": torch.randn((128,), generator=generator).to(dtype),
        "model.layers.0.small.weight": torch.randn((4, 4), generator=generator).to(dtype),
        "model.layers.0.steps": torch.arange(3),
    }


def test_none_and_plain_return_the_very_dict() -> None:
    plain = layer(torch.float16)
    assert compress_layer_state_dict(plain, None) is plain
    assert compress_layer_state_dict(plain) is plain
    assert uncompress_layer_state_dict(plain) is plain
    empty: dict[str, torch.Tensor] = {}
    assert uncompress_layer_state_dict(empty) is empty


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compression", ["4bit", "8bit"])
def test_compression_round_trips(compression: str, dtype: torch.dtype) -> None:
    from bitsandbytes import functional

    plain = layer(dtype)
    stored = compress_layer_state_dict(plain, compression)
    assert uncompress_layer_state_dict(stored) is not stored
    restored = uncompress_layer_state_dict(stored)
    assert restored.keys() == plain.keys()
    for name, tensor in plain.items():
        if tensor.numel() < 4096:
            assert torch.equal(restored[name], tensor)
            continue
        assert restored[name].shape == tensor.shape
        assert restored[name].dtype == (dtype if compression == "4bit" else torch.float16)
        # what bitsandbytes itself makes of it
        if compression == "4bit":
            codes, state = functional.quantize_4bit(tensor, blocksize=64, quant_type="nf4")
            state.shape = torch.Size([tensor.numel()])  # its kernel for the CPU begins a block with each row
            expected = functional.dequantize_4bit(codes, state)
        else:
            codes, state = functional.quantize_blockwise(tensor, blocksize=2048)
            state.dtype = torch.float16
            expected = functional.dequantize_blockwise(codes, state)
        assert torch.equal(restored[name], expected.view(tensor.shape))
        error = (restored[name].float() - tensor.float()).pow(2).mean().sqrt()
        assert 0 < error < 0.12
    assert sum(tensor.nbytes for tensor in stored.values()) < 0.7 * sum(tensor.nbytes for tensor in plain.values())


@pytest.mark.parametrize("compression", ["4bit", "8bit"])
def test_the_keys_are_those_of_a_layer_file(tmp_path: Path, compression: str) -> None:
    folder = build_checkpoint(tmp_path, "llama")
    directory = split(folder, compression)
    plain = load_file(folder / "model.safetensors")
    of_layer = {name: tensor for name, tensor in plain.items() if ".layers.1." in name}
    stored = compress_layer_state_dict(of_layer, compression)
    expected = load_file(directory / "model.layers.1.safetensors")
    assert stored.keys() == expected.keys()
    for key in expected:
        assert stored[key].dtype == expected[key].dtype
        assert torch.equal(stored[key], expected[key]), key
    restored = uncompress_layer_state_dict(expected)
    assert restored.keys() == of_layer.keys()


@pytest.mark.parametrize("compression", ["4bit", "8bit"])
def test_layer_files_of_rabbitllm_1_1_uncompress(compression: str) -> None:
    index = json.loads((GOLDEN / "model-2-shards" / "model.safetensors.index.json").read_text())
    original: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        original |= load_file(GOLDEN / "model-2-shards" / file)
    restored: dict[str, torch.Tensor] = {}
    for path in (GOLDEN / f"rabbitllm-1.1.0-{compression}").rglob("*.safetensors"):
        restored |= uncompress_layer_state_dict(load_file(path))
    assert restored.keys() == original.keys()
    for name, tensor in original.items():
        assert restored[name].shape == tensor.shape
        assert (restored[name].float() - tensor.float()).abs().max() <= 0.2 * tensor.float().abs().max()


def test_a_compressed_dict_without_a_part_is_refused() -> None:
    stored = compress_layer_state_dict(layer(torch.float16), "4bit")
    del stored["model.layers.0.mlp.up_proj.weight.4bit.absmax"]
    with pytest.raises(
        RabbitLLMError, match=r"without its part 'model\.layers\.0\.mlp\.up_proj\.weight\.4bit\.absmax'"
    ):
        uncompress_layer_state_dict(stored)


def test_non_contiguous_tensor() -> None:
    tensor = torch.randn(128, 96).t()
    for compression in ("4bit", "8bit"):
        first = compress_layer_state_dict({"a.weight": tensor}, compression)
        second = compress_layer_state_dict({"a.weight": tensor.contiguous()}, compression)
        assert all(torch.equal(first[key], second[key]) for key in second)


def test_classes_warn_too(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rabbitllm"):
        rabbitllm_1_names.RabbitLLMQWen2(checkpoint, "cpu", None, 2048)
    assert any("max_seq_len has no effect" in record.getMessage() for record in caplog.records)
