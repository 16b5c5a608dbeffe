"""`rabbitllm convert` as a user meets it: whatever can be split, as safetensors that transformers loads bit for bit."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors import safe_open

from rabbitllm.errors import (
    CheckpointNotFoundError,
    IncompleteSplitError,
    NotEnoughSpaceException,
    OptionError,
    SplitMismatchError,
    UnreadableFormatError,
    UnsafePickleError,
)
from rabbitllm.models._conversion_input import Conversion
from rabbitllm.models.convert import WORK_NAME, convert
from rabbitllm.storage.durable import Step
from tests.support.builders import (
    INDEX_NAME,
    TORCH_SINGLE_NAME,
    build_checkpoint,
    cut,
    llama_tensors,
    read_tensors,
    write_shards,
    write_torch,
)
from tests.support.commands import invoke
from tests.support.dying import Death
from tests.support.gguf_files import write_gguf
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.meta_files import tiny_llama, weights_of, write_meta
from tests.support.quantized import build_fp8
from tests.support.scenes import sample
from tests.support.splitting import Counter, contents, names_in, split
from tests.support.ticks import observe_ticks
from tests.support.tiny_models import dequantized, one_thread  # noqa: F401  a fixture that applies by itself
from tests.support.torch_files import archive, pack

ROOT = Path(__file__).parent.parent.parent
REPO = "org/model"


def run(*arguments: object) -> str:
    return invoke("convert", *arguments).stdout


def check(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """The folder has exactly these tensors, by its index and by its files."""
    index = json.loads((folder / INDEX_NAME).read_text())
    actual: dict[str, torch.Tensor] = {}
    files = names_in(folder, "*.safetensors")
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    for file in files:
        with safe_open(folder / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                assert index["weight_map"][name] == file
                actual[name] = opened.get_tensor(name)
    assert actual.keys() == tensors.keys() == index["weight_map"].keys()
    for name, tensor in tensors.items():
        assert actual[name].dtype is tensor.dtype
        assert actual[name].shape == tensor.shape
        assert torch.equal(raw(actual[name]), raw(tensor))
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert index["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert not [name for name in names_in(folder) if name.startswith(".") or "split" in name or name.endswith(".done")]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return dict(model.state_dict())


# what comes out


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_of_safetensors(tmp_path: Path, tied: bool, shards: int) -> None:
    folder = build_checkpoint(tmp_path / "model", "qwen3", tied=tied, shards=shards, dtype=torch.bfloat16)
    before = contents(folder)
    text = run(folder, "-o", tmp_path / "new")
    assert contents(folder) == before
    check(tmp_path / "new", read_tensors(folder))
    assert f"tensors       {len(read_tensors(folder))}, " in text
    assert "config.json" in text
    other_files = {name: data for name, data in before.items() if "safetensors" not in name}
    assert {name: (tmp_path / "new" / name).read_bytes() for name in other_files} == other_files
    expected, actual = loaded(folder), loaded(tmp_path / "new")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert (
        tokenizer.decode(tokenizer("What is a rabbit?")["input_ids"], skip_special_tokens=True) == "What is a rabbit?"
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_oss", "mamba2"])
def test_families(tmp_path: Path, family: str) -> None:
    folder = build_checkpoint(tmp_path / "model", family, dtype=torch.float32, shards=2)
    convert(folder, tmp_path / "new")
    check(tmp_path / "new", read_tensors(folder))
    expected, actual = loaded(folder), loaded(tmp_path / "new")
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_json_record(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "model", cut(llama_tensors(), 3))
    record = json.loads(run(source, "-o", tmp_path / "new", "--json"))
    shards = [*(tmp_path / "new").glob("*.safetensors")]
    tensors = read_tensors(tmp_path / "new")
    assert (record["folder"], record["shards"], record["tensors"]) == (str(tmp_path / "new"), len(shards), len(tensors))
    assert record["nbytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert record["before"] is False
    assert json.loads(run(source, "-o", tmp_path / "new", "--json"))["before"] is True


def test_a_checkpoint_of_torch_with_tensors_that_share_bytes(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "plain", "llama", tied=True, dtype=torch.float16)
    tensors = read_tensors(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].t().contiguous().t()
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / TORCH_SINGLE_NAME)
    convert(folder, tmp_path / "new")
    check(tmp_path / "new", tensors)
    expected, actual = loaded(folder), loaded(tmp_path / "new")
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("ranks", [1, 4])
def test_checkpoint_in_metas_format(tmp_path: Path, ranks: int) -> None:
    model = tiny_llama(kv_heads=4)
    source = write_meta(tmp_path / "meta", model, ranks=ranks)
    before = contents(source)
    run(source, "-o", tmp_path / "new")
    check(tmp_path / "new", weights_of(model))
    assert contents(source) == before
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.bfloat16)
    assert {name: raw(tensor).tolist() for name, tensor in reloaded.state_dict().items()} == {
        name: raw(tensor).tolist() for name, tensor in model.state_dict().items()
    }


def test_a_checkpoint_of_torch_from_before_1_6(tmp_path: Path) -> None:
    tensors = llama_tensors()
    source = write_torch(tmp_path / "old", {TORCH_SINGLE_NAME: tensors}, legacy=True)
    run(source, "-o", tmp_path / "new")
    check(tmp_path / "new", tensors)


@pytest.mark.parametrize("name", ["consolidated.00.pth", "x.safetensors"])
def test_single_file_has_only_weights(tmp_path: Path, name: str) -> None:
    """Other files in its folder are not copied."""
    tensors = {
        "tok_embeddings.weight": torch.randn(8, 4),
        **{f"layers.{n}.attention.wq.weight": torch.randn(4, 4) for n in range(12)},
    }
    (tmp_path / "downloads").mkdir()
    for other in ("notes.txt", "package.json", "LICENSE"):
        (tmp_path / "downloads" / other).write_text("{}")
    if name.endswith(".pth"):
        torch.save({"model": tensors, "epoch": 3}, tmp_path / "downloads" / name)
    else:
        write_shards(tmp_path / "downloads", {name: tensors}, index=False)
        (tmp_path / "downloads" / "config.json").unlink()
    text = run(tmp_path / "downloads" / name, "-o", tmp_path / "new")
    check(tmp_path / "new", tensors)
    assert len(names_in(tmp_path / "new")) == 13 + 1
    assert "transformers needs a config.json" in text


def test_a_file_among_others_with_a_config(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "model", {"model.safetensors": llama_tensors()}, index=False)
    other = llama_tensors(seed=1)
    torch.save(other, folder / "other.pth")
    convert(folder / "other.pth", tmp_path / "new")
    check(tmp_path / "new", other)
    assert (tmp_path / "new" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    convert(folder, tmp_path / "first")
    check(tmp_path / "first", llama_tensors())


@pytest.mark.parametrize("options", [{}, {"sequential": True}])
def test_a_repository(
    tmp_path: Path, hub_environment: HubEnvironment, local_hub: LocalHub, options: dict[str, Any]
) -> None:
    folder = build_checkpoint(tmp_path / "hub" / REPO, "llama", shards=3)
    converted = convert(REPO, tmp_path / "new", **options)
    check(tmp_path / "new", read_tensors(folder))
    expected, actual = loaded(folder), loaded(tmp_path / "new")
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert json.loads((tmp_path / "new" / INDEX_NAME).read_text())["metadata"]["converted_from"]["name"] == REPO
    assert dataclass_without_time(convert(REPO, tmp_path / "new", **options)) == dataclass_without_time(converted)
    with pytest.raises(SplitMismatchError, match=f"holds the conversion of {REPO}; requested was"):
        convert(folder, tmp_path / "new")


def dataclass_without_time(converted: Conversion) -> tuple[Any, ...]:
    return converted.folder, converted.shards, converted.tensors, converted.nbytes, converted.beside


def test_a_repository_without_a_config(tmp_path: Path, hub_environment: HubEnvironment) -> None:
    folder = tmp_path / "hub" / REPO
    folder.mkdir(parents=True)
    tensors = llama_tensors()
    torch.save(tensors, folder / "weights.pth")
    assert "transformers needs a config.json" in run(REPO, "-o", tmp_path / "new")
    check(tmp_path / "new", tensors)


def test_folder_of_chat_templates_is_copied(tmp_path: Path) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    converted = convert(folder, tmp_path / "new")
    assert "additional_chat_templates/tool.jinja" in converted.beside
    assert (tmp_path / "new" / "additional_chat_templates" / "tool.jinja").read_text() == "{{ messages }}"
    assert not (tmp_path / "new" / WORK_NAME).exists()


# the original


def test_original_is_deleted_only_on_request(tmp_path: Path) -> None:
    tensors = llama_tensors()
    folder = write_shards(tmp_path / "model", cut(tensors, 3))
    convert(folder, tmp_path / "sequential", sequential=True)
    assert names_in(folder) == ["config.json", INDEX_NAME]
    check(tmp_path / "sequential", tensors)
    again = write_shards(tmp_path / "again", cut(tensors, 3))
    convert(again, tmp_path / "deleted", delete_original=True)
    assert names_in(again) == ["config.json"]
    check(tmp_path / "deleted", tensors)
    torch.save(tensors, tmp_path / "alone.pth")
    convert(tmp_path / "alone.pth", tmp_path / "file", sequential=True)
    assert not (tmp_path / "alone.pth").exists()
    check(tmp_path / "file", tensors)
    # made again, the very same calls have nothing left to do
    assert convert(folder, tmp_path / "sequential", sequential=True).before
    assert convert(again, tmp_path / "deleted", delete_original=True).before
    assert convert(tmp_path / "alone.pth", tmp_path / "file", sequential=True).before


def test_a_split_in_the_folder_does_not_hinder_the_same_call(tmp_path: Path) -> None:
    folder, new = write_shards(tmp_path / "model", cut(llama_tensors(), 3)), tmp_path / "new"
    split(folder, sequential=False)

    def stop(number: int, step: Step) -> None:
        if step.kind == "rename" and step.path.name == f"{INDEX_NAME}.part":
            raise KeyboardInterrupt

    with observe_ticks(Counter(stop)), pytest.raises(KeyboardInterrupt):
        convert(folder, new, sequential=True)
    assert not names_in(folder, "*.safetensors")
    convert(folder, new, sequential=True)
    check(new, llama_tensors())
    assert convert(folder, new, sequential=True).before


# what is refused


def test_non_empty_folder_is_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "model", cut(llama_tensors(), 2))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    with pytest.raises(OptionError, match=r"thesis\.txt"):
        convert(folder, tmp_path / "full")
    assert contents(tmp_path / "full") == {"thesis.txt": b"years of work"}
    before = contents(folder)
    with pytest.raises(OptionError, match="was not converted by RabbitLLM"):
        convert(folder, folder)
    assert contents(folder) == before
    with pytest.raises(OptionError, match=r"new\.gguf is named as a file"):
        convert(folder, tmp_path / "new.gguf")
    with pytest.raises(OptionError, match="is a file"):
        convert(folder, tmp_path / "full" / "thesis.txt")


def test_advice_keeps_a_conversion_that_has_the_only_copy(tmp_path: Path) -> None:
    """Some shards are used up, and one of the others is edited."""
    model, new = write_shards(tmp_path / "one", cut(llama_tensors(), 3)), tmp_path / "new"

    def stop(index: int, step: Step) -> None:
        if step.kind == "unlink" and step.path.name == "model-00002-of-00003.safetensors":
            raise Death

    with observe_ticks(Counter(stop)), pytest.raises(Death):
        convert(model, new, sequential=True)
    assert not (model / "model-00001-of-00003.safetensors").exists()
    last = model / "model-00003-of-00003.safetensors"
    before, raw, time = contents(new), last.read_bytes(), last.stat().st_mtime_ns
    last.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(SplitMismatchError, match="has other contents") as caught:
        convert(model, new, sequential=True)
    assert "restore its files, and make the same call again" in caught.value.remedy
    assert "Delete this one only if every shard of its original still exists" in caught.value.remedy
    assert contents(new) == before
    last.write_bytes(raw)
    os.utime(last, ns=(time, time))
    assert not convert(model, new, sequential=True).before


def test_finished_folder_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    first = write_shards(tmp_path / "one", cut(llama_tensors(), 2))
    second = write_shards(tmp_path / "two", cut(llama_tensors(seed=1), 2))
    convert(first, tmp_path / "new")
    before = contents(tmp_path / "new")
    assert convert(first, tmp_path / "new").before
    with pytest.raises(
        SplitMismatchError, match=r"holds the conversion of one; requested was .*two: its shard .* has other"
    ):
        convert(second, tmp_path / "new")
    assert contents(tmp_path / "new") == before


# a split whose original is gone


@pytest.mark.parametrize("named", ["the split", "its folder"])
@pytest.mark.parametrize("shards", [1, 2])
def test_uncompressed_split_restores_the_checkpoint(tmp_path: Path, named: str, shards: int) -> None:
    folder = build_checkpoint(tmp_path / "model", "qwen3", tied=True, shards=3, dtype=torch.bfloat16)
    before, other_files = read_tensors(folder), {n: d for n, d in contents(folder).items() if "safetensors" not in n}
    split_folder = split(folder, folder, sequential=True)
    assert not list(folder.glob("*.safetensors"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rabbitllm.models.convert.SHARD_BYTES", 1 << 40 if shards == 1 else 60_000)
        converted = convert(split_folder if named == "the split" else folder, tmp_path / "new")
        second = convert(split_folder, tmp_path / "new")
    assert (converted.shards == 1) is (shards == 1)
    assert (converted.before, second.before) == (False, True)
    actual = read_tensors(tmp_path / "new")
    assert actual.keys() == before.keys()
    assert all(torch.equal(raw(actual[name]), raw(before[name])) for name in before)
    assert {name: (tmp_path / "new" / name).read_bytes() for name in other_files} == other_files
    expected, loads = loaded(tmp_path / "new"), read_tensors(tmp_path / "new")
    assert all(torch.equal(expected[name], loads[name]) for name in loads)
    other = build_checkpoint(tmp_path / "other", "qwen3", tied=True, shards=3, dtype=torch.bfloat16, seed=9)
    with pytest.raises(SplitMismatchError, match="conversion of another model"):
        convert(split(other, tmp_path / "layers", sequential=False), tmp_path / "new")


@pytest.mark.parametrize("compression", ["4bit", "8bit", "4bit-double"])
def test_compressed_split_equals_bitsandbytes(tmp_path: Path, compression: str) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama", shards=2, dtype=torch.bfloat16)
    reference = dequantized(folder, tmp_path / "reference", compression, torch.bfloat16)
    split(folder, folder, compression=compression, sequential=True)
    convert(folder, tmp_path / "new")
    expected, actual = read_tensors(reference), read_tensors(tmp_path / "new")
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype is tensor.dtype
        assert torch.equal(raw(actual[name]), raw(tensor))


@pytest.mark.parametrize("to", ["safetensors", "gguf"])
def test_split_of_rabbitllm_1_without_some_tensors_is_refused(tmp_path: Path, to: str) -> None:
    """It has no list of its tensors: the config tells that three of them are missing."""
    golden = ROOT / "tests" / "golden"
    unsound = golden / "rabbitllm-1.1.0-none-UNSOUND-3-tensors-missing" / "splitted_model"
    folder = Path(shutil.copytree(unsound, tmp_path / "model"))
    shutil.copy(golden / "model-4-shards" / "config.json", folder)
    target = tmp_path / ("new.gguf" if to == "gguf" else "new")
    command = ["convert", str(folder), "-o", str(target), "--to", to]
    with pytest.raises(IncompleteSplitError, match="lacks 3 of the"):
        invoke(*command)
    assert not target.exists()


def test_a_4bit_split_says_what_it_becomes_as_gguf(tmp_path: Path) -> None:
    """A type of GGUF that holds its codes does not exist, so the file is several times as large."""
    tiny_llama(hidden=128, intermediate=256).save_pretrained(tmp_path / "model")
    directory = split(tmp_path / "model", sequential=False, compression="4bit")
    (line,) = re.findall("matrices +(.*)", run(directory, "-o", tmp_path / "new.gguf", "--to", "gguf"))
    matrices = [tensor for tensor in gguf.GGUFReader(tmp_path / "new.gguf").tensors if len(tensor.shape) > 1]
    assert {tensor.tensor_type.name for tensor in matrices} == {"BF16"}
    assert line.rstrip() == f"{len(matrices)} BF16 (decoded from 4bit)"


@pytest.mark.parametrize("compression", ["none", "8bit"])
def test_a_directory_of_rabbitllm_1_1(tmp_path: Path, compression: str) -> None:
    """It has no config; that is in the folder whose split it was."""
    golden = ROOT / "tests" / "golden"
    home = Path(shutil.copytree(golden / "model-2-shards", tmp_path / "model"))
    before = read_tensors(home)
    name = "splitted_model" if compression == "none" else f"splitted_model.{compression}"
    shutil.copytree(golden / f"rabbitllm-1.1.0-{compression}" / name, home / name)
    for shard in home.glob("*.safetensors"):
        shard.unlink()
    converted = convert(home, tmp_path / "new")
    assert "config.json" in converted.beside
    actual = read_tensors(tmp_path / "new")
    assert actual.keys() == before.keys()
    for key, tensor in before.items():
        assert actual[key].dtype is tensor.dtype
        if compression == "none":
            assert torch.equal(raw(actual[key]), raw(tensor))
    loaded(tmp_path / "new")


def test_published_codes_are_kept(tmp_path: Path) -> None:
    folder = build_fp8(tmp_path / "model", "llama")
    before = read_tensors(folder)
    split(folder, folder, sequential=True)
    convert(folder, tmp_path / "new")
    actual = read_tensors(tmp_path / "new")
    assert actual.keys() == before.keys()
    assert all(torch.equal(raw(actual[name]), raw(before[name])) for name in before)


@pytest.mark.parametrize("types", ["mixed", "Q4_K", "F32"])
@pytest.mark.parametrize("outtype", ["bf16", "f16", "f32"])
def test_a_gguf_file_at_a_chosen_dtype(tmp_path: Path, types: str, outtype: str) -> None:
    """Half the size of float32; each value is rounded once."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[outtype]
    file = write_gguf(tmp_path / "model.gguf", types=types)
    run(file, "-o", tmp_path / "as is")
    exact = read_tensors(tmp_path / "as is")
    assert {tensor.dtype for tensor in exact.values()} == {torch.float32}
    output = tmp_path / "new"
    run(file, "-o", output, "--outtype", outtype)
    check(output, {name: tensor.to(dtype) for name, tensor in exact.items()})
    assert transformers.AutoModelForCausalLM.from_pretrained(output, dtype="auto").dtype is dtype
    with pytest.raises(SplitMismatchError, match=f"with outtype='{outtype}', not 'auto'"):
        convert(file, output)
    assert "complete already" in run(file, "-o", output, "--outtype", outtype)


@pytest.mark.parametrize("types", ["BF16", "F16", "F32"])
def test_the_split_of_a_plain_gguf_file_becomes_the_same_tensors(tmp_path: Path, types: str) -> None:
    """Norms, which llama.cpp writes in float32, are not rounded to the dtype of the matrices."""
    file, directories = write_gguf(tmp_path / "model.gguf", types=types), [tmp_path / "file", tmp_path / "split"]
    data = next(tensor for tensor in gguf.GGUFReader(file, "r+").tensors if tensor.name == "output_norm.weight").data
    data[0] = value = 1 + 2**-20
    convert(file, directories[0])
    convert(split(file), directories[1])
    exact, same = map(read_tensors, directories)
    assert exact.keys() == same.keys()
    assert all(torch.equal(exact[name], same[name]) and exact[name].dtype is same[name].dtype for name in exact)
    assert exact["model.norm.weight"][0].item() == value


@pytest.mark.parametrize("types", ["mixed", "Q8_0"])
def test_the_split_of_a_gguf_file_becomes_what_the_file_becomes(tmp_path: Path, types: str) -> None:
    """The file may be gone. bfloat16, in which the model computes, would round the values of its blocks."""
    file, directories = write_gguf(tmp_path / "model.gguf", types=types), [tmp_path / "file", tmp_path / "split"]
    convert(file, directories[0])
    convert(split(file), directories[1])
    expected, actual = (read_tensors(directory) for directory in directories)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name].float(), expected[name]) for name in expected)  # parts of F16 stay float16
    dtypes = [json.loads((directory / "config.json").read_text())["dtype"] for directory in directories]
    assert dtypes[0] == dtypes[1]


@pytest.mark.parametrize("part", ["split.json.part", f"{INDEX_NAME}.part"])
def test_a_chosen_dtype_while_a_conversion_is_unfinished(tmp_path: Path, part: str) -> None:
    file, new = write_gguf(tmp_path / "model.gguf"), tmp_path / "new"

    def stop(number: int, step: Step) -> None:
        if step.kind == "rename" and step.path.name == part:
            raise KeyboardInterrupt

    with observe_ticks(Counter(stop)), pytest.raises(KeyboardInterrupt):
        convert(file, new, outtype="bf16")
    with pytest.raises(SplitMismatchError, match="with outtype='bf16', not 'f32'"):
        convert(file, new, outtype="f32")
    convert(file, new, outtype="bf16")
    assert {tensor.dtype for tensor in read_tensors(new).values()} == {torch.bfloat16}


def test_dtype_without_conversion_is_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "model", cut(llama_tensors(), 2))
    file = write_gguf(tmp_path / "model.gguf")
    for source in (split(folder, tmp_path / "splits", sequential=False), split(file, sequential=False)):
        with pytest.raises(OptionError, match="is a split directory; outtype applies only to GGUF files"):
            convert(source, tmp_path / "new", outtype="bf16")
    for source in (folder, folder / "model-00001-of-00002.safetensors"):
        with pytest.raises(OptionError, match="is not a GGUF checkpoint; its tensors keep their dtypes"):
            convert(source, tmp_path / "new", outtype="bf16")
    with pytest.raises(OptionError, match="would be found after shards are deleted"):
        convert(file, tmp_path / "new", outtype="f16", sequential=True)
    convert(file, tmp_path / "new", outtype="bf16")  # what was refused left nothing behind


def test_a_value_beyond_float16_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", types="F32")
    tensors = gguf.GGUFReader(file, "r+").tensors
    next(tensor for tensor in tensors if tensor.name == "output_norm.weight").data[3] = 1e6
    with pytest.raises(UnreadableFormatError, match=r"norm.weight has the value 1000000.0, which exceeds float16"):
        convert(file, tmp_path / "new", outtype="f16")
    assert file.exists()
    convert(file, tmp_path / "other", outtype="bf16")


def test_unsupported_sources_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_shards(tmp_path / "model", cut(llama_tensors(), 2))
    new = tmp_path / "new"
    with pytest.raises(OptionError, match="is one of the 2 shards of a checkpoint"):
        convert(folder / "model-00001-of-00002.safetensors", new)
    with pytest.raises(OptionError, match="is an index"):
        convert(folder / INDEX_NAME, new)
    path = split(folder, tmp_path / "layers", sequential=False)
    for to, target in (("safetensors", new), ("gguf", tmp_path / "new.gguf")):
        with pytest.raises(OptionError, match=rf"one of the 6 layer files of a split(?s:.)*Use the folder: {path}\."):
            convert(path / "model.norm.safetensors", target, to=to)
    for deleting in ({"sequential": True}, {"delete_original": True}):
        with pytest.raises(OptionError, match="is a split directory"):
            convert(path, new, **deleting)
    with pytest.raises(CheckpointNotFoundError, match="There is no file"):
        convert(tmp_path / "nothing.pth", new)
    with pytest.raises(NotEnoughSpaceException, match=r"to \d+, or write to another disk \(--output\)\.$"):
        convert(folder, new, max_disk=1000)
    with pytest.raises(NotEnoughSpaceException, match=r"\(rabbitllm convert --min-free-disk\)"):
        convert(folder, new, min_free_disk="1000TB")
    (tmp_path / "evil.pth").write_bytes(pack(archive(b"\x80\x02cos\nsystem\n.")))
    with pytest.raises(UnsafePickleError):
        convert(tmp_path / "evil.pth", new)
    assert not new.exists()
    assert len(names_in(folder, "*.safetensors")) == 2


# crashes


SOURCES = {
    "a folder": lambda folder: write_shards(folder, cut(llama_tensors(2), 3)),
    "a torch folder": lambda folder: write_torch(folder, {TORCH_SINGLE_NAME: llama_tensors(2)}),
}


OPTIONS = [{}, {"sequential": True}, {"delete_original": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("source_format", SOURCES)
def test_interrupted_conversion_is_resumed(tmp_path: Path, source_format: str, options: dict[str, Any]) -> None:
    """The same call finishes, with the same files."""
    source, new = tmp_path / "model", tmp_path / "new"
    counter = Counter()
    SOURCES[source_format](source)
    with observe_ticks(counter):
        convert(source, new, **options)
    expected, remaining = contents(new), contents(source)
    check(new, llama_tensors(2))
    for step_number in {*sample(counter.count, 5), *range(counter.count)[-40::10]}:
        for folder in (source, new):
            shutil.rmtree(folder)
        SOURCES[source_format](source)

        def stop(number: int, step: Step, step_number: int = step_number) -> None:
            if number >= step_number:  # whatever tries to tidy up fails too, as it would in a process that is gone
                raise KeyboardInterrupt

        with observe_ticks(Counter(stop)), pytest.raises(KeyboardInterrupt):
            convert(source, new, **options)
        assert (new / INDEX_NAME).exists() <= ({*contents(new)} >= {*expected})
        convert(source, new, **options)
        assert contents(new) == expected
        assert contents(source) == remaining


@pytest.mark.parametrize("moment", ["split.json.part", "split.is.whole.part", f"{INDEX_NAME}.part"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_damage_between_two_calls_is_no_part_of_a_checkpoint(
    tmp_path: Path, options: dict[str, Any], moment: str
) -> None:
    """A checkpoint has no checksums: nothing would tell of it later."""
    source, new, kept = tmp_path / "model", tmp_path / "new", tmp_path / "kept"
    write_shards(source, cut(llama_tensors(2), 3))
    shutil.copytree(source, kept / "model")

    def stop(number: int, step: Step) -> None:
        if step.kind == "rename" and step.path.name == moment:
            raise KeyboardInterrupt

    with observe_ticks(Counter(stop)), pytest.raises(KeyboardInterrupt):
        convert(source, new, **options)
    file = sorted(new.rglob("*.safetensors"))[-1]
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 4
    file.write_bytes(raw)
    shards, remaining = names_in(new, "*.safetensors*"), contents(source)
    with pytest.raises(IncompleteSplitError, match=f"{file.name} differs from what") as error:
        convert(source, new, **options)
    if "No shard of" in error.value.problem:
        with pytest.raises(IncompleteSplitError, match=f"{file.name} differs from what was written") as error:
            convert(source, new)
    assert names_in(new, "*.safetensors*") == shards
    assert contents(source) == remaining
    command = shlex.split(error.value.remedy.partition("Or repair it: ")[2])
    assert command[-2:] == ["--original", str(source)]
    invoke(*command[1:-1], kept / "model")
    convert(source, new, **options)
    check(new, llama_tensors(2))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_another_checkpoint_while_one_is_unfinished(tmp_path: Path, options: dict[str, Any]) -> None:
    second = write_shards(tmp_path / "two", cut(llama_tensors(seed=1), 2))
    untouched = contents(second)
    stopped_at = {"split": "split.json.part", "moved": f"{INDEX_NAME}.part"}
    for moment, name in stopped_at.items():
        new = tmp_path / moment / "new"

        def stop(number: int, step: Step, name: str = name) -> None:
            if step.kind == "rename" and step.path.name == name:
                raise KeyboardInterrupt

        first = write_shards(tmp_path / moment / "one", cut(llama_tensors(), 2))
        with observe_ticks(Counter(stop)), pytest.raises(KeyboardInterrupt):
            convert(first, new, **options)
        before = contents(new)
        with pytest.raises(SplitMismatchError):
            convert(second, new, **options)
        assert contents(new) == before
        assert contents(second) == untouched
        convert(first, new, **options)
        check(new, llama_tensors())


@pytest.mark.parametrize("name", ["mine.txt", "mine.safetensors", "splitted_model/mine.md"])
@pytest.mark.parametrize("work", [WORK_NAME, f"{WORK_NAME}.F32"])
def test_a_work_folder_with_files_of_others_is_refused(tmp_path: Path, work: str, name: str) -> None:
    source = write_shards(tmp_path / "source", cut(llama_tensors(), 2))
    mine = tmp_path / "new" / work / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(OptionError, match=rf"holds files that RabbitLLM did not write: {mine.name}\."):
        convert(source, tmp_path / "new")
    assert mine.read_text() == "mine"


def test_words_of_a_conversion(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf")
    ran = invoke("convert", file, "-o", tmp_path / "new")
    assert re.search(r"^converted, \d+ files, .* in .*; peak disk", ran.stderr, re.MULTILINE)
    assert "split" not in ran.stderr + ran.stdout
