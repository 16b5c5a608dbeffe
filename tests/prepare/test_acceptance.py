"""A checkpoint that could not be loaded after a split is refused before its first shard is deleted.

Each fault is one that headers, config and tokenizer files show. `from_pretrained`, `pull`, `plan` and `convert` refuse
it by the same check.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file

import rabbitllm
from rabbitllm import prepare
from rabbitllm.auto_model import AutoModel, prepare_model
from rabbitllm.base.options import RunOptions, ShardPolicy, SplitOptions
from rabbitllm.engine import devices
from rabbitllm.errors import (
    CheckpointError,
    CorruptVocabularyError,
    IncompleteCheckpointError,
    IncompleteSplitError,
    NotEnoughMemoryError,
    RabbitLLMError,
    UnknownArchitectureError,
)
from rabbitllm.estimate.report import show
from rabbitllm.models.convert import convert
from rabbitllm.models.pull import dry_run, pull
from rabbitllm.rabbitllm_1_names import split_and_save_layers
from rabbitllm.store.layer_store import LayerStore, WeightFiles
from rabbitllm.store.manifest import JOURNAL_NAME, MANIFEST_NAME
from tests.support.builders import INDEX_NAME, build_checkpoint, read_tensors, reshard
from tests.support.load_requests import asked
from tests.support.quick_measuring import quick_measuring  # noqa: F401  a fixture that applies by itself
from tests.support.splitting import Call, interrupted

SHARDS = 3
LOAD: dict[str, Any] = {"device": "cpu", "show_layer_progress": False}


def edit_config(folder: Path, name: str = "config.json", **values: Any) -> None:
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**content, **values}))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change tensors of a checkpoint; index and shards agree afterwards."""
    tensors = read_tensors(folder)
    change(tensors)
    for path in (*folder.glob("*.safetensors"), folder / INDEX_NAME):
        path.unlink(missing_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    count = len(tensors)
    turns = {name: index * SHARDS // count for index, name in enumerate(tensors)}
    reshard(folder, turns.__getitem__)


def too_many_layers(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=9)


def too_few_layers(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=1)


def absurdly_many_layers(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=10**9)


def a_missing_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.weight"))


def a_transposed_tensor(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = tensors[name].T.contiguous()

    rewrite(folder, change)


def _as_type(dtype: torch.dtype) -> Callable[[Path], None]:
    def fault(folder: Path) -> None:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            name = "model.layers.1.mlp.up_proj.weight"
            tensors[name] = torch.zeros(tensors[name].shape, dtype=dtype)

        rewrite(folder, change)

    fault.__name__ = f"{dtype} for a weight"
    return fault


def another_model(folder: Path) -> None:
    """Most of the weights belong to another model."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["talker.weight"] = torch.zeros(1024, 1024)

    rewrite(folder, change)


def codes_without_a_quantization_config(folder: Path) -> None:
    """As ModelOpt publishes FP8, without the file that describes it."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.up_proj"
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale"] = torch.tensor(0.01)

    rewrite(folder, change)


def a_config_of_wrong_types(folder: Path) -> None:
    edit_config(folder, hidden_size="large")


def a_class_of_another_kind(folder: Path) -> None:
    edit_config(folder, architectures=["LlamaForRewards"])


def a_negative_size(folder: Path) -> None:
    edit_config(folder, intermediate_size=-5)


def a_deep_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", "rope_scaling": ' + "[" * 5000 + "]" * 5000 + "}")


def a_generation_config_of_wrong_types(folder: Path) -> None:
    edit_config(folder, "generation_config.json", eos_token_id={"a": []}, max_new_tokens="many")


def a_tokenizer_of_wrong_types(folder: Path) -> None:
    edit_config(folder, "tokenizer.json", model=7)


def a_tokenizer_config_of_wrong_types(folder: Path) -> None:
    edit_config(folder, "tokenizer_config.json", extra_special_tokens=[{"content": []}, 7], added_tokens_decoder=[1])


FAULTS: list[tuple[Callable[[Path], None], type[RabbitLLMError], str]] = [
    (too_many_layers, IncompleteCheckpointError, "lacks 63 of the"),
    (too_few_layers, IncompleteCheckpointError, "more layers than its config: model.layers.1"),
    (absurdly_many_layers, IncompleteCheckpointError, "num_hidden_layers=1,000,000,000"),
    (a_missing_tensor, IncompleteCheckpointError, "lacks 1 of the .* model.layers.1.mlp.up_proj.weight"),
    (a_transposed_tensor, IncompleteCheckpointError, r"up_proj.weight has shape \(64, 128\)"),
    (_as_type(torch.int64), IncompleteCheckpointError, "up_proj.weight has the dtype I64"),
    (_as_type(torch.bool), IncompleteCheckpointError, "up_proj.weight has the dtype BOOL"),
    (_as_type(torch.complex64), IncompleteCheckpointError, "up_proj.weight has the dtype C64"),
    (another_model, IncompleteCheckpointError, "talker.weight"),
    (codes_without_a_quantization_config, IncompleteCheckpointError, r"codes \(F8_E4M3\) and .*weight_scale"),
    (a_config_of_wrong_types, UnknownArchitectureError, "hidden_size"),
    (a_class_of_another_kind, UnknownArchitectureError, "LlamaForRewards"),
    (a_negative_size, UnknownArchitectureError, "cannot build the model"),
    (a_deep_config, CheckpointError, "config.json"),
    (a_generation_config_of_wrong_types, UnknownArchitectureError, "generation settings"),
    (a_tokenizer_of_wrong_types, CorruptVocabularyError, "cannot read the tokenizer"),
    (a_tokenizer_config_of_wrong_types, CorruptVocabularyError, "cannot read the tokenizer"),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "model"
    build_checkpoint(folder, "llama", shards=SHARDS, num_hidden_layers=2)
    transformers.GenerationConfig(eos_token_id=2).save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def routes(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """All calls that would delete shards, by name."""
    yield "sequential", lambda: AutoModel.from_pretrained(folder, sequential_shard_processing=True, **LOAD)
    yield (
        "4bit",
        lambda: AutoModel.from_pretrained(folder, compression="4bit", sequential_shard_processing=True, **LOAD),
    )
    yield "delete_original", lambda: AutoModel.from_pretrained(folder, delete_original=True, **LOAD)
    yield "pull", lambda: pull(asked(folder, sequential=True, device="cpu"))
    yield "convert", lambda: convert(folder, folder.parent / "converted", sequential=True)
    yield "RabbitLLM 1.1's", lambda: split_and_save_layers(folder, sequential_shard_processing=True)


@pytest.mark.parametrize(("fault", "error_class", "text"), FAULTS, ids=[fault.__name__ for fault, _, _ in FAULTS])
def test_faults_are_refused_before_the_first_change(
    checkpoint: Path, fault: Callable[[Path], None], error_class: type[RabbitLLMError], text: str
) -> None:
    fault(checkpoint)
    before = contents(checkpoint)
    for name, call in routes(checkpoint):
        with pytest.raises(error_class, match=text):
            call()
        assert contents(checkpoint) == before, name
        assert not [path.name for path in checkpoint.parent.iterdir() if path != checkpoint], name


@pytest.mark.parametrize(
    ("fault", "error_class", "text"),
    [entry for entry in FAULTS if entry[1] is not CorruptVocabularyError],
    ids=[fault.__name__ for fault, error_class, _ in FAULTS if error_class is not CorruptVocabularyError],
)
def test_plan_reports_faults_and_names_no_call(
    checkpoint: Path, fault: Callable[[Path], None], error_class: type[RabbitLLMError], text: str
) -> None:
    fault(checkpoint)
    plan = rabbitllm.plan(checkpoint, bandwidth="1GB", device="cpu")
    assert plan.choice is None
    assert not any(route.fits for outlook in plan.outlooks for route in outlook.routes)
    assert all(outlook.obstacle for outlook in plan.outlooks)
    assert not dry_run(asked(checkpoint, sequential=True, device="cpu")).fits


def test_faulty_checkpoints_are_converted_without_deletion(checkpoint: Path, tmp_path: Path) -> None:
    """A copy loses no data, even if transformers cannot load it."""
    too_many_layers(checkpoint)
    convert(checkpoint, tmp_path / "converted")
    before, after = read_tensors(checkpoint), read_tensors(tmp_path / "converted")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_last_shard_is_deleted_after_acceptance(checkpoint: Path) -> None:
    """A layer file that is damaged during writing is found while the last shard still exists."""
    source = prepare.find(prepare.ModelSpec(str(checkpoint)))
    options, names = (
        SplitOptions(shards=ShardPolicy.DELETE_USED),
        sorted(path.name for path in checkpoint.glob("*.safetensors")),
    )
    seen: list[tuple[bool, list[str]]] = []

    def accept(store: WeightFiles) -> None:
        shards = sorted(path.name for path in checkpoint.glob("*.safetensors"))
        seen.append((isinstance(store, LayerStore), shards))
        if isinstance(store, LayerStore):
            raise IncompleteSplitError("not this one")

    with pytest.raises(IncompleteSplitError, match="not this one"):
        prepare.ensure_split(source, options, accept=accept)
    assert seen == [(False, names), (True, names[-1:])]
    assert (source.split_folder / JOURNAL_NAME).exists()
    assert not (source.split_folder / MANIFEST_NAME).exists()
    expected = transformers.AutoModelForCausalLM.from_pretrained
    with prepare.acceptance(source, RunOptions(device="cpu")) as sound:
        prepare.ensure_split(source, options, accept=sound)
    assert not list(checkpoint.glob("model-*.safetensors"))
    assert (source.split_folder / MANIFEST_NAME).exists()
    assert expected


def test_unfinished_split_of_an_unloadable_model_keeps_its_shards(checkpoint: Path) -> None:
    """An earlier version began it without a check; no further shard is deleted."""
    a_missing_tensor(checkpoint)
    source = prepare.find(prepare.ModelSpec(str(checkpoint)))

    class Stopped(Exception):
        pass

    from rabbitllm.storage import durable

    unlinked = 0

    def stop(step: durable.Step) -> None:
        nonlocal unlinked
        if step.kind == "unlink" and step.path.parent == checkpoint:
            unlinked += 1
            if unlinked == 2:
                raise Stopped

    with durable.observe_steps(stop), pytest.raises(Stopped):
        prepare.ensure_split(source, SplitOptions(shards=ShardPolicy.DELETE_USED))
    before = contents(checkpoint)
    assert len(list(checkpoint.glob("model-*.safetensors"))) == SHARDS - 1
    with pytest.raises(IncompleteCheckpointError, match="lacks 1 of the"):
        AutoModel.from_pretrained(checkpoint, sequential_shard_processing=True, **LOAD)
    assert contents(checkpoint) == before


@pytest.mark.parametrize("fault", [too_many_layers, too_few_layers, a_tokenizer_of_wrong_types])
def test_an_edit_between_two_calls_is_refused_before_a_further_shard_is_deleted(
    checkpoint: Path, tmp_path: Path, fault: Callable[[Path], None]
) -> None:
    """The check reads config and tokenizer of now, not the split's copies of them."""
    sound = shutil.copytree(checkpoint, tmp_path / "sound", ignore=shutil.ignore_patterns("*.safetensors"))
    interrupted(Call(str(checkpoint)))
    fault(checkpoint)
    shards = sorted(checkpoint.glob("model-*.safetensors"))
    assert len(shards) == SHARDS - 1
    with pytest.raises(RabbitLLMError):
        AutoModel.from_pretrained(checkpoint, sequential_shard_processing=True, **LOAD)
    assert sorted(checkpoint.glob("model-*.safetensors")) == shards
    shutil.copytree(sound, checkpoint, dirs_exist_ok=True)
    AutoModel.from_pretrained(checkpoint, sequential_shard_processing=True, **LOAD)


def test_a_resumed_split_loads_the_tokenizer_of_now(checkpoint: Path) -> None:
    interrupted(Call(str(checkpoint)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(checkpoint)
    model: Any = AutoModel.from_pretrained(checkpoint, sequential_shard_processing=True, **LOAD)
    assert model.tokenizer.encode("zebra") == tokenizer.encode("zebra")


def test_delete_original_checks_a_finished_split_first(checkpoint: Path) -> None:
    """The split was made while the original was kept; config.json in it was changed since."""
    source = prepare.find(prepare.ModelSpec(str(checkpoint)))
    prepare.ensure_split(source, SplitOptions())
    for folder in (checkpoint, source.split_folder):
        edit_config(folder, num_hidden_layers=9)
    before = sorted(checkpoint.glob("model-*.safetensors"))
    with pytest.raises(IncompleteSplitError, match="lacks"):
        AutoModel.from_pretrained(checkpoint, delete_original=True, **LOAD)
    assert sorted(checkpoint.glob("model-*.safetensors")) == before


def a_pointer_as_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


@pytest.mark.parametrize("fault", [a_tokenizer_of_wrong_types, a_pointer_as_tokenizer])
def test_a_malformed_tokenizer_is_named_where_it_can_be_mended(checkpoint: Path, fault: Callable[[Path], None]) -> None:
    """Not as the copy in the split directory, which is removed."""
    fault(checkpoint)
    with pytest.raises(CorruptVocabularyError) as refused:
        AutoModel.from_pretrained(checkpoint, **LOAD)
    assert str(checkpoint) in refused.value.problem
    assert "splitted_model" not in refused.value.problem


def test_finished_split_loads_with_any_tokenizer(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The weights are sound, and the caller may have another tokenizer."""
    AutoModel.from_pretrained(checkpoint, **LOAD)
    folder = checkpoint / "splitted_model"
    a_tokenizer_of_wrong_types(folder)
    model = AutoModel.from_pretrained(folder, **LOAD)
    assert model.tokenizer is None
    assert "No tokenizer could be read" in caplog.text


def test_leftover_quantization_settings_are_ignored(checkpoint: Path) -> None:
    """It writes `quant_method: gguf` into the config of what it dequantized, and loads that."""
    edit_config(checkpoint, quantization_config={"quant_method": "gguf"})
    ids = torch.tensor([[1, 40, 81, 7]])
    plain = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    plan = rabbitllm.plan(checkpoint, bandwidth="1GB", device="cpu")
    assert plan.choice is not None
    assert plan.anatomy is not None
    assert {outlook.compression for outlook in plan.outlooks} >= {None, "4bit"}
    model = AutoModel.from_pretrained(checkpoint, sequential_shard_processing=True, **LOAD)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, plain(ids).logits)


def test_shards_that_contradict_the_index_are_refused(checkpoint: Path) -> None:
    """A tensor that is in the index and in no shard."""
    shard = sorted(checkpoint.glob("model-*.safetensors"))[1]
    tensors = load_file(shard)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, shard, metadata={"format": "pt"})
    before = contents(checkpoint)
    for name, call in routes(checkpoint):
        with pytest.raises(CheckpointError):
            call()
        assert contents(checkpoint) == before, name


def memory_for_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available_ram", lambda: 1 << 16)


@pytest.mark.parametrize("how", ["from_pretrained", "pull for a device", "prepare_model"])
def test_too_little_memory_is_refused_before_the_first_deletion(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    before = contents(checkpoint)
    memory_for_no_layer(monkeypatch)
    wish = asked(checkpoint, sequential=True)
    calls: dict[str, Callable[[], object]] = {
        "from_pretrained": lambda: AutoModel.from_pretrained(checkpoint, sequential_shard_processing=True, **LOAD),
        "pull for a device": lambda: pull(asked(checkpoint, sequential=True, device="cpu")),
        "prepare_model": lambda: prepare_model(wish),
    }
    with pytest.raises(NotEnoughMemoryError, match=r"A pass takes at least .*may take 65,536 bytes"):
        calls[how]()
    assert contents(checkpoint) == before
    monkeypatch.undo()
    AutoModel.from_pretrained(checkpoint, sequential_shard_processing=True, **LOAD)


def test_too_little_memory_for_a_split_alone_is_a_warning(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    memory_for_no_layer(monkeypatch)
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    assert dry_run(asked(checkpoint, sequential=True)).fits
    assert not dry_run(asked(checkpoint, sequential=True, device="cpu")).fits
    caplog.clear()
    pull(asked(checkpoint, sequential=True))
    convert(copy, tmp_path / "converted", sequential=True)
    for folder in (checkpoint, copy):
        assert not list(folder.glob("model-*.safetensors"))
    messages = [record.message for record in caplog.records if "A pass takes at least" in record.message]
    assert len(messages) == 2
    assert all(text.startswith("This machine cannot load the model: A pass") for text in messages)


def test_plan_names_too_little_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rabbitllm.plan(checkpoint, device="cpu").generations[0].too_little_memory is None
    memory_for_no_layer(monkeypatch)
    message = rabbitllm.plan(checkpoint, device="cpu", max_memory={"cpu": 0}).generations[0].too_little_memory
    assert message is not None
    assert "its largest unit is" in message


def test_plan_proposes_only_loadable_compressions(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def proposed(nbytes: int) -> tuple[str | None, str]:
        monkeypatch.setattr(devices, "available_ram", lambda: nbytes)
        estimate = rabbitllm.plan(checkpoint, device="cpu", max_memory={"cpu": 0})
        written = io.StringIO()
        show(estimate, Console(file=written, width=200))
        return None if estimate.choice is None else estimate.choice.call, " ".join(written.getvalue().split())

    least = [float(text) for text in re.findall(r"A pass takes at least ([\d.]+) MB", proposed(1 << 16)[1])]
    assert least[0] > least[1]  # uncompressed, 8bit
    call, text = proposed(int((least[0] + least[1]) / 2 * 1e6))
    assert call is not None
    assert 'compression="auto"' in call
    assert "ncompressed needs more memory than this process may use. Auto fits" in text
    call, text = proposed(1 << 16)
    assert call is None
    assert "It fits on the disk, but not in memory. A pass takes at least" in text
