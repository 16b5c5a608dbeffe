"""GGUF files are split on every route of safetensors files, into the same bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors.torch import save_file

import rabbitllm
from rabbitllm.errors import CheckpointNotFoundError, InvalidIndexError, MissingShardError, NotEnoughSpaceException
from rabbitllm.store.layer_store import verify
from tests.support.builders import SINGLE_NAME, llama_tensors, write_shards
from tests.support.commands import invoke
from tests.support.crashes import KILLED, CrashServer
from tests.support.gguf_files import CONVERTED, write_converted, write_gguf
from tests.support.hub_fixtures import HubEnvironment
from tests.support.scenes import sample
from tests.support.splitting import Call, contents, interrupted, layer_files, names_in, split, steps_of

REPO = "acme/tiny"
FILES = 3


def as_safetensors(folder: Path) -> Path:
    """The same model as transformers loads it from GGUF; tensors that the file has in float16 are in float16."""
    file = write_gguf(folder / "whole.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    (folder / "saved").mkdir()
    with rabbitllm.lazy_load(folder) as weights:
        halves = {name for name, tensor in weights.items() if tensor.dtype is torch.float16}
    tensors = {
        name: tensor.to(torch.float16 if name in halves else torch.float32).contiguous()
        for name, tensor in model.state_dict().items()
    }
    assert halves
    save_file(tensors, folder / "saved/model.safetensors")
    (folder / "saved" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder / "saved"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, dict[str, bytes]]:
    """The layer files that the same weights give as safetensors, by compression; without, those of one local file."""
    folder = tmp_path_factory.mktemp("saved")
    saved = as_safetensors(folder)
    files = {c: layer_files(split(saved, compression=c, sequential=False)) for c in ("8bit", "4bit")}
    return {**files, None: layer_files(split(folder / "whole.gguf", sequential=False))}


@pytest.mark.parametrize(("files", "compression"), [(1, None), (FILES, "8bit")])
def test_folder_is_split_and_each_file_deleted(
    tmp_path: Path, expected: dict[str | None, dict[str, bytes]], files: int, compression: str | None
) -> None:
    write_gguf(tmp_path / "model.gguf", files=files)
    folder = split(tmp_path, compression=compression)
    assert layer_files(folder) == expected[compression]
    assert not names_in(tmp_path, "*.gguf")
    assert not verify(folder).damaged


BLOB = "sha256-4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"


@pytest.mark.parametrize("name", ["M.GGUF", BLOB])
def test_file_type_is_recognized_by_its_first_bytes(
    tmp_path: Path, expected: dict[str | None, dict[str, bytes]], name: str
) -> None:
    """Ollama's files have no suffix, those of some programs one in capitals."""
    file = write_gguf(tmp_path / "m.gguf").rename(tmp_path / name)
    (tmp_path / "notes").write_bytes(b"GG")
    first = split(tmp_path, sequential=False)
    assert first.name == f"splitted_model-{name.removesuffix('.GGUF')}"
    assert layer_files(first) == expected[None]
    shutil.rmtree(first)
    folder = split(file)
    assert layer_files(folder) == expected[None]
    assert not file.exists()
    assert split(file) == folder == first  # its file is deleted


def test_file_beside_another_is_not_split_again(
    tmp_path: Path, expected: dict[str | None, dict[str, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where an earlier version split it into a directory without its name."""
    file = write_gguf(tmp_path / "a.gguf")
    folder = split(tmp_path, sequential=False)
    assert folder == split(file, sequential=False) == tmp_path / "splitted_model-a"
    second = write_gguf(tmp_path / "b.gguf", seed=1)
    inode = (folder / "split.json").stat().st_ino
    assert split(file, sequential=False) == folder
    assert (folder / "split.json").stat().st_ino == inode
    earlier = folder.rename(tmp_path / "splitted_model")
    assert split(file) == earlier
    assert split(second, sequential=False) == tmp_path / "splitted_model-b"
    assert split(file) == earlier
    assert (earlier / "split.json").stat().st_ino == inode
    second.unlink()
    shutil.rmtree(tmp_path / "splitted_model-b")
    file.unlink(missing_ok=True)
    assert split(file) == split(tmp_path) == earlier
    assert layer_files(earlier) == expected[None]


@pytest.mark.parametrize(("sequential", "delete_original"), [(True, False), (True, True), (False, True)])
def test_folder_of_used_up_weights_does_not_mean_another_file_in_it(
    tmp_path: Path, sequential: bool, delete_original: bool
) -> None:
    """The same call again was a split of that other model, and deleted its file."""
    folder = write_shards(tmp_path / "model", {SINGLE_NAME: llama_tensors()}, index=False)
    before = write_gguf(folder / "other.gguf").read_bytes()
    call = Call(str(folder), sequential=sequential, delete_original=delete_original)
    made = call.make()
    assert not (folder / SINGLE_NAME).exists()
    assert made == call.make() == folder / "splitted_model"
    assert (folder / "other.gguf").read_bytes() == before
    with pytest.raises(
        CheckpointNotFoundError, match=r"are used up; it has other\.gguf, which(?s:.)*compression=None in"
    ):
        split(folder, compression="8bit")
    assert split(folder / "other.gguf").name == "splitted_model-other"
    assert call.make() == made


def test_unfinished_folder_does_not_mean_other_weights_that_came_into_it(
    tmp_path: Path, expected: dict[str | None, dict[str, bytes]]
) -> None:
    """The same call again was a split of these, and deleted them."""
    write_gguf(tmp_path / "m.gguf", files=FILES)
    begun = interrupted(Call(str(tmp_path)))
    write_shards(tmp_path, {SINGLE_NAME: llama_tensors()}, index=False)
    assert split(tmp_path) == begun
    assert layer_files(begun) == expected[None]
    assert (tmp_path / SINGLE_NAME).exists()


def test_set_of_which_a_link_is_left_is_not_needed_again(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "model").mkdir()
    file = write_gguf(tmp_path / "model" / "m.gguf", files=FILES)
    second = file.with_name(f"m-00002-of-0000{FILES}.gguf")
    second.symlink_to(second.rename(tmp_path / "disk" / second.name))
    for name in (file, file.parent):
        for delete_original in (False, True):
            assert split(name, delete_original=delete_original).name == f"splitted_model-{file.stem}"
            assert names_in(file.parent, "*.gguf") == [second.name]


def test_unfinished_split_of_an_earlier_version_is_resumed(
    tmp_path: Path, expected: dict[str | None, dict[str, bytes]], crash_server: CrashServer
) -> None:
    file = write_gguf(tmp_path / "m.gguf", files=FILES)
    call = Call(str(file), compression="8bit")
    shutil.copytree(tmp_path, tmp_path / "copy")
    steps = steps_of(Call(str(tmp_path / "copy" / file.name), compression="8bit"))
    shutil.rmtree(tmp_path / "copy")
    assert crash_server.run(call, steps * 2 // 3) == KILLED
    (begun,) = tmp_path.glob("splitted_model-*")
    assert names_in(begun, "*.journal")
    earlier = begun.rename(tmp_path / "splitted_model.8bit")
    write_gguf(tmp_path / "other.gguf", seed=1)
    assert split(file, compression="8bit") == earlier
    assert layer_files(earlier) == expected["8bit"]


def test_blob_of_several_files(tmp_path: Path, expected: dict[str | None, dict[str, bytes]]) -> None:
    first = write_gguf(tmp_path / "a.gguf").rename(tmp_path / BLOB)
    write_gguf(tmp_path / "b.gguf", seed=1).rename(tmp_path / "sha256-5")
    with pytest.raises(CheckpointNotFoundError, match="holds no checkpoint"):
        split(tmp_path)
    folder = split(first)
    assert layer_files(folder) == expected[None]
    assert names_in(tmp_path, "sha256-*") == ["sha256-5"]
    assert split(first) == folder == tmp_path / f"splitted_model-{BLOB}"
    (folder / names_in(folder, "*.safetensors")[1]).write_bytes(b"")
    write_gguf(tmp_path / "a.gguf").rename(tmp_path / BLOB)
    invoke("verify", folder, "--repair")
    assert layer_files(folder) == expected[None]


@pytest.mark.parametrize(("files", "transfer"), [(1, "file"), (FILES, "stream")])
def test_a_repository_is_split_with_and_without_files(
    tmp_path: Path,
    hub_environment: HubEnvironment,
    expected: dict[str | None, dict[str, bytes]],
    transfer: str,
    files: int,
) -> None:
    (tmp_path / "hub" / REPO).mkdir(parents=True)
    write_gguf(tmp_path / "hub" / REPO / "tiny-Q4_K_M.gguf", files=files)
    write_gguf(tmp_path / "hub" / REPO / "tiny-Q8_0.gguf", seed=1)
    folder = split(f"{REPO}:q4_k_m", shard_transfer=transfer)
    assert layer_files(folder) == expected[None]
    assert folder.name == "splitted_model-Q4_K_M"
    assert not names_in(hub_environment.cache, "**/*.gguf")
    with pytest.raises(CheckpointNotFoundError, match=r"holds the GGUF models tiny-Q4_K_M.*tiny-Q8_0\.gguf"):
        split(REPO)
    with pytest.raises(CheckpointNotFoundError, match="0 of them match 'Q5_K_M'"):
        split(f"{REPO}:Q5_K_M")


def test_kept_shards_are_fetched_into_the_hub_cache(
    tmp_path: Path, hub_environment: HubEnvironment, expected: dict[str | None, dict[str, bytes]]
) -> None:
    (tmp_path / "hub" / REPO / "Q4_K_M").mkdir(parents=True)
    write_gguf(tmp_path / "hub" / REPO / "Q4_K_M" / "tiny.gguf", files=FILES)
    folder = split(REPO, sequential=False)
    assert layer_files(folder) == expected[None]
    assert len(list(hub_environment.cache.rglob("*.gguf"))) == FILES


@pytest.mark.parametrize("sequential", [True, False])
def test_another_model_of_the_repository_stays_in_the_hub_cache(
    tmp_path: Path, hub_environment: HubEnvironment, sequential: bool
) -> None:
    (tmp_path / "hub" / REPO).mkdir(parents=True)
    write_gguf(tmp_path / "hub" / REPO / "tiny-Q4_K_M.gguf")
    write_gguf(tmp_path / "hub" / REPO / "tiny-Q8_0.gguf", seed=1)
    snapshot = Path(snapshot_download(REPO))
    split(f"{REPO}:q4_k_m", sequential=sequential, delete_original=True)
    assert names_in(snapshot, "*.gguf") == ["tiny-Q8_0.gguf"]
    split(f"{REPO}:q8_0", sequential=sequential, delete_original=True)
    assert not list(snapshot.glob("*.gguf"))


def test_one_file_of_several(tmp_path: Path, expected: dict[str | None, dict[str, bytes]]) -> None:
    first, second = write_gguf(tmp_path / "a.gguf"), write_gguf(tmp_path / "b.gguf", seed=1)
    with pytest.raises(CheckpointNotFoundError, match=r"holds 2 GGUF models: a\.gguf, b\.gguf"):
        split(tmp_path)
    folder = split(first)
    assert layer_files(folder) == expected[None]
    assert folder == tmp_path / "splitted_model-a"
    assert names_in(tmp_path, "*.gguf") == ["b.gguf"]
    assert split(first) == folder  # its file is deleted
    assert layer_files(split(second)) != expected[None]


@pytest.mark.long
@pytest.mark.parametrize("way", ["local", "file", "stream"])
def test_killed_call_is_resumed(
    tmp_path: Path,
    hub_environment: HubEnvironment,
    crash_server: CrashServer,
    expected: dict[str | None, dict[str, bytes]],
    way: str,
) -> None:
    original, model = tmp_path / "hub" / REPO, tmp_path / "local" / "model"
    original.mkdir(parents=True)
    write_gguf(original / "model.gguf", files=FILES)
    home: dict[str, Any] = {"hub_url": hub_environment.url, "hub_home": str(hub_environment.home)}
    home["shard_transfer"] = way
    call = Call(str(model), compression="4bit") if way == "local" else Call(REPO, compression="4bit", **home)

    def reset() -> None:
        shutil.rmtree(model if way == "local" else hub_environment.home, ignore_errors=True)
        if way == "local":
            shutil.copytree(original, model)

    reset()
    steps = steps_of(call)
    for death in sample(steps, 3):
        reset()
        assert crash_server.run(call, death) == KILLED
        folder = call.make()
        assert layer_files(folder) == expected["4bit"]
        assert names_in(folder, "*.part") == names_in(folder, "*.journal") == []


def test_file_with_the_metadata_is_used_last(tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "model.gguf", files=FILES)
    first.rename(tmp_path / "away")
    before = contents(tmp_path)
    with pytest.raises(MissingShardError, match="it has the metadata of the model"):
        split(tmp_path)
    assert contents(tmp_path) == before
    (tmp_path / "away").rename(first)
    (tmp_path / "model-00002-of-00003.gguf").rename(tmp_path / "away")
    with pytest.raises(MissingShardError, match=r"lacks 1 of the shards in its index: model-00002-of-00003\.gguf"):
        split(tmp_path)
    shutil.copy(tmp_path / "model-00003-of-00003.gguf", tmp_path / "model-00002-of-00003.gguf")
    with pytest.raises(InvalidIndexError, match="its name says another"):
        split(tmp_path)


def test_convert_writes_the_same_weights_as_safetensors(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    file = write_gguf(tmp_path / "source" / "model.gguf", files=FILES)
    write_gguf(tmp_path / "source" / "other.gguf", seed=1)
    invoke("convert", file, "-o", tmp_path / "made")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    whole = write_gguf(tmp_path / "model.gguf")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=whole.name, dtype=torch.float32)
    for name, value in reference.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert (tmp_path / "made" / "tokenizer.json").exists()


def test_a_damaged_layer_is_made_again_from_the_files(
    tmp_path: Path, expected: dict[str | None, dict[str, bytes]]
) -> None:
    folder = split(write_gguf(tmp_path / "model.gguf", files=FILES), sequential=False)
    file = folder / names_in(folder, "*.safetensors")[1]
    file.write_bytes(file.read_bytes()[:-5] + b"\xff" * 5)
    invoke("verify", folder, "--repair")
    assert layer_files(folder) == expected[None]


def test_a_file_in_a_folder_of_downloads(tmp_path: Path) -> None:
    """Texts beside it are no part of the model, and messages name the file, since the folder may hold others."""
    (tmp_path / "downloads").mkdir()
    file = write_gguf(tmp_path / "downloads" / "model.gguf")
    (file.parent / "diary.txt").write_text("private")
    (file.parent / "script.py").write_text("print()")
    for compression in ("4bit", "auto"):
        with pytest.raises(NotEnoughSpaceException) as refused:
            split(file, compression=compression, max_disk=1000, sequential=False)
        assert " model.gguf " in refused.value.problem
        assert "downloads " not in refused.value.problem
    folder = split(file, sequential=False)
    assert not {"diary.txt", "script.py"} & set(names_in(folder, "*"))
    assert {"config.json", "tokenizer.json"} <= set(names_in(folder, "*"))
    assert invoke("inspect", folder).stdout.count("of model.gguf") == 1
    plan = invoke("plan", file)
    assert plan.stdout.lstrip().startswith(str(file)[:60])
    (file.parent / "tokenizer_config.json").write_text("{}")  # a tokenizer that the user put beside it, with its files
    assert "diary.txt" in names_in(split(file, compression="8bit", sequential=False), "*")


def test_inspect_and_plan(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf")
    assert {"Q4_K", "F32"} <= {*json.loads(invoke("inspect", file, "--json").stdout)["dtypes"]}
    invoke("plan", file, "--json")


def test_lazy_loading_dequantizes_a_tensor_when_it_is_used(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", "qwen3moe", files=FILES)
    (tmp_path / "whole").mkdir()
    whole = write_gguf(tmp_path / "whole" / "model.gguf", "qwen3moe")
    model = rabbitllm.AutoModel.from_pretrained(whole, device="cpu", dtype="float32")
    with rabbitllm.lazy_load(file.parent) as weights:
        for name in ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"):
            assert torch.equal(torch.clone(weights[name]), model.state_dict()[name])
        expert = torch.cat([weights[f"model.layers.1.mlp.experts.3.{part}_proj.weight"] for part in ("gate", "up")])
        assert torch.equal(expert, model.model.layers[1].mlp.experts.gate_up_proj[3])


@pytest.mark.parametrize("types", ["F16", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen35"])
@pytest.mark.parametrize("mapped", [True, False])
def test_lazy_loading_gives_whole_tensors_in_the_order_of_the_model(
    family: str, types: str, mapped: bool, tmp_path: Path
) -> None:
    """Heads that the file has in another order, some in pieces, and float32 vectors in a float16 file."""
    file = tmp_path / "model.gguf"
    if family in CONVERTED:
        write_converted(file, family, types)
    else:
        write_gguf(file, family, types=types)
    model = rabbitllm.AutoModel.from_pretrained(file, device="cpu", dtype="float32")
    expected = model.state_dict()
    with rabbitllm.lazy_load(tmp_path, mapped=mapped) as weights:
        assert weights.keys() == expected.keys() - ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
        for name, lazy in weights.items():
            assert lazy.dtype is (torch.float16 if types == "F16" and lazy.dim() == 2 else torch.float32)
            assert torch.equal(lazy.float(), expected[name]), name
