"""A checkpoint in a folder: what is in it, what is refused before it is opened, and what giving up a shard does."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from rabbitllm.checkpoints import checkpoint as records
from rabbitllm.checkpoints.checkpoint import Disposal, SourceIdentity, sampled_fingerprint
from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.errors import (
    CheckpointNotFoundError,
    CorruptShardError,
    InvalidIndexError,
    MissingShardError,
    UnsafePathError,
)
from rabbitllm.formats.safetensors_file import read_header
from rabbitllm.storage.durable import Step, observe_steps
from tests.support.builders import INDEX_NAME, SINGLE_NAME, cut, llama_tensors, write_shards
from tests.support.splitting import contents, failing, names_in, split

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound checkpoint of two shards."""
    return write_shards(tmp_path / "model", cut(llama_tensors(layers=2), 2))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files that are opened, and the steps that change the disk."""
    paths: list[str] = []
    for module, name in ((builtins, "open"), (io, "open"), (os, "open")):
        real = getattr(module, name)

        def note(path: Any, *args: Any, real: Any = real, **kwargs: Any) -> Any:
            paths.append(os.fspath(path) if not isinstance(path, int) else str(path))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(module, name, note)
    with observe_steps(lambda step: paths.append(f"{step.kind} {step.path}")):
        yield paths


# What is there


def test_sharded(folder: Path) -> None:
    checkpoint = LocalCheckpoint(folder)
    assert checkpoint.label == str(folder)
    assert checkpoint.index.shards == (FIRST, SECOND)
    assert set(checkpoint.index.weight_map) == set(llama_tensors(layers=2))
    assert checkpoint.deletable
    metadata = checkpoint.metadata(SECOND)
    assert metadata is not None
    assert (metadata.name, metadata.size, metadata.staged) == (SECOND, (folder / SECOND).stat().st_size, False)
    assert {t.name for t in metadata.header.tensors} == {
        t for t, s in checkpoint.index.weight_map.items() if s == SECOND
    }
    assert checkpoint.acquire(FIRST) == folder / FIRST
    assert list(checkpoint.sidecars()) == ["config.json"]


def test_single_file(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, {SINGLE_NAME: llama_tensors(layers=1)}, index=False)
    checkpoint = LocalCheckpoint(folder)
    assert checkpoint.index.shards == (SINGLE_NAME,)
    assert set(checkpoint.index.weight_map) == set(llama_tensors(layers=1))


def test_shards_in_a_subfolder(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, {"weights/a.safetensors": {"model.norm.weight": torch.zeros(4)}})
    checkpoint = LocalCheckpoint(folder)
    assert checkpoint.acquire("weights/a.safetensors") == folder / "weights" / "a.safetensors"
    assert checkpoint.release("weights/a.safetensors").disposal is Disposal.DELETED
    (folder / "weights").rmdir()
    assert checkpoint.release("weights/a.safetensors").disposal is Disposal.DELETED


def test_sidecars(folder: Path) -> None:
    names = [
        "chat_template.jinja",
        "merges.txt",
        "modeling_own.py",
        "tokenizer.json",
        "tokenizer.model",
        "LICENSE.md",
    ]
    names += ["additional_chat_templates/tool.jinja", "modules.json", "1_Pooling/config.json"]
    unwanted = ["README.md", "pytorch_model.bin.index.json", "x.safetensors", "notes.bin", "original/params.json"]
    for name in names + unwanted:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    with (folder / "huge.json").open("wb") as stream:
        stream.truncate((128 << 20) + 1)
    sidecars = LocalCheckpoint(folder).sidecars()
    assert sorted(sidecars) == sorted([*names, "config.json"])
    assert all(path == folder / name for name, path in sidecars.items())


def test_other_weights_are_ignored(folder: Path) -> None:
    (folder / "adapter.safetensors").write_bytes(b"not even a safetensors file")
    checkpoint = LocalCheckpoint(folder)
    for shard in checkpoint.index.shards:
        checkpoint.release(shard)
    checkpoint.discard_rest()
    assert names_in(folder) == ["adapter.safetensors", "config.json"]


# What is not there


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nowhere is not a folder; expected a folder with a checkpoint"):
        LocalCheckpoint(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        LocalCheckpoint(tmp_path / "file")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([], "found no files."),
        (["readme.txt"], "found readme.txt."),
        (["config.json", "tokenizer.json"], "found config.json, tokenizer.json."),
        (["optimizer.pt", "training_args.bin"], "found the weights optimizer.pt, training_args.bin."),
        (["adapter_model.bin", "config.json"], "found the weights adapter_model.bin."),
        (["mmproj-F16.gguf"], "found the weights mmproj-F16.gguf."),
        (
            [f"{n}.safetensors" for n in range(7)],
            "found the weights 0.safetensors, 1.safetensors, .*4.safetensors and 2 more.",
        ),
    ],
)
def test_no_checkpoint_in_the_folder(tmp_path: Path, files: list[str], says: str) -> None:
    for file in files:
        (tmp_path / file).touch()
    with pytest.raises(
        CheckpointNotFoundError,
        match="holds no checkpoint: looked for model.safetensors, model.safetensors.index.json, "
        rf"pytorch_model.bin, pytorch_model.bin.index.json, a single file of torch.save, and GGUF; {says}",
    ) as refused:
        LocalCheckpoint(tmp_path)
    remedy = "safetensors or torch.save files" if "weights" in says else "the folder that holds the weights"
    assert remedy in refused.value.remedy


def test_folder_around_checkpoints_names_them(folder: Path) -> None:
    (folder.parent / "readme.txt").touch()
    (folder.parent / "pictures").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"found readme\.txt\.") as refused:
        LocalCheckpoint(folder.parent)
    assert refused.value.remedy == f"Use its folder {str(folder)!r}."


def test_adapter_is_named(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointNotFoundError, match=r"These are the files of an adapter\. Load the model that"):
        LocalCheckpoint(tmp_path)


@pytest.mark.parametrize("name", ["my model-1", "model (1)", "m@1", "m+1", "m [new]", "_m"])
def test_shards_as_people_name_them(folder: Path, name: str) -> None:
    shard = f"{name}.safetensors"
    (folder / SECOND).rename(folder / shard)
    rename_in_index(folder, shard)
    checkpoint = LocalCheckpoint(folder)
    assert checkpoint.metadata(shard) is not None
    assert checkpoint.release(shard).disposal is Disposal.DELETED


def test_shard_with_other_letters_is_to_be_renamed(folder: Path) -> None:
    rename_in_index(folder, "modèle.safetensors")
    with pytest.raises(UnsafePathError, match=r"names the shard 'modèle.safetensors'; .*\n.*Rename the file, and its"):
        LocalCheckpoint(folder)


def test_missing_shard(folder: Path) -> None:
    (folder / SECOND).unlink()
    checkpoint = LocalCheckpoint(folder)
    assert checkpoint.metadata(FIRST) is not None
    assert checkpoint.metadata(SECOND) is None
    count = sum(shard == SECOND for shard in checkpoint.index.weight_map.values())
    with pytest.raises(
        MissingShardError, match=rf"{SECOND} is missing; by the index it holds {count} tensors"
    ) as missing:
        checkpoint.acquire(SECOND)
    assert "Put the shard at that path, or use the id of its repository." in str(missing.value)
    assert "repeat the call that began it" in str(missing.value)
    assert isinstance(missing.value, FileNotFoundError)


# Names that lead out


def rename_in_index(folder: Path, to: str) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"] = {t: to if shard == SECOND else shard for t, shard in index["weight_map"].items()}
    (folder / INDEX_NAME).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name", ["../precious.safetensors", "{tmp}/precious.safetensors", "sub/../../precious.safetensors"]
)
def test_shard_name_outside_is_refused(folder: Path, tmp_path: Path, name: str, opened: list[str]) -> None:
    (folder / SECOND).rename(tmp_path / "precious.safetensors")
    rename_in_index(folder, name.format(tmp=tmp_path))
    before = contents(tmp_path)
    opened.clear()
    with pytest.raises(UnsafePathError, match="expected a plain file name inside the checkpoint's own folder"):
        LocalCheckpoint(folder)
    assert {Path(path).name for path in opened} == {INDEX_NAME}
    assert contents(tmp_path) == before


@pytest.mark.parametrize("target", ["file", "folder", "single", "index", "all"])
def test_weights_on_another_disk_are_read_and_never_deleted(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    moved = {"index": [INDEX_NAME], "all": names_in(folder)}.get(target, [SECOND])
    for name in moved:
        (folder / name).rename(disk / name)
        if target != "folder":
            (folder / name).symlink_to(disk / name)
    if target == "folder":
        (folder / "sub").symlink_to(disk)
        rename_in_index(folder, f"sub/{SECOND}")
    elif target == "single":
        (folder / INDEX_NAME).unlink()
        (folder / SINGLE_NAME).symlink_to(disk / SECOND)
    before, paths = contents(disk), set(names_in(folder))
    checkpoint = LocalCheckpoint(folder)
    shards = checkpoint.index.shards
    assert all(checkpoint.metadata(shard) is not None for shard in shards)
    assert "config.json" in checkpoint.sidecars()
    device = folder.stat().st_dev
    is_own = {shard: (folder / shard).resolve().parent == folder.resolve() for shard in shards}
    assert set(checkpoint.freed_bytes(shards, device)) == {shard for shard in shards if is_own[shard]}
    for shard in shards:
        expected = Disposal.DELETED if is_own[shard] else Disposal.LINK
        assert checkpoint.release(shard).disposal is expected
    assert caplog.text.count("nothing behind a link is deleted") == (not all(is_own.values()))
    assert contents(disk) == before
    assert paths - set(names_in(folder)) == {shard for shard in shards if is_own[shard]}


def test_link_to_what_is_no_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("-----BEGIN OPENSSH PRIVATE KEY-----" * 100)
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafePathError, match=r"is a link that leads outside its folder, to .*secret\.\n.*A link may"):
        LocalCheckpoint(folder)


def test_link_made_later_is_checked(folder: Path, tmp_path: Path) -> None:
    checkpoint = LocalCheckpoint(folder)
    (folder / FIRST).unlink()
    (tmp_path / FIRST).write_text("{}")
    (folder / FIRST).symlink_to(tmp_path / FIRST)
    with pytest.raises(UnsafePathError):
        checkpoint.acquire(FIRST)


def test_releasing_a_link_that_stays_inside_keeps_it(folder: Path) -> None:
    (folder / FIRST).rename(folder / "real")
    (folder / FIRST).symlink_to("real")
    checkpoint = LocalCheckpoint(folder)
    assert checkpoint.metadata(FIRST) is not None
    assert checkpoint.release(FIRST).disposal is Disposal.LINK
    assert (folder / FIRST).is_symlink()
    assert (folder / "real").exists()


def test_malformed_index(folder: Path) -> None:
    (folder / INDEX_NAME).write_text("{}")
    with pytest.raises(InvalidIndexError, match="has no weight_map"):
        LocalCheckpoint(folder)


# Damage


@pytest.mark.parametrize("damage", ["truncated", "header"])
def test_damaged_shard_names_the_remedy(folder: Path, damage: str) -> None:
    raw = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(raw[:-1] if damage == "truncated" else raw[:8] + b"x" + raw[9:])
    with pytest.raises(CorruptShardError) as refused:
        LocalCheckpoint(folder).metadata(SECOND)
    assert refused.value.problem.startswith(f"In {folder}: {SECOND} is not a valid safetensors file: ")
    assert ("it is truncated" if damage == "truncated" else "starts with b'x'") in refused.value.problem
    assert "Put an undamaged copy at that path" in refused.value.remedy
    assert "Delete nothing else: if a split was begun" in refused.value.remedy


@pytest.mark.parametrize("suffix", [".aria2", ".st", ".lftp-pget-status"])
def test_a_download_that_has_not_finished_is_refused(folder: Path, suffix: str) -> None:
    """The shard has its size, its header, and zeros for the rest: it was split, and deleted."""
    whole = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(whole[: len(whole) // 2].ljust(len(whole), b"\0"))
    (folder / f"{SECOND}{suffix}").write_bytes(b"\0" * 50)
    before = contents(folder)
    with pytest.raises(CorruptShardError, match=f"{SECOND}{suffix} records a download that has not finished"):
        split(folder)
    assert contents(folder) == before
    (folder / SECOND).write_bytes(whole)
    (folder / f"{SECOND}{suffix}").unlink()
    split(folder)


def test_damaged_single_file(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, {SINGLE_NAME: llama_tensors(layers=1)}, index=False)
    (folder / SINGLE_NAME).write_bytes((folder / SINGLE_NAME).read_bytes()[:-7])
    with pytest.raises(CorruptShardError, match=r"model.safetensors is not a valid .* it is truncated") as refused:
        LocalCheckpoint(folder)
    assert "Put an undamaged copy at that path" in refused.value.remedy


# Giving up


def test_release(folder: Path) -> None:
    checkpoint = LocalCheckpoint(folder)
    size = (folder / FIRST).stat().st_size
    release = checkpoint.release(FIRST)
    assert (release.shard, release.disposal, release.freed) == (FIRST, Disposal.DELETED, size)
    assert names_in(folder) == ["config.json", SECOND, INDEX_NAME]
    assert checkpoint.release(FIRST).freed == 0  # a crash may have come after the unlink
    checkpoint.release(SECOND)
    assert checkpoint.discard_rest() == [folder / INDEX_NAME]
    assert checkpoint.discard_rest() == []
    assert names_in(folder) == ["config.json"]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM, errno.EBUSY])
def test_read_only_source_is_left_alone(folder: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(folder)
    checkpoint = LocalCheckpoint(folder)
    with failing(OSError(code, os.strerror(code)), lambda n, step: True, kinds=("unlink",)):
        release = checkpoint.release(FIRST)
    assert (release.disposal, release.freed) == (Disposal.READ_ONLY, 0)
    assert release.disposal.value == "kept: the source is read-only"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert not checkpoint.deletable
    assert checkpoint.discard_rest() == []
    assert contents(folder) == before


def test_other_errors_are_not_hidden(folder: Path) -> None:
    checkpoint = LocalCheckpoint(folder)
    broken = OSError(errno.EIO, "Input/output error")
    with failing(broken, lambda n, step: True, kinds=("unlink",)), pytest.raises(OSError, match="Input/output"):
        checkpoint.release(FIRST)


def test_release_is_a_durable_unlink(folder: Path) -> None:
    steps: list[Step] = []
    checkpoint = LocalCheckpoint(folder)
    with observe_steps(steps.append):
        checkpoint.release(FIRST)
    assert [(step.kind, step.path) for step in steps] == [("unlink", folder / FIRST), ("sync_folder", folder)]


# Identity


def identity(folder: Path) -> SourceIdentity:
    checkpoint = LocalCheckpoint(folder)
    metadata = [metadata for shard in checkpoint.index.shards if (metadata := checkpoint.metadata(shard)) is not None]
    return checkpoint.identity(metadata)


def test_identity_depends_on_content(tmp_path: Path) -> None:
    paths = {seed: write_shards(tmp_path / str(seed) / "m", cut(llama_tensors(seed=seed), 2)) for seed in (0, 1)}
    again = write_shards(tmp_path / "again", cut(llama_tensors(seed=0), 2))
    first, other, same = identity(paths[0]), identity(paths[1]), identity(again)
    assert (first.kind, first.name, first.commit) == ("local", "m", None)
    assert first.differs_from(same) is None  # a folder may be renamed
    assert first.differs_from(other) == f"its shard {FIRST} has other contents"
    (again / FIRST).unlink()
    assert first.differs_from(identity(again)) is None  # what is used up cannot be compared
    assert identity(again).differs_from(first) == f"it has a further shard, {FIRST}"


@pytest.mark.parametrize("offset", [0, -1])
def test_fingerprint_sees_both_ends_of_a_file(folder: Path, offset: int) -> None:
    before = identity(folder)
    raw = bytearray((folder / FIRST).read_bytes())
    raw[offset if offset else raw.index(b"weight")] ^= 1
    (folder / FIRST).write_bytes(raw)
    after = LocalCheckpoint(folder).metadata(FIRST)
    assert after is not None
    assert after.fingerprint != before.fingerprints[FIRST]


def test_fingerprint_sees_every_byte_of_a_small_file(folder: Path) -> None:
    path = folder / FIRST
    header, raw = read_header(path), path.read_bytes()
    before = sampled_fingerprint(path, header)
    for offset in range(header.data_start, len(raw), 97):
        path.write_bytes(raw[:offset] + bytes([raw[offset] ^ 1]) + raw[offset + 1 :])
        assert sampled_fingerprint(path, header) != before
    path.write_bytes(raw)
    assert sampled_fingerprint(path, header) == before


def test_fingerprint_sees_a_change_in_any_one_tensor_of_a_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a fine-tune makes it that touches a few matrices alone."""
    monkeypatch.setattr(records, "WHOLE_BYTES", 1 << 12)
    weights = {f"model.layers.{i}.weight": torch.randn(64, 64) for i in range(12)}
    save_file(weights, tmp_path / "a.safetensors")
    header = read_header(tmp_path / "a.safetensors")
    before = sampled_fingerprint(tmp_path / "a.safetensors", header)
    for name, tensor in weights.items():
        save_file(weights | {name: tensor + 1e-3}, tmp_path / "b.safetensors")
        assert read_header(tmp_path / "b.safetensors", "a.safetensors") == header
        assert sampled_fingerprint(tmp_path / "b.safetensors", header) != before


def test_fingerprint_reads_a_bounded_part_of_a_file_of_many_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "WHOLE_BYTES", 1 << 12)
    monkeypatch.setattr(records, "MAX_SAMPLES", 5)
    save_file({f"t{i}": torch.randn(32, 32) for i in range(23)}, tmp_path / "a.safetensors")
    header = read_header(tmp_path / "a.safetensors")
    pieces = list(records._samples(header, (tmp_path / "a.safetensors").stat().st_size))
    assert len(pieces) == 1 + 5
    assert sum(length for _, length in pieces) <= (1 << 12) + 5 * records.SAMPLE_BYTES


def test_sidecar_link_outside_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(UnsafePathError, match="leads outside its folder"):
        LocalCheckpoint(folder).sidecars()


def test_identity_of_another_kind() -> None:
    local = SourceIdentity("local", "tiny", None, {"a": "sampled:1"})
    hub = SourceIdentity("hub", "acme/tiny", "c1", {"a": "sha256:1"})
    assert local.differs_from(hub) == "it was made from a folder, not from a repository on the hub"
    assert hub.differs_from(local) == "it was made from a repository on the hub, not from a folder"
    assert hub.differs_from(SourceIdentity("hub", "acme/tiny", "c1", {})) is None
    assert hub.differs_from(SourceIdentity("hub", "acme/tiny", "c2", {"a": "sha256:1"})) is None  # the same weights
    for marks in ({"a": "sha256:2"}, {"a": "sha256:1", "b": "sha256:1"}, {}):
        assert hub.differs_from(SourceIdentity("hub", "acme/tiny", "c2", marks)) == ("its commit is c1, not c2")
    blobs = [SourceIdentity("hub", "acme/tiny", commit, {"a": "blob:1"}) for commit in ("c1", "c2")]
    assert blobs[0].differs_from(blobs[1]) is not None  # no digest of the whole content
    assert hub.differs_from(SourceIdentity("hub", "acme/other", "c2", {"a": "sha256:1"})) is not None
    assert hub.differs_from(SourceIdentity("hub", "acme/tiny", "c1", {"a": "sha256:2"})) is not None
    assert hub.differs_from(SourceIdentity("hub", "acme/tiny", "c1", {"a": "blob:2"})) is None  # not comparable


@pytest.mark.parametrize(
    ("config", "files", "lacks"),
    [
        (transformers.LlamaConfig(), ("config.json", "generation_config.json"), True),
        (transformers.LlamaConfig(), ("config.json", "tokenizer.model"), False),
        (transformers.T5Config(), ("config.json", "tokenizer_config.json"), False),  # ByT5's is of bytes
        (transformers.Gemma3Config(), ("config.json", "preprocessor_config.json"), True),  # in its text_config
        (transformers.ViTConfig(), ("config.json", "preprocessor_config.json"), False),
        (transformers.Wav2Vec2Config(), ("config.json", "vocab.json"), False),
    ],
    ids=lambda value: value.model_type if isinstance(value, transformers.PretrainedConfig) else None,
)
def test_which_models_lack_a_tokenizer(
    config: transformers.PretrainedConfig, files: tuple[str, ...], lacks: bool
) -> None:
    assert records.lacks_tokenizer(files, json.loads(config.to_json_string())) == lacks
