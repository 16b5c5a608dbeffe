"""`rabbitllm inspect` as a user meets it: files, folders, split directories and repositories, whole and refused."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from rabbitllm.checkpoints.hub import FIRST_READ_BYTES
from rabbitllm.cli import exit_codes
from rabbitllm.errors import CheckpointNotFoundError, MissingShardError, OptionError, RabbitLLMError
from rabbitllm.models.inspection import look, look_at_file
from rabbitllm.models.inspection_report import RowChoice, runs, show
from tests.frozen.support.command_line import Ran, rabbitllm
from tests.support.builders import INDEX_NAME, cut, llama_tensors, write_shards
from tests.support.commands import invoke
from tests.support.fresh_process import python
from tests.support.gguf_files import write_gguf
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.published import write_llama_2_vocabulary, write_llama_2_weights
from tests.support.splitting import Call, interrupted, split
from tests.support.torch_files import archive, pack

ROOT = Path(__file__).parent.parent.parent
REPO = "org/model"
EVIL = b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R."


def run(*arguments: object) -> str:
    """What the command prints on stdout where nothing is refused."""
    return invoke("inspect", *arguments).stdout


def record(*arguments: object) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return parsed


def ended(*arguments: object) -> Ran:
    """What the program prints and ends with, also where something is refused."""
    return rabbitllm("inspect", *arguments)


def on_a_terminal(path: Path, width: int, choice: RowChoice | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, highlight=False)
    show(look_at_file(path), choice or RowChoice(limit=5), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# the tables that people make of the published files


def test_the_weights_of_llama_2(tmp_path: Path) -> None:
    path = write_llama_2_weights(tmp_path)
    text = run(path)
    assert re.search(r"tensors +292, 13.48 GB: 292 BF16", text)
    assert re.search(r"layer files +36: rope, tok_embeddings, layers.0 to layers.31, norm, output", text)
    (line,) = re.findall(r"^tok_embeddings.*", text, re.MULTILINE)
    name, *rest = re.split(r"  +", line)
    offset = look_at_file(path).content.tensors[0].offset  # type: ignore[union-attr]
    assert name == "tok_embeddings.weight"
    assert rest == ["BF16", "[32000, 4096]", f"{offset:,}", "262,144,000", "tok_embeddings", "data/0"]
    assert len(re.findall(r"^layers\.\d+\.", text, re.MULTILINE)) == 288
    listing = run(path, "--opcodes")
    assert re.search(r"^ +6    BINUNICODE +'tok_embeddings.weight'$", listing, re.MULTILINE)
    assert re.search(r"GLOBAL +'torch._utils _rebuild_tensor_v2'$", listing, re.MULTILINE)
    assert re.search(r"names +torch._utils._rebuild_tensor_v2, torch.BFloat16Storage, collections.OrderedDict", listing)


def test_the_weights_of_llama_2_in_80_columns(tmp_path: Path) -> None:
    text = on_a_terminal(write_llama_2_weights(tmp_path), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "\nname                          dtype  shape               offset        bytes\n" in text
    assert "\n… and 287 more; --limit 0 shows all, --name a part of them\n" in text
    assert "too narrow for layer, storage" in text


def test_strides_are_shown_where_they_say_more_than_shapes(tmp_path: Path) -> None:
    tensors = {"straight": torch.ones(4, 6), "turned": torch.ones(6, 4).t()}
    torch.save(tensors, tmp_path / "strided.bin")
    text = run(tmp_path / "strided.bin")
    assert " stride " in text
    assert re.search(r"^turned +F32 +\[4, 6\] +\[1, 4\] ", text, re.MULTILINE)
    torch.save({"straight": tensors["straight"]}, tmp_path / "plain.bin")
    assert " stride " not in run(tmp_path / "plain.bin")
    assert record(tmp_path / "plain.bin")["tensors"][0]["stride"] == [6, 1]


def test_the_vocabulary_of_llama_2(tmp_path: Path) -> None:
    path = write_llama_2_vocabulary(tmp_path)
    text = run(path)
    assert re.search(r"pieces +32,000: 31,741 normal, 256 byte, 2 control, 1 unknown", text)
    assert re.search(r"special ids +unk 0, bos 1, eos 2, no pad", text)
    assert re.search(r"trainer +vocab_size=32000, byte_fallback=True", text)
    assert re.search(r"normaliser +name=identity, remove_extra_whitespaces=False\n", text)
    rows = [tuple(re.split(r"  +", line.strip())) for line in text.splitlines()]
    for row in (
        ("0", "<unk>", "0", "unknown"),
        ("13", "<0x0A>", "0", "byte"),
        ("259", "▁▁", "-1000000000", "normal"),
        ("260", "▁t", "-1", "normal"),
        ("1001", "ied", "-742", "normal"),
        ("31001", "동", "-30742", "normal"),
    ):
        assert row in rows
    parsed = record(path, "--name", "ång")
    assert parsed["pieces"] == [{"id": 10001, "piece": "ång", "score": -9742.0, "type": "normal"}]
    assert (parsed["piece_count"], parsed["trainer"]["model_type"]) == (32000, "bpe")


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_13_gb_take_no_memory_and_are_not_read(tmp_path: Path) -> None:
    """What is mapped and looked at counts as memory; what is read otherwise the system counts, modules included."""
    path = write_llama_2_weights(tmp_path)
    code = """
import resource, sys
from rabbitllm.cli.main import app
def taken():
    read = next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("rchar:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, read
before = taken()
app(["inspect", sys.argv[1]], standalone_mode=False)
print(*(now - then for now, then in zip(taken(), before)), file=sys.stderr)
"""
    ran = python(code, path)
    kilobytes, nbytes = map(int, ran.stderr.split())
    assert kilobytes < 50_000
    assert 0 < nbytes < 50_000_000
    assert "tok_embeddings.weight" in ran.stdout


# folders and repositories


def test_a_checkpoint(tmp_path: Path) -> None:
    tensors = llama_tensors()
    folder = write_shards(tmp_path / "model", cut(tensors, 3))
    parsed = record(folder)
    assert (parsed["format"], parsed["tensor_count"], parsed["missing"]) == ("a checkpoint", len(tensors), [])
    assert parsed["files"] == {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
    assert parsed["bytes"] == sum(parsed["files"].values())
    weight_map = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    assert {tensor["name"]: tensor["file"] for tensor in parsed["tensors"]} == weight_map
    assert {t["name"]: t["layer"] for t in parsed["tensors"]}["model.layers.1.mlp.up_proj.weight"] == "layers.1"
    assert parsed["beside"] == ["config.json"]
    text = run(folder, "--name", "*q_proj*")
    assert f"'*q_proj*' matches 3 tensors of {len(tensors)}" in text
    assert text.count("q_proj.weight") == 3
    assert "model-00002-of-00003.safetensors" in text
    assert "\x1b" not in text


def test_a_repository_by_its_headers(tmp_path: Path, hub_environment: HubEnvironment, local_hub: LocalHub) -> None:
    tensors = llama_tensors(hidden=512, vocabulary=4000)
    folder = write_shards(tmp_path / "hub" / REPO, cut(tensors, 2))
    parsed = record(REPO)
    assert parsed["source"] == f"{REPO} at commit {local_hub.commit(REPO)}"
    assert {tensor["name"]: tuple(tensor["shape"]) for tensor in parsed["tensors"]} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    sent = sum(request.bytes_sent for request in local_hub.requests if request.file.endswith(".safetensors"))
    assert sent <= len(sizes) * FIRST_READ_BYTES < sum(sizes)
    expected = {**parsed, "source": str(folder), "format": "a checkpoint"}
    assert record(folder) == expected


@pytest.mark.parametrize("compression", [None, "8bit", "4bit"])
def test_a_split_directory_and_its_layer_files(tmp_path: Path, compression: str | None) -> None:
    tensors = llama_tensors(hidden=128)
    folder = write_shards(tmp_path / "model", cut(tensors, 2))
    split_folder = split(folder, compression=compression)
    parsed = record(split_folder)
    assert parsed["format"] == f"a split directory, {compression or 'uncompressed'}, of model"
    assert {t["name"]: tuple(t["shape"]) for t in parsed["tensors"]} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert {t["dtype"] for t in parsed["tensors"]} == ({"BF16"} if compression is None else {"BF16", compression})
    assert parsed["layers"] == ["embed_tokens", "layers.0", "layers.1", "layers.2", "norm", "lm_head"]
    layer = record(split_folder / "model.layers.1.safetensors")
    assert (layer["format"], layer["layers"]) == ("safetensors", ["layers.1"])
    names = {tensor["name"] for tensor in layer["tensors"]}
    assert {name for name in tensors if ".layers.1." in name} <= names


@pytest.mark.parametrize("how", ["none", "8bit", "4bit"])
def test_a_split_directory_of_rabbitllm_1_1(how: str) -> None:
    golden = ROOT / "tests" / "golden" / f"rabbitllm-1.1.0-{how}"
    (folder,) = golden.glob("splitted_model*")
    parsed = record(folder)
    assert parsed["format"] == f"a split directory, {'uncompressed' if how == 'none' else how}, RabbitLLM 1.1's"
    assert (parsed["tensor_count"], parsed["parameters"]) == (27, 94_784)
    assert parsed["layers"] == ["embed_tokens", "layers.0", "layers.1", "norm", "lm_head"]


@pytest.mark.parametrize("source_format", ["folder", "gguf"])
def test_a_folder_with_nothing_but_splits(tmp_path: Path, source_format: str) -> None:
    """The most exact one."""
    if source_format == "gguf":
        source = write_gguf(tmp_path / "model.gguf")
    else:
        source = write_shards(tmp_path / "model", cut(llama_tensors(hidden=128), 2))
    for compression in ("4bit", "8bit"):
        Call(str(source), str(tmp_path / "out"), compression=compression, sequential=False).make()
    parsed = record(tmp_path / "out")
    assert parsed["format"].startswith("a split directory, 8bit, of model")


def test_a_split_that_has_used_up_the_shards(tmp_path: Path) -> None:
    """Their index is left."""
    folder = write_shards(tmp_path / "model", cut(llama_tensors(hidden=128), 2))
    Call(str(folder), compression="4bit", sequential=True).make()
    assert (folder / "model.safetensors.index.json").exists()
    assert record(folder)["format"].startswith("a split directory, 4bit, of model")


def test_an_unfinished_split(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "model", cut(llama_tensors(), 3))
    split_folder = interrupted(Call(str(folder)))
    with pytest.raises(CheckpointNotFoundError, match="is an unfinished split"):
        look(split_folder)


def test_a_checkpoint_that_lacks_shards_or_has_a_damaged_one(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "model", cut(llama_tensors(), 3))
    missing = folder / "model-00002-of-00003.safetensors"
    missing.unlink()
    inspection = look(folder)
    assert inspection.absent == (missing.name,)
    assert isinstance(inspection.refusal, MissingShardError)
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"\x08")
    result = ended(folder, "--json")
    assert result.code == 1
    record = json.loads(result.out)
    assert list(record["files"]) == ["model-00001-of-00003.safetensors"]
    assert record["refused"]["error"] == "CorruptShardError"
    assert "it has 1 bytes" in result.err


# what is refused


@pytest.mark.long
def test_a_pickle_that_is_refused_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(pack(archive(EVIL)))
    result = ended(path)
    assert result.code == 1
    assert "--opcodes lists it; nothing of it is run" in result.out
    assert "names the global 'os' 'system', which is not on the list" in result.err
    result = ended(path, "--opcodes")
    assert result.code == 1
    assert re.search(r"names +os.system\n", result.out)
    assert re.search(r"^   2  GLOBAL      'os system'$", result.out, re.MULTILINE)
    assert "Traceback" not in result.err
    parsed = json.loads(ended(path, "--opcodes", "--json").out)
    assert parsed["pickles"][0]["opcodes"][1] == {"byte": 2, "opcode": "GLOBAL", "argument": "'os system'"}
    assert parsed["refused"]["error"] == "UnsafePickleError"


def test_a_bare_pickle_is_its_opcodes(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(EVIL)
    result = ended(tmp_path / "x.pkl")
    assert result.code == 1
    assert "GLOBAL      'os system'" in result.out
    assert "is a bare pickle" in result.err
    matching = json.loads(ended(tmp_path / "x.pkl", "--json", "--name", "GLOBAL 'os").out)["pickles"][0]["opcodes"]
    assert [opcode["argument"] for opcode in matching] == ["'os system'"]


def test_imports_of_a_pickle_are_listed(tmp_path: Path) -> None:
    """As far as it can be told without running it; several in a row each have a head."""
    path = tmp_path / "x.pkl"
    path.write_bytes(b"\x80\x04(ios\nsystem\ncos\npopen\ncos\npopen\n\x8c\x02os\x8c\x04exec\x93.")
    assert re.search(r"names +os.system, os.popen, 1 from the stack \(STACK_GLOBAL\)\n", ended(path).out)
    torch.save({"w": torch.zeros(3)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    output = ended(tmp_path / "x.pt", "--opcodes").out
    assert re.findall(r"^x\.pt, pickle \d$", output, re.MULTILINE) == [f"x.pt, pickle {n}" for n in range(1, 6)]


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"There is no file 'weights.pth'"):
        look("weights.pth")
    with pytest.raises(OptionError, match="--opcodes works on a file"):
        look(tmp_path, opcodes=True)
    with pytest.raises(RabbitLLMError, match="no checkpoint"):
        look(tmp_path)
    assert ended(tmp_path / "nothing" / "here").code == 1


# rows


def test_limit_and_skip(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({f"w{index:02}": torch.zeros(1) for index in range(20)}, path)
    text = run(path, "--limit", "3", "--skip", "4")
    assert re.findall(r"^w\d+", text, re.MULTILINE) == ["w04", "w05", "w06"]
    assert "… and 13 more; --limit 0 shows all" in text
    assert len(re.findall(r"^w\d+", run(path, "--limit", "0"), re.MULTILINE)) == 20
    assert len(re.findall(r"^w\d+", run(path), re.MULTILINE)) == 20
    assert "--skip 30 skips all of 20 tensors" in run(path, "--skip", "30")
    assert "'none' matches 0 tensors of 20" in run(path, "--name", "none")
    assert (record(path, "--limit", "3")["more"], record(path)["more"]) == (17, 0)


@pytest.mark.long
def test_closed_pipe(tmp_path: Path) -> None:
    path = write_llama_2_vocabulary(tmp_path)
    for options in ((), ("--json",)):
        command = [sys.executable, "-m", "rabbitllm", "inspect", str(path), *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as running:
            assert running.stdout is not None
            assert running.stderr is not None
            running.stdout.readline()
            running.stdout.close()
            assert running.stderr.read() == b""
            assert running.wait(600) == exit_codes.BROKEN_PIPE


def test_unprintable_letters_are_escaped(tmp_path: Path) -> None:
    path = write_llama_2_vocabulary(tmp_path)
    command = [sys.executable, "-m", "rabbitllm", "inspect", str(path), "--skip", "259", "--limit", "1"]
    result = subprocess.run(command, capture_output=True, cwd=ROOT, env={"PYTHONIOENCODING": "ascii"}, check=True)
    assert rb"259  \u2581\u2581" in result.stdout


def test_hostile_names(tmp_path: Path) -> None:
    hostile = {"\x1b[2J\x1b]0;owned\x07w": "a.safetensors", "b\u202eabc": "b.safetensors", "[red]c[/]": "c.bin"}
    path = tmp_path / "x.index.json"
    path.write_text(json.dumps({"weight_map": hostile, "metadata": {"\r": "\x1b[31m"}}))
    text = run(path)
    assert all(character.isprintable() or character == "\n" for character in text)
    for shown in (r"\x1b[2J\x1b]0;owned\x07w", r"b\u202eabc", "[red]c[/]", r"\r=\x1b[31m"):
        assert shown in text
    assert on_a_terminal(path, 60, RowChoice()).count("[red]c[/]") == 1
    assert record(path)["weight_map"] == hostile


def test_consecutive_layers_are_one_row() -> None:
    assert runs(["embed", "h.0", "h.1", "h.2", "x.3", "x.5", "x.6", "norm"]) == [
        "embed",
        "h.0 to h.2",
        "x.3",
        "x.5 to x.6",
        "norm",
    ]
    assert runs(["a", "a", "layers.٣", "layers.٤", "n." + "9" * 5000]) == [
        "a",
        "a",
        "layers.٣",
        "layers.٤",
        "n." + "9" * 5000,
    ]
    assert runs([]) == []


def test_very_many_tensors_are_listed(tmp_path: Path) -> None:
    """The largest checkpoints have 90,000."""
    path = tmp_path / "x.index.json"
    path.write_text(json.dumps({"weight_map": {f"model.layers.{n % 99}.w{n}": f"{n % 9}.bin" for n in range(90_000)}}))
    assert run(path).count("\n") > 90_000
