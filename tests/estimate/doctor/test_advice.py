"""What is said of a machine: what is essential, what is not, and the command that mends it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rabbitllm.base.transformers_version import TESTED
from rabbitllm.engine.free_memory import GroupLimit, ProcessLimit
from rabbitllm.estimate.cost_model import Speed
from rabbitllm.estimate.doctor import examine
from rabbitllm.estimate.doctor.examine import HERE, SPLITS, advise
from rabbitllm.estimate.doctor.records import Advice, Gpu, Gpus, Hub, MachineInfo, Memory, Package, Processor
from rabbitllm.storage.folders import Folder, Host

GB = 10**9
NEEDED = GB


def folder(use: str = SPLITS, free: int = 500, **changed: Any) -> Folder:
    path = Path("/", use.replace(" ", "-"))
    values: dict[str, Any] = {"writable": True, "filesystem": "ext4", "disk": hash(use), "total": 999 * GB}
    return Folder(uses=(use,), path=path, free=free * GB, **{**values, **changed})


def package(**changed: Any) -> Package:
    values: dict[str, Any] = {"found": "1.0", "wanted": ">=1", "fits": True, "brings": "something"}
    return Package(**{"name": "bitsandbytes", "essential": False, "optional": False, **values, **changed})


def hub(**changed: Any) -> Hub:
    values: dict[str, Any] = {"offline": False, "reachable": True, "seconds": 0.1, "token": True}
    return Hub(endpoint="https://hub", **{**values, **changed})


def gpu(free: int) -> Gpus:
    return Gpus((Gpu("cuda:0", "T4", 15 * GB, free * GB, (7, 5), False),), True, "2.13")


SOUND: dict[str, Any] = {
    "memory": Memory(64 * GB, 60 * GB, 60 * GB),
    "folders": (folder(),),
    "hub": hub(),
    "packages": (package(), package(name="kernels", found=None, fits=False, optional=True)),
    "gpus": gpu(15),
    "rates": (Speed("reading the disk", 2e9),),
}
LIMIT = GroupLimit(2, Path("/sys/fs/cgroup"), 3 * GB, 2 * GB)
SMALL = folder(free=0)
ROOMY = folder(HERE, 100)


def said(**changed: Any) -> tuple[Advice, ...]:
    return advise(MachineInfo(**{**SOUND, **changed}), NEEDED)


def test_no_advice_for_a_sound_or_unknown_machine() -> None:
    assert said() == ()
    assert advise(MachineInfo(), NEEDED) == ()


def test_a_newer_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "newer_than_tested", lambda: True)
    installed = package(name="transformers", found="5.99.0", wanted=">=5.23", essential=True)
    (advice,) = said(packages=(installed,))
    assert not advice.essential
    assert "transformers 5.99.0 is newer than the tested versions" in advice.text
    assert advice.command == f"pip install '{TESTED}'"
    (advice,) = said(packages=(dataclasses.replace(installed, problem="it has changed"),))
    assert advice.essential
    assert advice.command == f"pip install --upgrade '{TESTED}'"


NONE = Gpus((), False, "2.13")


@pytest.mark.parametrize(
    ("instructions", "gpus", "is_said"),
    [
        ({"AVX2": True, "AVX512-BF16": False}, NONE, True),
        ({"AVX2": True, "AVX512-BF16": False}, gpu(15), False),
        ({"AVX2": True, "AVX512-BF16": True}, NONE, True),
        ({"AVX2": True, "AVX512-BF16": True, "AMX": True}, NONE, True),
        ({"AVX2": False, "AVX512-BF16": False}, NONE, False),
        ({}, NONE, False),
    ],
)
def test_the_bfloat16_kernel_is_named_where_it_is_used(
    instructions: dict[str, bool], gpus: Gpus, is_said: bool
) -> None:
    items = said(processor=Processor("Xeon", 4, 4.0, instructions), gpus=gpus)
    assert ["fast-bfloat16" in advice.text for advice in items] == [True] * is_said


@pytest.mark.parametrize(
    ("changed", "essential", "words", "command"),
    [
        (
            {"packages": (package(name="torch", found=None, fits=False, essential=True),)},
            True,
            "torch is missing",
            "pip",
        ),
        (
            {"packages": (package(found="0.9", fits=False),)},
            False,
            "0.9 is not supported; expected >=1",
            "'bitsandbytes>=1'",
        ),
        ({"packages": (package(problem="no CUDA"),)}, False, "cannot be loaded (no CUDA)", "pip install --upgrade"),
        ({"folders": (SMALL,)}, True, "Too little disk at /splits-of-hub-models", None),
        (
            {"folders": (SMALL, ROOMY)},
            True,
            "/this-folder has 100.00 GB",
            "export RABBITLLM_HOME=/this-folder/rabbitllm",
        ),
        ({"folders": (folder(writable=False), ROOMY)}, True, "is not writable", None),
        ({"folders": (folder(free=9),)}, False, "Only 9.00 GB is available", None),
        ({"folders": (folder(quota=2 * GB),)}, False, "Only 2.00 GB is available", None),
        ({"folders": (folder(free=40), ROOMY)}, False, "for large models", "export RABBITLLM_HOME="),
        ({"folders": (folder(filesystem="tmpfs"),)}, False, "layer files there use RAM", None),
        ({"memory": Memory(8 * GB, 8 * GB, GB // 2)}, True, "Only 500.00 MB of RAM", None),
        ({"memory": Memory(8 * GB, 8 * GB, 2 * GB, (LIMIT,))}, False, "/sys/fs/cgroup allows 3.00 GB", None),
        (
            {"memory": Memory(8 * GB, 8 * GB, 2 * GB, (), (ProcessLimit("RLIMIT_AS", 3 * GB, 2 * GB),))},
            False,
            "RLIMIT_AS allows 3.00 GB",
            None,
        ),
        ({"gpus": gpu(3)}, False, "other programs use 12.00 GB of 15.00 GB", "nvidia-smi"),
        ({"gpus": Gpus((), True, "2.13+cpu")}, False, "torch 2.13+cpu can use no GPU", "pip install"),
        ({"hub": hub(offline=True, reachable=None)}, False, "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"),
        (
            {"hub": hub(reachable=False, problem="refused")},
            False,
            "The hub at https://hub does not answer (refused)",
            None,
        ),
        ({"hub": hub(token=False)}, False, "gated models", "hf auth login"),
        ({"rates": (Speed("reading the disk", 9e7),)}, False, "reads only 90.0 MB/s", None),
    ],
)
def test_each_fault_has_one_advice(changed: dict[str, Any], essential: bool, words: str, command: str | None) -> None:
    (advice,) = said(**changed)
    assert advice.essential is essential
    assert words in advice.text
    if command is None:
        assert advice.command is None or "RABBITLLM_HOME" in advice.command
    else:
        assert command in (advice.command or "")


def test_a_folder_in_memory_is_not_better() -> None:
    (advice,) = said(folders=(SMALL, folder(HERE, 100, filesystem="tmpfs")))
    assert advice.command is None


def test_essential_advice_is_first_and_kaggle_has_its_own() -> None:
    kaggle = Host("Kaggle", (), {})
    items = said(hub=hub(reachable=False, problem="?"), host=kaggle, folders=(SMALL,))
    assert [advice.essential for advice in items] == [True, False]
    assert "Turn on Internet" in items[1].text
