"""What lies on users' disks, whole or left by a process that was killed: it is opened, finished, and right as ever.

`golden/on_disk.tar.xz` has the folders, made by the code of the day that the suite was made; `golden/on_disk.json` the
digest of each file that finishing leaves.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import rabbitllm
from tests.frozen import seam
from tests.frozen.support import checkpoints, golden
from tests.frozen.support.command_line import rabbitllm as command_line
from tests.frozen.support.states import SCHEMES, STATES, State
from tests.support.crashes import KILLED, CrashServer
from tests.support.hub_fixtures import HubEnvironment, point_at
from tests.support.local_hub import LocalHub
from tests.support.meta_files import tiktoken_file, write_meta
from tests.support.one_thread import one_thread as one_thread

ARCHIVE, DIGESTS, TIMES = golden.FOLDER / "on_disk.tar.xz", "on_disk.json", "on_disk_times.json"
PUBLISHED = Path(__file__).parent.parent / "golden"
INPUT = torch.tensor([[1, 40, 81, 7, 120, 33, 150, 5]])
HUB, LEASE, TALK, USES = "hub", "lease", "talk", "expert uses"
"""Further states, which are made and opened by calls of their own."""
REPO = "acme/tiny"
PULL = ("pull", REPO, "--sequential", "--shard-transfer", "file")


# --- what is there -------------------------------------------------------------------------------------------------


OF_THE_DAY = ("written_by", "quantiser", "memory", "transformers_version")
"""Values in JSON that are those of the versions, or of the machine, that wrote it."""


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder; a lock that a killed process left is no data."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".lock"))
    return {path.relative_to(folder).as_posix(): hashlib.sha256(_content(path)).hexdigest() for path in files}


def _content(file: Path) -> bytes:
    """The bytes of a file; of the JSON of splits and configs those that are the same wherever it is written."""
    if file.name not in ("split.json", "config.json", "generation_config.json"):
        return file.read_bytes()
    table = json.loads(file.read_text())
    for part in (table, table.get("chosen") or {}):
        for name in OF_THE_DAY:
            part.pop(name, None)
    return json.dumps(table, sort_keys=True).encode()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("on_disk")
    with tarfile.open(ARCHIVE) as packed:
        packed.extractall(folder, filter="tar")
    for name, time in golden.read(TIMES).items():  # a journal compares nanoseconds, which an archive does not keep
        os.utime(folder / name, ns=(time, time))
    return folder


@pytest.fixture
def left(archive: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder of a state, in which the process is from then on."""
    name = request.param if isinstance(request.param, str) else request.param.name
    folder = shutil.copytree(archive / name, tmp_path / "left")
    monkeypatch.chdir(folder)
    return folder


# --- what is right -------------------------------------------------------------------------------------------------


def plain_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The weights that layer files stand for, as bitsandbytes dequantises them."""
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= load_file(path)
    found = {}
    for name, tensor in stored.items():
        if ".4bit." in name or ".8bit." in name:
            continue
        parts = {key.removeprefix(name): value for key, value in stored.items() if key.startswith(f"{name}.")}
        found[name] = _dequantised(tensor, parts)
    return found


def _dequantised(codes: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    from bitsandbytes import functional

    if ".8bit.absmax" in parts:
        state = functional.QuantState(
            parts[".8bit.absmax"], code=parts[".8bit.code"], blocksize=2048, dtype=torch.bfloat16
        )
        return functional.dequantize_blockwise(codes, state)
    if not parts:
        return codes
    state = functional.QuantState.from_dict(
        {key.removeprefix(".4bit."): value for key, value in parts.items()}, device=torch.device("cpu")
    )
    shape, state.shape = state.shape, torch.Size([state.shape.numel()])  # its kernel begins a block with each row
    return functional.dequantize_4bit(codes, state).reshape(shape)


def reference_logits(folder: Path) -> torch.Tensor:
    """What plain transformers computes with the weights of a split directory, in the dtype of its config."""
    model: Any = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
    )
    expected = model.state_dict()
    for name, tensor in _fused(plain_tensors(folder)).items():
        expected.pop(name).copy_(tensor)
    assert not expected
    with torch.inference_mode():
        logits: torch.Tensor = model.eval()(INPUT).logits
    return logits


def _fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of a checkpoint as transformers has them in memory: those of a layer in one tensor."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for lead in sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name}):
        parts = [
            [tensors[f"{lead}.experts.{n}.{part}_proj.weight"] for n in range(checkpoints.MIXTURE["num_experts"])]
            for part in ("gate", "up", "down")
        ]
        gate, up, down = map(torch.stack, parts)
        found |= {f"{lead}.experts.gate_up_proj": torch.cat([gate, up], dim=1), f"{lead}.experts.down_proj": down}
    return found


def logits(name: str | Path, **options: Any) -> torch.Tensor:
    """What the package computes."""
    model = rabbitllm.AutoModel.from_pretrained(str(name), device="cpu", exact=True, **options)
    with torch.inference_mode():
        found: torch.Tensor = model(INPUT).logits
    return found


# --- making --------------------------------------------------------------------------------------------------------


def write_base(folder: Path) -> None:
    """The checkpoints that states begin with."""
    checkpoints.write(folder / "model")
    checkpoints.write(folder / "moe", checkpoints.MIXTURE)
    tokens = len(tiktoken_file().splitlines()) + 256
    plain = checkpoints.write(folder / "plain", {**checkpoints.LLAMA, "vocab_size": tokens})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    write_meta(folder / "meta", loaded, ranks=2, tokenizer=tiktoken_file())
    lines = [{"id": f"line {number}", "prompt": f"the rabbit {number} and"} for number in range(6)]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_state(state: State, base: Path, folder: Path) -> None:
    """Have a state come about in a folder."""
    folder.mkdir()
    for name in state.base:
        copy = shutil.copytree if (base / name).is_dir() else shutil.copy2
        copy(base / name, folder / name)
    for call in state.before:
        assert seam.make({**call, "folder": str(folder)}) == 0, state.name
    if state.dead is not None and state.by_a_kill:
        with CrashServer() as server:
            ended = server.ask(seam.MAKE, {**state.dead, "folder": str(folder)}, state.moment)
        assert ended.status == KILLED, state.name
    elif state.dead is not None:
        assert seam.dead_from({**state.dead, "folder": str(folder)}, state.moment), state.name


def make(folder: Path) -> None:
    """Write the archive and the digests of what is finished; for `tests.frozen.make`."""
    base, made = folder / "base", folder / "made"
    base.mkdir()
    made.mkdir()
    write_base(base)
    found = {}
    for state in STATES:
        make_state(state, base, made / state.name)
        copy = shutil.copytree(made / state.name, folder / "after" / state.name)
        assert seam.make({**state.after, "folder": str(copy)}) == state.code, state.name
        found[state.name] = digests(copy)
    _make_others(base, made)
    golden.write(DIGESTS, found)
    golden.write(TIMES, times_of(made))
    with tarfile.open(ARCHIVE, "w:xz", preset=6) as packed:
        for path in sorted(made.iterdir()):
            packed.add(path, path.name)


def times_of(made: Path) -> dict[str, int]:
    """When the shards in the folders of all states were changed, ns."""
    shards = [path for pattern in ("model-*-of-*", "consolidated.*") for path in sorted(made.rglob(pattern))]
    return {path.relative_to(made).as_posix(): path.stat().st_mtime_ns for path in shards}


def _make_others(base: Path, made: Path) -> None:
    shutil.copytree(made / "cut 4bit", made / LEASE)
    seam.leave_lease(made / LEASE / "model" / "splitted_model.4bit")
    talk = made / TALK
    talk.mkdir()
    shutil.copytree(base / "model", talk / "model")
    os.chdir(talk)
    said = "what is a rabbit\nand a hare\n/save talk.json\n"
    assert command_line("chat", "model", "--device", "cpu", "--max-new-tokens", "3", stdin=said).code == 0
    shutil.rmtree(talk / "model" / "splitted_model")
    uses = made / USES
    uses.mkdir()
    shutil.copytree(base / "moe", uses / "moe")
    model = rabbitllm.AutoModel.from_pretrained(str(uses / "moe"), device="cpu", split=False, max_memory={"cpu": 0})
    model.generate(INPUT, max_new_tokens=4)
    model.save_expert_use(uses / "uses.safetensors")
    (made / HUB / "hub" / "acme").mkdir(parents=True)
    shutil.copytree(base / "model", made / HUB / "hub" / REPO)
    with LocalHub(made / HUB / "hub") as hub, pytest.MonkeyPatch.context() as patch:
        point_at(hub.url, made / HUB / "hf_home", patch)
        patch.setenv("RABBITLLM_HOME", str(made / HUB / "home"))
        call = {"command": PULL, "folder": str(made / HUB)}
        assert seam.dead_from(call, {"kind": "unlink", "name": ".staging/model-00002-*"})
    shutil.rmtree(made / HUB / "hf_home")


# --- opening and finishing -----------------------------------------------------------------------------------------


@functools.cache
def golden_digests() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = golden.read(DIGESTS)
    return found


_CASES = [pytest.param(one, one, marks=[pytest.mark.long] * one.long, id=one.name) for one in STATES]


@pytest.mark.parametrize(("left", "state"), _CASES, indirect=["left"])
def test_state(left: Path, state: State) -> None:
    assert seam.make({**state.after, "folder": str(left)}) == state.code
    assert digests(left) == golden_digests()[state.name]
    if state.split:
        assert command_line("verify", state.split).code == 0
        assert torch.equal(logits(state.split), reference_logits(left / state.split))


def _layers(state: str) -> dict[str, str]:
    """Layer file -> digest."""
    files = golden_digests()[state].items()
    return {Path(file).name: digest for file, digest in files if "splitted_" in file and file.endswith(".safetensors")}


def test_schemes_differ() -> None:
    """Else a comparison of one with its own bytes would say nothing."""
    found = [_layers(f"whole {name}")["model.layers.1.safetensors"] for name in SCHEMES]
    assert len(set(found)) == len(SCHEMES)


def test_every_route_makes_the_same_bytes() -> None:
    """Sequential or ordinary, undisturbed or killed; only a sequential one deletes the shards."""
    known = golden_digests()
    for name in SCHEMES:
        whole, cut = known[f"whole {name}"], known[f"cut {name}"]
        layers = {file: digest for file, digest in whole.items() if "splitted_model" in file}
        assert layers == {file: digest for file, digest in cut.items() if "splitted_model" in file}
        assert [file for file in whole.keys() - cut.keys() if not file.startswith("model/model-")] == []
        assert len(whole) - len(cut) == 3
    of_ranks = _layers("whole of Meta's ranks")
    same = [file for file, digest in _layers("whole 4bit").items() if of_ranks[file] == digest]
    assert same == ["model.layers.0.safetensors", "model.layers.1.safetensors", "model.norm.safetensors"]


@pytest.mark.parametrize("left", [LEASE], indirect=True)
def test_the_lease_of_a_run_that_died(left: Path) -> None:
    call = ("pull", "model", "--sequential", "--compression", "4bit")
    assert command_line(*call).code == 0
    assert digests(left) == golden_digests()["cut 4bit"]


@pytest.mark.parametrize("left", ["cut none"], indirect=True)
def test_a_cut_split_is_not_taken_for_a_whole_one(left: Path) -> None:
    before = digests(left)
    listed = command_line("ls", ".", "--json").json
    assert [one["state"] for one in listed] == ["unfinished"]
    assert command_line("verify", "model/splitted_model").code == 1
    with pytest.raises(rabbitllm.RabbitLLMError):
        logits("model/splitted_model")
    assert digests(left) == before


@pytest.mark.parametrize("left", ["cut removal"], indirect=True)
def test_a_cut_removal_is_not_taken_for_a_split(left: Path) -> None:
    assert [one["state"] for one in command_line("ls", ".", "--json").json] != ["whole"]
    with pytest.raises(rabbitllm.RabbitLLMError):
        logits("model/splitted_model")


@pytest.mark.parametrize("left", ["cut none"], indirect=True)
def test_a_cut_split_of_another_checkpoint_is_refused(left: Path) -> None:
    checkpoints.write(left / "other", seed=9)
    before = digests(left)
    assert command_line("pull", "other", "--dir", "model").code == 1
    assert digests(left) == before


@pytest.fixture
def near_the_hub(
    left: Path, local_hub: LocalHub, hub_environment: HubEnvironment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Path:
    """The folder of a state of a repository, which a local hub serves; the hub cache is empty."""
    shutil.copytree(left / "hub" / "acme", tmp_path / "hub" / "acme")
    monkeypatch.setenv("RABBITLLM_HOME", str(left / "home"))
    return left


@pytest.mark.parametrize("left", [HUB], indirect=True)
def test_a_cut_split_of_a_repository(near_the_hub: Path, local_hub: LocalHub) -> None:
    local_hub.forget_requests()
    made = Path(command_line(*PULL, "--json").json["folder"])
    fetched = {request.path.rpartition("/")[2] for request in local_hub.requests if request.method == "GET"}
    assert checkpoints.SHARD.format(1, 3) not in fetched
    layers = {name: digest for name, digest in digests(made).items() if name.endswith(".safetensors")}
    whole = golden_digests()["whole none"]
    assert layers == {name: whole[f"model/splitted_model/{name}"] for name in layers}
    assert len(layers) == 5
    assert not (made / ".staging").exists()
    assert torch.equal(logits(REPO, local_files_only=True), reference_logits(made))


@pytest.mark.parametrize("left", [TALK], indirect=True)
def test_a_conversation(left: Path) -> None:
    said = "/load talk.json\n/save again.json\n"
    assert command_line("chat", "model", "--device", "cpu", stdin=said).code == 0
    talk = json.loads((left / "talk.json").read_text())
    assert json.loads((left / "again.json").read_text()) == talk
    assert [one["role"] for one in talk["messages"]] == ["user", "assistant"] * 2


@pytest.mark.parametrize("left", [USES], indirect=True)
def test_expert_uses(left: Path) -> None:
    model = rabbitllm.AutoModel.from_pretrained("moe", device="cpu", split=False, max_memory={"cpu": 0})
    model.load_expert_use("uses.safetensors")
    with torch.inference_mode():
        found = model(INPUT).logits
    assert torch.equal(found, reference_logits(left / "moe"))


@pytest.mark.parametrize("scheme", [None, pytest.param("4bit", marks=pytest.mark.long), "8bit"])
def test_directories_of_rabbitllm_1(tmp_path: Path, scheme: str | None) -> None:
    """Their files hold no norms and biases as they are, at 4bit and 8bit; all of it stays as it was written."""
    home = shutil.copytree(PUBLISHED / f"rabbitllm-1.1.0-{scheme or 'none'}", tmp_path / "home")
    before = digests(home)
    split = home / ("splitted_model" + (f".{scheme}" if scheme else ""))
    checkpoint = shutil.copytree(PUBLISHED / "model-2-shards", tmp_path / "model")
    found = logits(checkpoint, layer_shards_saving_path=str(home), compression=scheme)
    assert digests(home) == before
    for file in ("config.json", "generation_config.json"):
        shutil.copy(checkpoint / file, split)
    assert torch.equal(found, reference_logits(split))


def test_a_directory_of_rabbitllm_1_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    home = shutil.copytree(PUBLISHED / "rabbitllm-1.1.0-none-UNSOUND-3-tensors-missing", tmp_path / "home")
    with pytest.raises(rabbitllm.RabbitLLMError) as refused:
        logits(PUBLISHED / "model-4-shards", layer_shards_saving_path=str(home))
    assert type(refused.value).__name__ == "IncompleteSplitError"
