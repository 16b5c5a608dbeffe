"""What each probe finds on this machine, and on others as far as their files say it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from huggingface_hub import constants

from rabbitllm.engine import transformers_api
from rabbitllm.estimate.doctor import examine
from rabbitllm.storage.folders import folder_at, host_of
from tests.support.fresh_process import python

V2 = "sys/fs/cgroup"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_memory_of_this_machine_and_of_a_control_group(tmp_path: Path) -> None:
    memory = examine.probe_memory()
    assert 0 < memory.usable <= memory.free <= memory.total == psutil.virtual_memory().total
    root = write(tmp_path, {f"{V2}/memory.max": "5000\n", f"{V2}/memory.stat": "anon 2000\n"})
    (group,) = examine.probe_memory(root).groups
    assert (group.version, group.limit, group.room) == (2, 5000, 3000)


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (40 * 10**9, 40 * 10**9))
import dataclasses
from rabbitllm.estimate.doctor import examine, report
found = dataclasses.replace(examine.probe_memory(), total=64 << 30, groups=())
(limit,) = found.limits
assert (limit.name, limit.limit) == ("RLIMIT_AS", 40 * 10**9) and 0 < limit.room < limit.limit
assert found.usable <= limit.room + (64 << 20)
assert "; RLIMIT_AS allows 40.00 GB, " in report._memory(found)
assert "RLIMIT" not in report._memory(dataclasses.replace(found, total=40 * 10**9))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system cannot be asked")
def test_a_process_limit_is_named_if_lower() -> None:
    python(LIMITED)


CPUINFO = "processor\t: 0\nmodel name\t: A Chip\nflags\t\t: sse avx2 avx512f avx512_vnni\n"


def test_processors(tmp_path: Path) -> None:
    processor = examine.probe_processor()
    assert processor.name
    assert 0 < processor.usable <= processor.cores
    limited = examine.probe_processor(write(tmp_path, {"proc/cpuinfo": CPUINFO, f"{V2}/cpu.max": "50000 100000\n"}))
    assert (limited.name, limited.usable) == ("A Chip", 0.5)
    assert {name for name, there in limited.instructions.items() if there} == {"AVX2", "AVX-512", "VNNI"}
    (tmp_path / "proc/cpuinfo").write_text("processor: 0\nFeatures: fp asimd sha2\n")
    (tmp_path / V2 / "cpu.max").write_text("max 100000\n")
    arm = examine.probe_processor(tmp_path)
    assert [name for name, there in arm.instructions.items() if there] == ["NEON", "SHA"]
    assert arm.usable == processor.usable
    assert examine.probe_processor(tmp_path / "nothing").instructions == {}


def test_gpus_are_those_of_torch() -> None:
    gpus = examine.probe_gpus()
    assert len(gpus.found) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert gpus.torch == torch.__version__


def test_gpu_without_code_in_torch_is_not_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (6, 0))
    assert examine.probe_gpus().found == ()


def test_torch_is_not_imported_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "has_nvidia_driver", lambda: False)
    assert examine.probe_gpus(ask_torch=False).torch is None
    monkeypatch.setattr(examine, "has_nvidia_driver", lambda: True)
    assert examine.probe_gpus(ask_torch=False).torch == torch.__version__


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "Kaggle"),
        ({"COLAB_RELEASE_TAG": "release-colab"}, "Colab"),
        ({"SPACE_ID": "me/demo"}, "Hugging Face Spaces"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "a container"),
        ({"COLAB_GPU": ""}, None),
    ],
)
def test_hosts_are_recognized_by_environment(tmp_path: Path, environment: dict[str, str], name: str | None) -> None:
    host = host_of(environment, tmp_path)
    assert (host.name if host is not None else None) == name
    assert host is None or host.hints


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where layer files go first; of a folder that is not there yet, the disk it would be on."""
    home = tmp_path / "not" / "yet"
    working = tmp_path / "working"
    working.mkdir()
    monkeypatch.setenv("RABBITLLM_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home))
    monkeypatch.setattr(examine, "KAGGLE_WORKING", working)
    mounts = {"/": "ext4", str(working.resolve()): "tmpfs"}
    partitions = [SimpleNamespace(mountpoint=point, fstype=file_system) for point, file_system in mounts.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: partitions)
    kaggle = examine.Host("Kaggle", (), {str(working.resolve()): 7})
    folders = examine.probe_folders(kaggle)
    assert folders[0].uses == (examine.SPLITS, examine.CACHE)
    assert (folders[0].path, folders[0].filesystem, folders[0].quota) == (home, "ext4", None)
    assert folders[0].disk == os.stat(tmp_path).st_dev
    assert 0 < folders[0].free <= folders[0].total
    folder_ = next(folder for folder in folders if folder.path == working)
    assert (folder_.in_memory, folder_.room) == (True, 7)


def test_the_system_names_no_file_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**arguments: Any) -> None:
        raise FileNotFoundError("/proc/self/mounts")

    monkeypatch.setattr(psutil, "disk_partitions", refuse)
    assert {folder.filesystem for folder in examine.probe_folders()} == {None}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc and its type")
def test_the_system_names_file_systems() -> None:
    assert folder_at(Path("/proc/self")).filesystem == "proc"


def test_a_file_instead_of_a_folder_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RABBITLLM_HOME", str(tmp_path / "file" / "home"))
    assert not examine.probe_folders()[0].writable


class _Refuses(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(403)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refuses)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_any_answer_means_a_reachable_hub(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub = examine.probe_hub()
    assert (hub.reachable, hub.offline, hub.token) == (True, False, True)
    assert hub.seconds is not None
    assert "secret" not in repr(hub)


def test_an_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://me:secret@127.0.0.1:1")
    hub = examine.probe_hub()
    assert hub.reachable is False
    assert hub.problem
    assert "secret" not in hub.endpoint
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (examine.probe_hub().offline, examine.probe_hub().reachable) == (True, None)


def test_installed_packages() -> None:
    packages = {package.name: package for package in examine.probe_packages()}
    assert packages["torch"].found == metadata.version("torch")
    assert packages["torch"].wanted.startswith(">=")
    assert all(package.sound for package in packages.values() if package.essential)
    assert all(package.brings for package in packages.values())


def test_a_newer_transformers_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "newer_than_tested", lambda: True)
    assert not {package.name: package for package in examine.probe_packages()}["transformers"].problem
    monkeypatch.setattr(transformers_api, "initialize_rest", lambda model: None)
    packages = {package.name: package for package in examine.probe_packages()}
    assert "has changed a part that RabbitLLM uses" in (packages["transformers"].problem or "")
    assert not {package.name: package for package in examine.probe_packages(load=False)}["transformers"].problem


def test_old_missing_and_broken_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "numba":
            raise metadata.PackageNotFoundError(name)
        return "0.1" if name == "transformers" else real(name)

    def broken() -> None:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setitem(examine._LOADED, "bitsandbytes", broken)  # type: ignore[index]
    packages = {package.name: package for package in examine.probe_packages()}
    assert not packages["transformers"].fits
    assert packages["numba"].found is None
    assert "libcudart" in (packages["bitsandbytes"].problem or "")
    assert not any(packages[name].sound for name in ("transformers", "numba", "bitsandbytes"))
