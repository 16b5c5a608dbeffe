"""The notebook for Kaggle through its own cells: with a small model, a disk that is too small for it, and a crash."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.splitter.journal import glance
from rabbitllm.storage.folders import KAGGLE_BYTES
from rabbitllm.store.layer_store import verify
from tests.support.builders import build_checkpoint
from tests.support.hub_fixtures import HubEnvironment
from tests.support.local_hub import LocalHub
from tests.support.mtp_heads import build_with_head
from tests.support.notebook import Run, code_of, mark, read, started
from tests.support.splitting import contents, names_in, occupied, split

ROOT = Path(__file__).parent.parent.parent
MODEL = ROOT / "rabbitllm" / "demo" / "model"
NOTEBOOK = ROOT / "examples" / "kaggle_70b.ipynb"
CELLS = read(NOTEBOOK)["cells"]
CODE = {cell["id"]: cell for cell in CELLS if cell["cell_type"] == "code"}
REPOSITORY = "org/demo"
ROOM = 3 << 20
"""The bundled model has 7 MiB in shards of 0.6, and 2 MiB at 4bit."""
QUESTION, ANSWER = "What is 12 + 30?", "42"
PARAMETERS = {"MODEL": REPOSITORY, "DRAFT": None, "PROMPT": QUESTION, "MAX_NEW_TOKENS": 8}
PATIENCE_SECONDS = 600
SIDECARS = 100_000
"""Config, tokenizer and folders, which at this size are more than nothing."""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """What a session on Kaggle begins with."""
    for folder in ("kaggle/working", "kaggle/input"):
        (tmp_path / "machine" / folder).mkdir(parents=True)
    return tmp_path / "machine"


@pytest.fixture
def repository(tmp_path: Path, hub_environment: HubEnvironment) -> Path:
    return shutil.copytree(MODEL, tmp_path / "hub" / REPOSITORY)


@contextlib.contextmanager
def peak_of(folder: Path) -> Iterator[list[int]]:
    """The most that a folder occupies while the context is open, looked at all the time."""
    peak, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.002):
            peak[0] = max(peak[0], occupied(folder))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def run_all(machine: Path, **options: Any) -> str:
    """Run all cells to the end; what they print."""
    run = Run(str(NOTEBOOK), str(machine), **{"parameters": PARAMETERS, "room": ROOM, **options})
    with started(run) as process:
        output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, errors
    assert "imported before" not in errors
    return output


def run_until(machine: Path, holds: Callable[[], object], **options: Any) -> tuple[str, str]:
    """Run the cells and kill the process once something holds; what it printed, and its errors."""
    run = Run(str(NOTEBOOK), str(machine), **{"parameters": PARAMETERS, "room": ROOM, **options})
    with started(run) as process:
        until = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            assert time.monotonic() < until, "nothing came about"
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.kill()
        return process.communicate()


def run_until_shards_are_used(machine: Path, shards: int) -> set[str]:
    """Run the cells and kill the process once so many shards are used up; their names."""
    layers, used = machine / "kaggle/tmp/rabbitllm", set[str]()

    def enough() -> bool:
        used.update(used_shards(layers))
        return len(used) >= shards

    output, _ = run_until(machine, enough)
    assert mark(CODE["plan"]) in output
    assert mark(CODE["load"]) not in output
    return used_shards(layers) | used


def used_shards(layers: Path) -> set[str]:
    seen = [glance(journal.parent) for journal in layers.glob("*/*/*/split.journal")]
    return {shard for journal in seen if journal is not None for shard in journal.used}


def made(layers: Path) -> dict[str, tuple[int, int]]:
    """Finished layer file -> what tells it from one that was made again."""
    found = layers.glob("*/*/*/*.safetensors")
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in found}


@pytest.mark.long
def test_killed_and_run_again(machine: Path, repository: Path, local_hub: LocalHub) -> None:
    layers = machine / "kaggle/tmp/rabbitllm"
    local_hub.faults.delay_per_mib = 0.6
    with peak_of(layers) as peak:
        used = run_until_shards_are_used(machine, 3)
        assert 3 <= len(used) < 12
        before = made(layers)
        local_hub.faults.delay_per_mib = 0.0
        output = run_all(machine, gpus=2, gpu_bytes=1_200_000)
    [folder] = layers.glob("*/*/splitted_model.auto")
    checkpoint = sum(file.stat().st_size for file in repository.glob("*.safetensors"))
    assert 0 < peak[0] <= ROOM < checkpoint
    assert verify(folder).damaged == ()
    assert names_in(folder, "*-of-*") == []
    assert before
    assert before.items() <= made(layers).items()
    assert names_in(machine / "kaggle/working") == []
    for cell in CODE.values():
        assert mark(cell) in output
    assert ANSWER in output
    assert "fake:0" in output
    assert "fake:1" in output
    assert f"layers    {layers}" in output
    assert names_in(machine / "kaggle/tmp/huggingface/hub", "models--*") == ["models--org--demo"]


@pytest.mark.long
def test_rehearsal_at_a_thousandth(
    machine: Path, tmp_path: Path, hub_environment: HubEnvironment, local_hub: LocalHub
) -> None:
    """The 72B model's layers and shards with a thousandth of its bytes, a thousandth of the disk, and a draft model;
    killed during the draft's download, four times during the split, and after it."""
    room = KAGGLE_BYTES // 1000
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 960}
    original = build_checkpoint(
        tmp_path / "hub" / REPOSITORY, "qwen2", dtype=torch.bfloat16, shards=37, num_hidden_layers=80, **sizes
    )
    build_checkpoint(tmp_path / "hub/org/draft", "qwen2", dtype=torch.bfloat16, num_hidden_layers=1, **sizes)
    checkpoint = sum(file.stat().st_size for file in original.glob("*.safetensors"))
    assert 140e6 < checkpoint < 155e6
    parameters = {**PARAMETERS, "DRAFT": "org/draft", "MAX_NEW_TOKENS": 2}
    options = {"parameters": parameters, "room": room}
    tmp, layers = machine / "kaggle/tmp", machine / "kaggle/tmp/rabbitllm"
    local_hub.faults.delay_per_mib = 0.2
    outputs, errors = [], []

    def killed(holds: Callable[[], object]) -> None:
        output, error = run_until(machine, holds, **options)
        outputs.append(output)
        errors.append(error)

    with peak_of(tmp) as peak:
        killed(lambda: [*tmp.glob("huggingface/hub/models--org--draft/blobs/*")])
        assert mark(CODE["draft"]) not in outputs[-1]
        for shards in (1, 11, 20, 33):
            killed(lambda: len(used_shards(layers)) >= shards)  # noqa: B023  called before the next
            assert mark(CODE["load"]) not in outputs[-1]
        killed(lambda: [*layers.glob("*/*/splitted_model.auto/split.json")])
        requests = len(local_hub.requests)
        local_hub.faults.delay_per_mib = 0.0
        outputs.append(run_all(machine, **options))
    limits = {match[1] for output in outputs for match in re.finditer(r"max_disk (\d+)", output)}
    draft = sum(file.stat().st_size for file in tmp.glob("huggingface/hub/models--org--draft/blobs/*"))
    assert 1_500_000 < draft < 4_000_000
    assert limits == {str(room - draft)}
    assert not any("bit allocation" in error or "is used unchanged" in error for error in errors)
    [folder] = layers.glob("*/*/splitted_model.auto")
    assert verify(folder).damaged == ()
    assert 0.95 * (room - draft) < sum(file.stat().st_size for file in folder.glob("*.safetensors")) < room - draft
    assert peak[0] <= room + SIDECARS
    again = [request for request in local_hub.requests[requests:] if request.method == "GET" and "-of-" in request.file]
    assert all(request.range for request in again)  # of headers, for the plan
    assert names_in(machine / "kaggle/working") == []


@pytest.mark.long
def test_a_restarted_kernel_with_a_whole_split_fetches_nothing(
    machine: Path, repository: Path, local_hub: LocalHub
) -> None:
    run_all(machine)
    before, seen = made(machine / "kaggle/tmp/rabbitllm"), len(local_hub.requests)
    output = run_all(machine)
    assert ANSWER in output
    assert made(machine / "kaggle/tmp/rabbitllm") == before
    again = [request for request in local_hub.requests[seen:] if request.method == "GET" and "-of-" in request.file]
    assert again  # the plan's, of headers
    assert all(request.range for request in again)
    assert names_in(machine / "kaggle/working") == []


@pytest.mark.long
def test_without_a_draft_model_the_checkpoints_head_drafts(
    machine: Path, tmp_path: Path, hub_environment: HubEnvironment, local_hub: LocalHub
) -> None:
    build_with_head(tmp_path / "hub" / REPOSITORY, "qwen3_5")
    output = run_all(machine, gpus=1, gpu_bytes=850_000)
    plan, load = output[: output.index(mark(CODE["plan"]))], output[output.index(mark(CODE["plan"])) :]
    assert re.search(r"^with the draft .*\bmtp\b", plan, re.MULTILINE)
    assert "drafts: by the model's own heads" in load
    assert mark(CODE["statistics"]) in load


@pytest.mark.long
@pytest.mark.parametrize("what", ["checkpoint", "split"])
def test_what_is_attached_is_read_in_place_and_kept(
    machine: Path, tmp_path: Path, hub_environment: HubEnvironment, what: str
) -> None:
    made = shutil.copytree(MODEL, tmp_path / "made")
    if what == "split":
        made = split(made, compression="auto", max_disk=ROOM)
    attached = shutil.copytree(made, machine / "kaggle/input/models/rabbit/demo/transformers/default/1")
    before = contents(attached)
    for folder in (attached, *(path for path in attached.rglob("*") if path.is_dir())):
        folder.chmod(0o555)
    try:
        output = run_all(machine, parameters={**PARAMETERS, "MODEL": str(attached)})
    finally:
        attached.chmod(0o755)
    assert f"attached  {attached}" in output
    assert ANSWER in output
    left = contents(attached)
    assert {name: left[name] for name in before} == before
    others = {name for name in left.keys() - before.keys() if not name.startswith("splitted_model.auto/")}
    assert others == set()  # root may write where it may not, and then the layer files are there
    assert names_in(machine / "kaggle/working") == []


@pytest.mark.long
@pytest.mark.parametrize("vram", [12_000_000, 1_200_000], ids=["fits", "too large"])
def test_a_draft_model(machine: Path, repository: Path, vram: int) -> None:
    output = run_all(machine, gpus=2, gpu_bytes=vram, parameters={**PARAMETERS, "DRAFT": str(MODEL)})
    assert ANSWER in output
    assert ("The draft model does not fit in memory" in output) == (vram < 10_000_000)


@pytest.mark.long
def test_on_colab(tmp_path: Path, repository: Path) -> None:
    machine = tmp_path / "colab"
    (machine / "content").mkdir(parents=True)
    output = run_all(machine, variables={"COLAB_RELEASE_TAG": "release-colab"})
    assert ANSWER in output
    assert len([*(machine / "content/rabbitllm").glob("*/*/splitted_model.auto/split.json")]) == 1


@pytest.mark.long
def test_installs_the_attached_copy(tmp_path: Path) -> None:
    """In an environment of its own, without what it depends on, from a folder that may not be written."""
    attached = tmp_path / "input" / "copy-of-rabbitllm"
    left_out = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "__pycache__", "benchmarks", "tests")
    shutil.copytree(ROOT, attached, ignore=left_out)
    venv.create(tmp_path / "venv", with_pip=True)
    code = code_of(CODE["install"]).replace("/kaggle/input", str(tmp_path / "input"))
    code = code.replace("/tmp/rabbitllm-source", str(tmp_path / "source"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PIP_NO_DEPS": "1"}
    code = code.partition("\ntorch = ")[0]
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-c", code], check=True, env=environment, cwd=tmp_path)
    ask = "import rabbitllm; print(rabbitllm.__version__, rabbitllm.__file__)"
    said = subprocess.run(
        [python, "-c", ask], check=True, env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert said.stdout.startswith("2.")
    assert str(tmp_path / "venv") in said.stdout
    assert not (attached / "build").exists()


def test_without_a_copy_the_install_cell_says_what_to_do(tmp_path: Path) -> None:
    code = (
        code_of(CODE["install"]).replace("/kaggle/input", str(tmp_path)).replace('"rabbitllm")', '"no_such_package")')
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Attach a copy of the project as a dataset, or set SOURCE." in done.stderr


def test_is_a_tidy_notebook() -> None:
    """Version 4.5 of the format: every cell has an id of its own, code has no outputs, sources are lists of lines."""
    text = NOTEBOOK.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert text == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in CELLS]
    assert len(set(ids)) == len(ids)
    for cell in CELLS:
        assert cell["cell_type"] in ("code", "markdown")
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        assert not cell["source"][-1].endswith("\n")
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            assert max(map(len, cell["source"])) <= 121
    assert [cell["id"] for cell in CELLS if "parameters" in cell["metadata"].get("tags", ())] == ["choose"]


def test_a_gpu_that_torch_has_no_code_for_ends_the_install_cell() -> None:
    """As on Kaggle with the P100: torch calls the GPU available."""
    p100 = """
import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.get_arch_list = lambda: ["sm_70", "sm_75", "sm_80"]
torch.cuda.get_device_capability = lambda index: (6, 0)
torch.cuda.get_device_name = lambda index: "Tesla P100-PCIE-16GB"
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    code = p100 + code_of(CODE["install"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "has no code for cuda:0, Tesla P100-PCIE-16GB (sm_60)" in done.stderr
    assert "on Kaggle: GPU T4 x2" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("driver", [True, False])
@pytest.mark.long
def test_a_gpu_that_torch_cannot_use_ends_the_install_cell(tmp_path: Path, driver: bool) -> None:
    if driver:
        (tmp_path / "nvidia0").touch()
    code = code_of(CODE["install"]).replace("/dev/nvidia", f"{tmp_path}/nvidia")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == driver, done.stderr
    assert ("cannot use the GPU" in done.stderr) == driver
