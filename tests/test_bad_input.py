"""Bad input at the front door: each message says what was found, what was expected, and what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rabbitllm import AutoModel
from rabbitllm.checkpoints.config import LEFTOVER
from rabbitllm.engine._published import DEQUANTIZED, KEPT
from rabbitllm.errors import (
    CheckpointNotFoundError,
    CorruptShardError,
    DeviceError,
    GatedRepositoryError,
    HubError,
    MissingShardError,
    OptionError,
    RabbitLLMError,
    SplitMismatchError,
    UnknownArchitectureError,
    UnsafePathError,
)
from tests.support.builders import INDEX_NAME, build_checkpoint
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.tiny_models import INPUT
from tests.support.tiny_models import one_thread as one_thread

SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "model", "llama", shards=3)


def refused(error: type[RabbitLLMError], source: Any, **options: Any) -> RabbitLLMError:
    """The error of a call that may delete shards; only that kind, and with something to do."""
    arguments = {"device": "cpu", "sequential_shard_processing": True, "delete_original": True} | options
    with pytest.raises(error) as caught:
        AutoModel.from_pretrained(source, **arguments)
    assert caught.value.remedy
    assert str(caught.value) == f"{caught.value.problem}\n  What to do: {caught.value.remedy}"
    return caught.value


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nothing", "a/b/c", "two words", "org/na..me"])
def test_no_such_folder(name: str) -> None:
    error = refused(CheckpointNotFoundError, name)
    assert error.problem == f"There is no folder {name!r}, and it is not a repository id."
    assert "organisation/name" in error.remedy
    assert isinstance(error, FileNotFoundError)


def test_a_file_is_the_checkpoint_of_its_folder_or_nothing(tmp_path: Path) -> None:
    other, damaged = tmp_path / "notes.txt", tmp_path / "model.safetensors"
    other.write_bytes(b"x")
    assert str(tmp_path) in refused(CheckpointNotFoundError, other).problem
    damaged.write_bytes(b"x")
    problem = refused(CorruptShardError, damaged).problem
    assert str(tmp_path) in problem
    assert damaged.name in problem
    assert f"{other} does not belong to the checkpoint" in refused(CheckpointNotFoundError, other).problem


def test_no_such_repository(hub_environment: HubEnvironment) -> None:
    error = refused(CheckpointNotFoundError, "acme/nothing")
    assert "no folder 'acme/nothing' here and no repository 'acme/nothing' on the hub" in error.problem
    assert "token=" in error.remedy


def test_no_such_revision(tmp_path: Path, hub_environment: HubEnvironment) -> None:
    build_checkpoint(tmp_path / "hub" / "acme" / "tiny", "llama")
    assert "acme/tiny has no such revision" in refused(HubError, "acme/tiny", revision="v9").problem


OTHERS = ("exl2", "exl3", "marlin", "tpu_int8", "qoq", "ipex", "rtn", "petit_nvfp4", "moe_wna16", "deepspeedfp")
"""Names of quantization methods that other libraries have."""


def test_a_quantization_that_is_not_supported_is_named_before_anything_is_fetched(
    tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment
) -> None:
    """All methods that transformers names but those in the table, and others."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    known = {*KEPT, *DEQUANTIZED, LEFTOVER, "bitsandbytes_4bit", "bitsandbytes_8bit"}
    methods = sorted({*AUTO_QUANTIZER_MAPPING, *OTHERS} - known)
    assert len(methods) > 24
    folder = build_checkpoint(tmp_path / "hub" / "acme" / "tiny", "llama", shards=3)
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    before = weights(copy)
    for number, method in enumerate(methods):
        change(copy / "config.json", quantization_config={"quant_method": method})
        assert f"are already quantized ({method})" in refused(UnknownArchitectureError, copy).problem
        change(folder / "config.json", quantization_config={"quant_method": method})
        local_hub.add_revision("acme/tiny", f"v{number}", folder)
        error = refused(UnknownArchitectureError, "acme/tiny", revision=f"v{number}")
        assert f"are already quantized ({method})" in error.problem
    assert weights(copy) == before
    assert local_hub.body_bytes(".safetensors") == 0


def test_settings_of_modelopt_are_fetched_before_the_weights(
    tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment
) -> None:
    folder = build_checkpoint(tmp_path / "hub" / "acme" / "tiny", "llama", shards=3)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4_AWQ"}}')
    assert "NVFP4_AWQ" in refused(UnknownArchitectureError, "acme/tiny").problem
    assert local_hub.body_bytes(".safetensors") == 0


@pytest.mark.parametrize("has_config", [False, True])
def test_a_folder_with_no_checkpoint(tmp_path: Path, has_config: bool) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if has_config:
        (folder / "config.json").write_text('{"model_type": "llama"}')
    error = refused(CheckpointNotFoundError, folder)
    assert f"{folder} holds no checkpoint" in error.problem
    assert "looked for model.safetensors, model.safetensors.index.json, pytorch_model.bin, " in error.problem


def test_a_repository_with_no_checkpoint(tmp_path: Path, hub_environment: HubEnvironment) -> None:
    folder = build_checkpoint(tmp_path / "hub" / "acme" / "tiny", "llama")
    (folder / "model.safetensors").rename(folder / "model.onnx")
    error = refused(CheckpointNotFoundError, "acme/tiny")
    assert "looked for model.safetensors, model.safetensors.index.json, pytorch_model.bin, " in error.problem


def test_weights_without_a_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    before = weights(checkpoint)
    assert f"{checkpoint} has no config.json" in refused(UnknownArchitectureError, checkpoint).problem
    assert weights(checkpoint) == before


def test_a_shard_that_is_missing(checkpoint: Path) -> None:
    (checkpoint / SHARD).unlink()
    before = weights(checkpoint)
    error = refused(MissingShardError, checkpoint)
    assert "lacks 1 of the shards in its index" in error.problem
    assert SHARD in error.problem
    assert weights(checkpoint) == before


@pytest.mark.parametrize("where", ["../outside.safetensors", "sub/../../outside.safetensors", "{absolute}", "C:\\x"])
def test_an_index_that_points_outside(tmp_path: Path, checkpoint: Path, where: str) -> None:
    outside = tmp_path / "outside.safetensors"
    shutil.copy(checkpoint / SHARD, outside)
    where = where.format(absolute=outside)
    index = json.loads((checkpoint / INDEX_NAME).read_text())
    index["weight_map"] = {name: where if shard == SHARD else shard for name, shard in index["weight_map"].items()}
    (checkpoint / INDEX_NAME).write_text(json.dumps(index))
    before, kept = weights(checkpoint), outside.read_bytes()
    error = refused(UnsafePathError, checkpoint)
    assert repr(where) in error.problem
    assert weights(checkpoint) == before
    assert outside.read_bytes() == kept


def test_a_shard_that_is_a_link_to_outside(tmp_path: Path, checkpoint: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    (checkpoint / SHARD).rename(outside)
    try:
        (checkpoint / SHARD).symlink_to(outside)
    except OSError:
        pytest.skip("this system makes no links")
    outside.write_bytes(b"not weights" * 1000)
    kept = outside.read_bytes()
    error = refused(UnsafePathError, checkpoint)
    assert SHARD in error.problem
    assert str(outside) in error.problem
    assert outside.read_bytes() == kept
    assert (checkpoint / SHARD).is_symlink()


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda data: data[:-64], "truncated"),
        (lambda data: data[:5], "safetensors"),
        (lambda data: b"\xff" * 8 + data[8:], "header"),
        (lambda data: data[:8] + b"[" + data[9:], "header"),
    ],
    ids=["cut", "cut in the length", "huge header", "no JSON"],
)
def test_a_damaged_shard(checkpoint: Path, damage: Callable[[bytes], bytes], found: str) -> None:
    whole = (checkpoint / SHARD).read_bytes()
    (checkpoint / SHARD).write_bytes(damage(whole))
    before = weights(checkpoint)
    error = refused(CorruptShardError, checkpoint)
    assert SHARD in error.problem
    assert found in error.problem
    assert "undamaged copy at that path" in error.remedy
    assert weights(checkpoint) == before
    (checkpoint / SHARD).write_bytes(whole)
    model = AutoModel.from_pretrained(checkpoint, device="cpu", sequential_shard_processing=True)
    assert model(INPUT).logits.isfinite().all()


def test_a_compression_that_does_not_exist(checkpoint: Path) -> None:
    error = refused(OptionError, checkpoint, compression="3bit")
    assert error.problem.startswith("compression='3bit' does not exist; expected 'auto', '4bit', '4bit-double', '8bit'")
    assert isinstance(error, ValueError)
    assert not list(checkpoint.glob("splitted_model*"))


def test_a_gpu_that_does_not_exist(checkpoint: Path) -> None:
    before = weights(checkpoint)
    error = refused(DeviceError, checkpoint, device="cuda:7")
    assert error.problem.startswith("device='cuda:7' does not exist: this machine has ")
    assert "device='cpu'" in error.remedy
    assert weights(checkpoint) == before
    assert not list(checkpoint.glob("splitted_model*"))


@pytest.mark.parametrize(
    ("name", "value"), [("max_disk", "lots"), ("max_disk", -1), ("max_memory", {"cpu": "3 parsecs"})]
)
def test_a_size_that_is_none(checkpoint: Path, name: str, value: Any) -> None:
    error = refused(OptionError, checkpoint, **{name: value})
    assert name in error.problem
    assert "is not a size" in error.problem
    assert "'50GB'" in error.remedy


WITHOUT_BITSANDBYTES = """
import sys

sys.modules["bitsandbytes"] = None
import torch
from rabbitllm import AutoModel
from rabbitllm.errors import MissingPackageError

torch.set_num_threads(1)
folder, compressed = sys.argv[1:]
for options in ({"compression": "4bit"}, {"compression": "8bit", "sequential_shard_processing": True}):
    try:
        AutoModel.from_pretrained(folder, device="cpu", **options)
    except MissingPackageError as error:
        assert isinstance(error, ImportError)
        print(error)
for loaded, room in ((compressed, 0), (compressed, "1GiB"), (folder, "1GiB")):
    model = AutoModel.from_pretrained(loaded, device="cpu", max_memory={"cpu": room})
    print(model(torch.tensor([[1, 2, 3]])).logits.isfinite().all().item())
"""


@pytest.mark.long
def test_bitsandbytes_absent(checkpoint: Path, tmp_path: Path) -> None:
    """Nothing is compressed; the CPU computes with what is."""
    AutoModel.from_pretrained(checkpoint, device="cpu", compression="4bit")
    compressed = tmp_path / "compressed"
    shutil.move(checkpoint / "splitted_model.4bit", compressed)
    before = weights(checkpoint)
    command = [sys.executable, "-c", WITHOUT_BITSANDBYTES, str(checkpoint), str(compressed)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    errors = lines[:4]
    assert lines[4:] == ["True"] * 3
    for problem, remedy in zip(errors[::2], errors[1::2], strict=True):
        assert problem.startswith("compression needs the package bitsandbytes, which cannot be imported: ")
        assert "pip install bitsandbytes" in remedy
    assert weights(checkpoint) == before


@pytest.mark.parametrize("token", [None, "hf_wrong"])
@pytest.mark.parametrize("sequential", [False, True])
def test_a_gated_repository(
    tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment, sequential: bool, token: str | None
) -> None:
    build_checkpoint(tmp_path / "hub" / "acme" / "gated", "llama", shards=2)
    local_hub.faults.gated = True
    error = refused(GatedRepositoryError, "acme/gated", token=token, sequential_shard_processing=sequential)
    assert "acme/gated is gated" in error.problem
    assert "Accept the terms at https://huggingface.co/acme/gated" in error.remedy
    assert "token=" in error.remedy
    assert local_hub.body_bytes(".safetensors") == 0


@pytest.mark.parametrize("argument", ["token", "hf_token"])
def test_a_gated_repository_with_its_token(
    tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment, argument: str
) -> None:
    build_checkpoint(tmp_path / "hub" / "acme" / "gated", "llama", shards=2)
    local_hub.token = "hf_right"
    local_hub.faults.gated = True
    model = AutoModel.from_pretrained("acme/gated", device="cpu", **{argument: "hf_right"})
    assert model(INPUT).logits.isfinite().all()


def test_a_hub_that_does_not_answer(tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment) -> None:
    build_checkpoint(tmp_path / "hub" / "acme" / "tiny", "llama")
    local_hub.stop()
    error = refused(HubError, "acme/tiny")
    assert "The hub did not answer for acme/tiny" in error.problem
    assert "There is no folder 'acme/tiny' either." in error.problem
    assert "Make the same call again" in error.remedy


def test_offline_without_anything_here(hub_environment: HubEnvironment) -> None:
    error = refused(HubError, "acme/tiny", local_files_only=True)
    assert "acme/tiny has no split here and is not in the hub cache" in error.problem
    assert "There is no folder 'acme/tiny'." in error.problem
    assert "pass local_files_only as False" in error.remedy


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "xyzzy_9", "architectures": ["XyzzyForCausalLM"]},
        {"model_type": "vit", "architectures": None},
    ],
    ids=["unknown", "no text"],
)
def test_an_architecture_that_transformers_does_not_know(checkpoint: Path, values: dict[str, object]) -> None:
    change(checkpoint / "config.json", **values)
    before = weights(checkpoint)
    error = refused(UnknownArchitectureError, checkpoint)
    assert str(values["model_type"]) in error.problem
    assert "transformers" in error.problem
    assert "pip install --upgrade transformers" in error.remedy
    assert weights(checkpoint) == before
    assert not list(checkpoint.glob("splitted_model*"))


def test_a_config_of_a_newer_transformers(checkpoint: Path) -> None:
    change(checkpoint / "config.json", model_type="xyzzy_9", transformers_version="5.90.0.dev0")
    error = refused(UnknownArchitectureError, checkpoint)
    assert "The config was written by transformers 5.90.0.dev0." in error.problem


@pytest.mark.parametrize("version", ["5.23.1", "4.0", "6", "\x1b[2J9.9", "9." * 4000, None, ["9.9"]])
def test_a_config_of_another_transformers(checkpoint: Path, version: object) -> None:
    change(checkpoint / "config.json", model_type="xyzzy_9", transformers_version=version)
    error = refused(UnknownArchitectureError, checkpoint)
    assert "was written by" not in str(error)
    assert str(error).isprintable() or "\x1b" not in str(error)


def test_an_architecture_that_transformers_does_not_know_on_the_hub(
    tmp_path: Path, local_hub: LocalHub, hub_environment: HubEnvironment
) -> None:
    folder = build_checkpoint(tmp_path / "hub" / "acme" / "tiny", "llama", shards=2)
    change(folder / "config.json", model_type="xyzzy_9", architectures=["XyzzyForCausalLM"])
    assert "xyzzy_9" in refused(UnknownArchitectureError, "acme/tiny").problem
    assert local_hub.body_bytes(".safetensors") == 0


@pytest.mark.parametrize("method", ["hqq", "higgs", "quanto"])
def test_weights_that_another_program_quantized(checkpoint: Path, method: str) -> None:
    """They would load, without their scales, and answer nonsense."""
    change(checkpoint / "config.json", quantization_config={"quant_method": method})
    before = weights(checkpoint)
    error = refused(UnknownArchitectureError, checkpoint)
    assert f"are already quantized ({method}), which is not supported" in error.problem
    assert "fp8, mxfp8, mxfp4, compressed-tensors, awq, gptq, modelopt or torchao" in error.problem
    assert "its unquantized one" in error.remedy
    assert weights(checkpoint) == before
    assert not list(checkpoint.glob("splitted_model*"))


def test_a_split_directory_at_another_compression(checkpoint: Path) -> None:
    AutoModel.from_pretrained(checkpoint, device="cpu", compression="8bit")
    error = refused(SplitMismatchError, checkpoint / "splitted_model.8bit", compression="4bit")
    assert "is a split at compression 8bit; requested was 4bit" in error.problem
    assert "Remove the compression option" in error.remedy


def test_another_model_s_split_in_the_same_place(tmp_path: Path, checkpoint: Path) -> None:
    place = tmp_path / "layers"
    AutoModel.from_pretrained(checkpoint, device="cpu", layer_shards_saving_path=place)
    other = build_checkpoint(tmp_path / "other", "llama", shards=3, seed=5)
    before = weights(other)
    error = refused(SplitMismatchError, other, layer_shards_saving_path=place)
    assert "was split from" in error.problem
    assert "layer_shards_saving_path" in error.remedy
    assert weights(other) == before


def test_layers_of_rabbitllm_1_1_by_themselves(tmp_path: Path) -> None:
    """They have no config; the checkpoint's folder is what to give."""
    golden = Path(__file__).parent / "golden" / "rabbitllm-1.1.0-none" / "splitted_model"
    folder = shutil.copytree(golden, tmp_path / "splitted_model")
    error = refused(UnknownArchitectureError, folder)
    assert f"{folder} has no config.json" in error.problem
    assert "Use the model's folder" in error.remedy
    assert "layer_shards_saving_path" in error.remedy
