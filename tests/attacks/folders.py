"""Checkpoints in folders that lead out of them, or name what is no file: each is a builder and what must be raised.

What they lead to lies next to the folder, and is no checkpoint: a secret. Its first bytes may be looked at, no more.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rabbitllm.checkpoints.local import LocalCheckpoint
from rabbitllm.errors import CorruptShardError, InvalidIndexError, UnreadableFormatError, UnsafePathError
from tests.attacks.safetensors_files import EIGHT, file_of

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SOUND = file_of({"t": EIGHT})
SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----" * 100

HOSTILE_NAMES = [
    *("../x.safetensors", "..", ".", "", "a/../x.safetensors", "a/../../x.safetensors", "/etc/passwd", "//x", "a//b"),
    *(
        "a/",
        "/",
        "a/b/c.safetensors",
        "./x.safetensors",
        "~/x",
        "a\0b",
        "a\nb",
        "x\n",
        ".hidden",
        "-rf",
        "a ",
        " a",
        "$HOME",
    ),
    *("%2e%2e%2fx", "http://x", "file:///etc/passwd", "ä.safetensors", "..safetensors", "x\u202e", "\uff0e\uff0e/x"),
    # Windows
    *("C:\\x", "C:x", "c:/x", "..\\x", "a\\b", "\\\\server\\share\\x", "\\\\?\\C:\\x", "x.safetensors:stream", "x."),
    *("nul", "NUL.safetensors", "con", "aux.bin", "a/COM1", "lpt9.safetensors", "prn.index.json"),
    # longer than a file system takes
    "x" * 201,
    "model-" + "9" * 5000 + ".safetensors",
]
"""Names of shards that nothing may be opened by."""


Builder = Callable[[Path], None]
"""Fills an empty folder; next to it is `outside` with a sound checkpoint in it."""


@dataclass(frozen=True)
class FolderAttack:
    """A folder that must be refused.

    Attributes:
        build: makes it.
        error: the class that must be raised.
        message: a pattern that its text must match.
    """

    build: Builder
    error: type[Exception]
    message: str

    @property
    def name(self) -> str:
        return self.build.__name__.replace("_", " ")


ATTACKS: list[FolderAttack] = []


def attack(message: str, error: type[Exception] = UnsafePathError) -> Callable[[Builder], Builder]:
    """Put a builder on the list."""

    def add(build: Builder) -> Builder:
        ATTACKS.append(FolderAttack(build, error, message))
        return build

    return add


def prepare(place: Path) -> Path:
    """The empty folder for an attack, with what it may lead to next to it."""
    outside = place / "outside"
    outside.mkdir(parents=True)
    (outside / SINGLE).write_bytes(SOUND)
    index(outside, {"t": SINGLE})
    (outside / "secret").write_text(SECRET)
    (outside / "secret.json").write_text(json.dumps({"auths": SECRET}))
    folder = place / "model"
    folder.mkdir()
    return folder


def index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def read_all(folder: Path) -> None:
    """What every route does first with a folder: its index, and the header of each shard."""
    commit = folder / "models--o--n" / "snapshots" / "c1"
    checkpoint = LocalCheckpoint(commit if commit.is_dir() else folder)
    for shard in checkpoint.index.shards:
        checkpoint.metadata(shard)
    checkpoint.sidecars()


def _named(name: str) -> FolderAttack:
    def build(folder: Path) -> None:
        (folder / "sound.safetensors").write_bytes(SOUND)
        index(folder, {"t": "sound.safetensors", "u": name})

    build.__name__ = f"shard {name[:30]!r}"
    return FolderAttack(build, UnsafePathError, "names the shard .*; expected a plain file name inside the checkpoint")


ATTACKS += [_named(name) for name in HOSTILE_NAMES]


# links


@attack("model.safetensors is a link that leads outside its folder, to .*secret")
def single_file_that_is_a_link(folder: Path) -> None:
    (folder / SINGLE).symlink_to("../outside/secret")


@attack("index.json is a link that leads outside its folder, to .*secret")
def index_that_is_a_link(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(SOUND)
    (folder / INDEX).symlink_to(folder.parent / "outside" / "secret")


@attack("a.safetensors is a link that leads outside its folder")
def shard_that_is_a_link(folder: Path) -> None:
    (folder / "a.safetensors").symlink_to("../outside/secret")
    index(folder, {"t": "a.safetensors"})


@attack("a.safetensors is a link that leads outside its folder")
def shard_that_is_a_link_to_json(folder: Path) -> None:
    (folder / "a.safetensors").symlink_to("../outside/secret.json")
    index(folder, {"t": "a.safetensors"})


@attack("a.safetensors is a link that leads outside its folder")
def shard_that_is_a_link_to_a_link(folder: Path) -> None:
    (folder / "b").symlink_to(folder.parent / "outside")
    (folder / "a.safetensors").symlink_to("b/secret")
    index(folder, {"t": "a.safetensors"})


@attack("is a link that leads outside its folder")
def folder_of_shards_that_is_a_link(folder: Path) -> None:
    (folder / "sub").symlink_to("../outside")
    index(folder, {"t": "sub/secret"})


@attack("is a link that leads outside its folder")
def shard_that_is_a_link_to_nothing(folder: Path) -> None:
    (folder / "a.safetensors").symlink_to("../outside/missing")
    index(folder, {"t": "a.safetensors"})


@attack("config.json is a link that leads outside its folder")
def config_that_is_a_link(folder: Path) -> None:
    (folder / SINGLE).write_bytes(SOUND)
    (folder / "config.json").symlink_to(folder.parent / "outside" / "secret.json")


@attack("tokenizer.json is a link that leads outside its folder")
def small_file_that_leads_elsewhere_than_the_weights(folder: Path) -> None:
    (folder.parent / "disk").mkdir()
    (folder.parent / "disk" / SINGLE).write_bytes(SOUND)
    (folder / SINGLE).symlink_to(folder.parent / "disk" / SINGLE)
    (folder / "tokenizer.json").symlink_to(folder.parent / "outside" / "secret.json")


@attack("tokenizer.json is a pipe, a device, a folder or a link to nothing")
def small_file_that_is_a_folder(folder: Path) -> None:
    (folder / SINGLE).write_bytes(SOUND)
    (folder / "tokenizer.json").mkdir()


@attack("1_Pooling/config.json is a pipe, a device, a folder or a link to nothing")
def small_file_in_a_folder_that_leads_to_nothing(folder: Path) -> None:
    (folder / SINGLE).write_bytes(SOUND)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").symlink_to("nowhere.json")


@attack("1_Pooling is a pipe, a device, a folder or a link to nothing")
def folder_of_a_small_file_that_leads_to_nothing(folder: Path) -> None:
    (folder / SINGLE).write_bytes(SOUND)
    (folder / "1_Pooling").symlink_to("nowhere")


@attack("a.safetensors is a link that leads out of the hub cache")
def shard_in_a_hub_cache_that_leads_to_weights_outside(folder: Path) -> None:
    commit = folder / "models--o--n" / "snapshots" / "c1"
    commit.mkdir(parents=True)
    (folder / "models--o--n" / "blobs").mkdir()
    (commit / "a.safetensors").symlink_to(folder.parent / "outside" / SINGLE)
    index(commit, {"t": "a.safetensors"})


@attack("a.safetensors is a link that leads to itself")
def links_that_lead_to_one_another(folder: Path) -> None:
    (folder / "a.safetensors").symlink_to("b.safetensors")
    (folder / "b.safetensors").symlink_to("a.safetensors")
    index(folder, {"t": "a.safetensors"})


# what is no file


@attack("a.safetensors is not a regular file")
def shard_that_is_a_folder(folder: Path) -> None:
    (folder / "a.safetensors").mkdir()
    index(folder, {"t": "a.safetensors"})


if sys.platform != "win32":

    @attack("a.safetensors is not a regular file")
    def shard_that_is_a_pipe(folder: Path) -> None:
        os.mkfifo(folder / "a.safetensors")
        index(folder, {"t": "a.safetensors"})

    @attack("chat_template.jinja is a pipe, a device, a folder or a link to nothing")
    def small_file_that_is_a_pipe(folder: Path) -> None:
        (folder / SINGLE).write_bytes(SOUND)
        os.mkfifo(folder / "chat_template.jinja")

    @attack("merges.txt is a pipe, a device, a folder or a link to nothing")
    def small_file_that_is_a_device(folder: Path) -> None:
        (folder / SINGLE).write_bytes(SOUND)
        (folder / "merges.txt").symlink_to("/dev/null")

    @attack("is a link that leads outside its folder, to /dev/zero")
    def shard_that_is_a_device(folder: Path) -> None:
        (folder / "a.safetensors").symlink_to("/dev/zero")
        index(folder, {"t": "a.safetensors"})


@attack("sub is not a regular file")
def shard_that_is_the_folder_of_another(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "a.safetensors").write_bytes(SOUND)
    index(folder, {"t": "sub", "u": "sub/a.safetensors"})


@attack("names the shards 'A.safetensors' and 'a.safetensors', the same file on some disks")
def shards_that_differ_in_case(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(SOUND)
    index(folder, {"t": "a.safetensors", "u": "A.safetensors"})


@attack("names the shards 'a--b.safetensors' and 'a/b.safetensors', the same file on some disks")
def shards_that_are_staged_as_one(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "b.safetensors").write_bytes(SOUND)
    index(folder, {"t": "a/b.safetensors", "u": "a--b.safetensors"})


# indexes


@attack("the key 't' appears twice", InvalidIndexError)
def tensor_in_two_shards(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(SOUND)
    (folder / INDEX).write_text('{"weight_map": {"t": "a.safetensors", "t": "../outside/model.safetensors"}}')


@attack("the key 'weight_map' appears twice", InvalidIndexError)
def two_weight_maps(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(SOUND)
    (folder / INDEX).write_text('{"weight_map": {"t": "a.safetensors"}, "weight_map": {"t": "../x"}}')


@attack("has no weight_map; expected a table", InvalidIndexError)
def weight_map_that_is_a_list(folder: Path) -> None:
    index(folder, ["a.safetensors"])


@attack("puts tensor 't' into .*; expected the name of a shard", InvalidIndexError)
def shard_that_is_a_number(folder: Path) -> None:
    index(folder, {"t": 10**300})


@attack("not valid JSON.*4300 digits", InvalidIndexError)
def giant_total_size(folder: Path) -> None:
    (folder / INDEX).write_text('{"metadata": {"total_size": %s}, "weight_map": {"t": "a"}}' % ("9" * 100_000))


# files of another kind than their names say


@attack("In .*model: model.safetensors is not a valid safetensors file", CorruptShardError)
def web_page_as_a_shard(folder: Path) -> None:
    (folder / SINGLE).write_bytes(b"<!DOCTYPE html><html>Access denied</html>")


@attack("is a bare pickle", UnreadableFormatError)
def pickle_as_safetensors(folder: Path) -> None:
    (folder / SINGLE).write_bytes(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.")


@attack("is not a valid GGUF file: it declares", CorruptShardError)
def gguf_as_safetensors(folder: Path) -> None:
    (folder / SINGLE).write_bytes(b"GGUF\3\0\0\0" + b"\xff" * 100)


@attack("is of no format known here", UnreadableFormatError)
def seven_zip_as_torch(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"7z\xbc\xaf\x27\x1c\x00\x04" + bytes(100))


@attack("is empty; safetensors", UnreadableFormatError)
def empty_file_as_torch(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"")
