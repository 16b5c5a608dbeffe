"""Config, tokenizer and the like that a source has otherwise since its split was made, or begun."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from huggingface_hub import snapshot_download
from transformers import AutoConfig

from rabbitllm import AutoModel
from rabbitllm.errors import InvalidIndexError, SplitMismatchError
from rabbitllm.store.manifest import MANIFEST_NAME
from tests.prepare.conftest import REPO
from tests.support.builders import build_checkpoint
from tests.support.commands import invoke
from tests.support.dying import dying_at
from tests.support.gguf_files import write_gguf
from tests.support.local_hub import LocalHub
from tests.support.meta_files import tiny_llama, write_meta
from tests.support.splitting import Call, interrupted, split

THETA = {"rope_theta": 3.0, "rope_type": "default"}
OTHER = r"config.json has changed since it was split into .*: it has other values of rope_"


def edit(folder: Path, **settings: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))


def logits(source: Path | str, **options: object) -> torch.Tensor:
    model = AutoModel.from_pretrained(source, device="cpu", show_layer_progress=False, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        result: torch.Tensor = model(torch.tensor([[1, 2, 3, 4, 5]])).logits
    return result


def later_copy(folder: Path, name: str, split_folder: Path) -> None:
    shutil.copy(folder / name, split_folder / name)
    after = (split_folder / MANIFEST_NAME).stat().st_mtime_ns + 10**9
    os.utime(split_folder / name, ns=(after, after))


@pytest.mark.parametrize("sequential", [False, True])
def test_edited_config_of_a_folder(tmp_path: Path, sequential: bool, caplog: pytest.LogCaptureFixture) -> None:
    """No answer is computed by other settings than those that the folder has, unless the user says so."""
    model = build_checkpoint(tmp_path / "model", "llama", shards=2)
    before = logits(model, sequential_shard_processing=sequential)
    edit(model, transformers_version="5.99")
    assert torch.equal(logits(model, sequential_shard_processing=sequential), before)
    edit(model, rope_parameters=THETA)
    for options in ({"sequential_shard_processing": sequential}, {"split": False}, {"delete_original": True}):
        with pytest.raises(SplitMismatchError, match=OTHER) as refusal:
            logits(model, **options)
    assert any(model.glob("*.safetensors")) is not sequential, "a refused call deletes nothing"
    folder = model / "splitted_model"
    assert f"load {folder}" in refusal.value.remedy
    assert torch.equal(logits(folder), before)
    later_copy(model, "config.json", folder)
    assert not torch.equal(logits(model), before)
    later_copy(model, "config.json", folder)
    edit(folder, rope_parameters={**THETA, "rope_theta": 4.0})
    caplog.clear()
    after = logits(model)
    assert "not the same" not in caplog.text, "the user has edited the split itself"
    assert torch.equal(logits(folder), after)
    edit(model, rope_parameters={**THETA, "rope_theta": 5.0})
    (folder / "chat_template.jinja").write_text("own")
    logits(model)
    assert "not the same config.json;" in caplog.text, "and now the source"


def test_config_that_means_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Transformers saves a config with its defaults and the names of its version."""
    model = build_checkpoint(tmp_path / "model", "llama", shards=2)
    config = json.loads((model / "config.json").read_text())
    rope = config.pop("rope_parameters")
    earlier = {"rope_theta": rope["rope_theta"], "rope_scaling": None, "factor": float("nan"), "use_cache": True}
    (model / "config.json").write_text(json.dumps({**config, **earlier}))
    folder = split(model)
    edit(model, use_cache=False, rope_parameters=rope, sliding_window=None, _attn_implementation_autoset=True)
    AutoConfig.from_pretrained(model).save_pretrained(model)
    assert split(model) == folder
    edit(model, auto_map={"AutoConfig": "own.OwnConfig"})
    with pytest.raises(SplitMismatchError, match="auto_map"):
        split(model)
    edit(model, auto_map=None, hidden_size=-1)
    with pytest.raises(SplitMismatchError, match="hidden_size"):
        split(model)
    assert "not the same" not in caplog.text


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("sequential", [False, True])
def test_half_written_file_of_a_folder(
    tmp_path: Path, name: str, sequential: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A finished split needs none of them."""
    model = build_checkpoint(tmp_path / "model", "llama", shards=2)
    folder = split(model, sequential=sequential)
    (model / name).write_text((model / name).read_text()[:-9] if (model / name).exists() else "{")
    assert split(model, sequential=sequential) == folder
    assert name in caplog.text
    if name.endswith("index.json"):
        with pytest.raises(InvalidIndexError, match="is not valid JSON"):
            split(model, delete_original=True)


def test_half_written_parameters_of_meta(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write_meta(tmp_path / "model", tiny_llama())
    folder = split(model, sequential=True)
    (model / "params.json").write_text("{")
    assert split(model, sequential=True) == folder
    assert "not the same params.json;" in caplog.text


def test_setting_whose_name_begins_as_a_note(tmp_path: Path) -> None:
    model = build_checkpoint(tmp_path / "model", "opt", shards=2)
    split(model)
    edit(model, _remove_final_layer_norm=True)
    with pytest.raises(SplitMismatchError, match="other values of _remove_final_layer_norm"):
        split(model)


def test_small_file_that_is_gone_behind_its_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A user may empty the folder into which a downloaded folder's links point."""
    model = build_checkpoint(tmp_path / "model", "llama", shards=2)
    folder = split(model)
    (model / "generation_config.json").unlink()
    (model / "generation_config.json").symlink_to("gone")
    assert split(model) == folder
    assert "not the same generation_config.json;" in caplog.text


def test_other_small_files_of_a_folder_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build_checkpoint(tmp_path / "model", "llama", shards=2)
    (model / "LICENSE").write_text("free")
    folder = split(model)
    assert split(model) == folder
    assert "not the same" not in caplog.text
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "model_max_length": 7}))
    (model / "LICENSE").unlink()
    (model / "talk.json").write_text("{}")
    edit(model, eos_token_id=[3, 4], unsloth_version="2026.11")
    split(model)
    names = "chat_template.jinja, config.json, tokenizer_config.json"
    assert f"has the weights of {model}, but not the same {names}; what it has is used" in caplog.text
    caplog.clear()
    for path in model.glob("*.json*"):
        path.unlink()
    (model / "chat_template.jinja").unlink()
    split(model)
    assert "not the same" not in caplog.text, "a user may remove the small files with the shards"


@pytest.mark.parametrize("words", [("pull",), ("run", "hello")])
def test_commands_refuse_another_config(tmp_path: Path, words: tuple[str, ...]) -> None:
    model = build_checkpoint(tmp_path / "model", "llama", shards=2)
    split(model)
    edit(model, rope_parameters=THETA)
    with pytest.raises(SplitMismatchError, match=OTHER):
        invoke(words[0], model, *words[1:])


def test_edited_parameters_of_meta(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_meta(model, tiny_llama())
    split(model, sequential=True)
    assert split(model, sequential=True)
    params = json.loads((model / "params.json").read_text())
    (model / "params.json").write_text(json.dumps({**params, "rope_theta": 3.0}))
    with pytest.raises(SplitMismatchError, match=r"params.json has changed since it was split"):
        split(model, sequential=True)


@pytest.mark.parametrize("verify", [False, True])
def test_edited_metadata_of_a_long_gguf_header(tmp_path: Path, caplog: pytest.LogCaptureFixture, verify: bool) -> None:
    """Only its first 4 MiB are in the fingerprint, and the checksum has the tensors alone."""

    def lengthen(writer: GGUFWriter) -> None:
        writer.add_description("x" * (3 << 20))
        writer.add_license("x" * (3 << 20))
        writer.add_eot_token_id(5)

    path = write_gguf(tmp_path / "x.gguf", changed=lengthen)
    split(path, sequential=False)
    split(path, sequential=False, verify_source=verify)
    assert "not the same" not in caplog.text
    content = bytearray(path.read_bytes())
    key = b"tokenizer.ggml.eot_token_id"
    content[content.index(key) + len(key) + 4] = 6  # after its type
    path.write_bytes(content)
    split(path, sequential=False, verify_source=verify)
    assert "not the same generation_config.json" in caplog.text


@pytest.mark.parametrize("by_revision", [False, True])
def test_commit_with_another_config(
    repository: Path, tmp_path: Path, local_hub: LocalHub, by_revision: bool, caplog: pytest.LogCaptureFixture
) -> None:
    first = local_hub.commit(REPO)
    folder = split(REPO)
    changed = shutil.copytree(repository, tmp_path / "changed")
    edit(changed, rope_theta=12345.0)
    local_hub.add_revision(REPO, "main", changed)
    commit = local_hub.commit(REPO)

    def load(revision: str | None) -> None:
        AutoModel.from_pretrained(REPO, device="cpu", revision=revision, show_layer_progress=False)

    with pytest.raises(SplitMismatchError, match=OTHER):
        load(commit if by_revision else None)
    load(first)
    later_copy(changed, "config.json", folder)
    assert "not the same" not in caplog.text
    load(commit if by_revision else None)
    assert "not the same" not in caplog.text
    load(first)
    assert f"has the weights of commit {first}, but not the same config.json" in caplog.text


@pytest.mark.parametrize("removed", ["merges.txt", "generation_config.json"])
def test_removed_by_a_commit(
    repository: Path, tmp_path: Path, local_hub: LocalHub, removed: str, caplog: pytest.LogCaptureFixture
) -> None:
    (repository / removed).write_text("{}")
    local_hub.add_revision(REPO, "main", repository)
    split(REPO)
    changed = shutil.copytree(repository, tmp_path / "changed")
    (changed / removed).unlink()
    local_hub.add_revision(REPO, "main", changed)
    split(REPO)
    assert f"not the same {removed};" in caplog.text


def test_offline_with_another_commit_in_the_cache(
    repository: Path, tmp_path: Path, local_hub: LocalHub, other: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, folder = local_hub.commit(REPO), split(REPO)
    assert split(REPO, local_files_only=True) == folder
    assert "the hub cache has" not in caplog.text
    local_hub.add_revision(REPO, "main", other)
    snapshot_download(REPO)
    assert split(REPO, local_files_only=True) == folder
    assert f"has the weights of commit {first}, and the hub cache has {local_hub.commit(REPO)}" in caplog.text


@pytest.mark.parametrize("at", range(0, 24, 3))
def test_edited_after_an_early_kill(tmp_path: Path, at: int) -> None:
    """Before the split has a record, a mark tells its copies from files of the user's own."""
    model = build_checkpoint(tmp_path / "model", "llama", shards=2)
    call = Call(str(model))
    with dying_at(at) as death:
        call.make()
    assert death.step is not None
    edit(model, rope_theta=12345.0)
    folder = call.make()
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 12345.0
    assert not (folder / ".staging").exists()


@pytest.mark.parametrize("move", [False, True])
def test_resumed_split_has_the_small_files_of_now(
    move: bool, repository: Path, tmp_path: Path, local_hub: LocalHub, model: Path
) -> None:
    """An edit, or a commit, between a kill and the next call."""
    source: Path | str = REPO if move else model
    call = Call(str(source))
    folder = interrupted(call)
    changed = shutil.copytree(repository, tmp_path / "changed") if move else model
    edit(changed, rope_theta=12345.0)
    if move:
        local_hub.add_revision(REPO, "main", changed)
    assert call.make() == folder
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 12345.0
    assert call.make() == folder
