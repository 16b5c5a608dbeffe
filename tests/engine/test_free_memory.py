"""Free memory of the machine and within the limits of control groups; and memory that is returned at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.lib.process import can_limit_memory, control_group
from rabbitllm import AutoModel
from rabbitllm.engine import devices, free_memory
from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.free_memory import available_ram, trimming
from rabbitllm.errors import NotEnoughMemoryError
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import split

V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
LIMIT_V1 = "memory.limit_in_bytes"


def test_this_machine() -> None:
    import psutil

    assert 0 < available_ram() <= psutil.virtual_memory().total
    assert CpuDevice().free_bytes() > 0


def test_promised_memory_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped files count once, also in a group that counts those in memory; KV caches count by what they lack."""
    files = {"proc/self/status": "RssFile: 2 kB\n", f"{V2}/memory.max": "9000", f"{V2}/memory.stat": "file_mapped 9999"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [group.room for group in free_memory.group_limits(tmp_path)] == [9000 - 2048]
    assert [group.room for group in free_memory.group_limits(tmp_path, mapped=2000)] == [9000 - 2048]
    assert [group.room for group in free_memory.group_limits(tmp_path, mapped=3000)] == [9000 - 3000]
    monkeypatch.setattr(free_memory, "group_limits", lambda mapped: [free_memory.GroupLimit(2, tmp_path, 0, 5000)])
    monkeypatch.setattr(free_memory, "process_limits", list)
    promise = free_memory.Promise(1 << 40, lambda: {"cpu": 700, "cuda:0": 9})
    free_memory.PROMISES.add(promise)
    try:
        assert available_ram() == 0  # the machine has less than the mapped files
        free_memory.PROMISES.discard(promise)
        assert available_ram() == 5000
        free_memory.PROMISES.add(promise := free_memory.Promise(1, lambda: {"cpu": 700, "cuda:0": 9}))
        assert available_ram() == 4300
        assert free_memory.unspent("cuda:0") == 9
    finally:
        free_memory.PROMISES.discard(promise)


@pytest.mark.parametrize(
    ("files", "rooms"),
    [
        pytest.param({}, [], id="no groups"),
        pytest.param({f"{V2}/memory.max": "max\n", f"{V2}/memory.stat": "anon 5\nfile 7\n"}, [], id="no limit"),
        pytest.param({f"{V2}/memory.max": "1000\n", f"{V2}/memory.stat": "anon 300\nfile 600\n"}, [700], id="v2"),
        pytest.param({f"{V2}/memory.max": "1000", f"{V2}/memory.stat": "anon 300\nshmem 50\n"}, [650], id="shared"),
        pytest.param({f"{V2}/memory.max": "1000", f"{V2}/memory.stat": "anon 1300\n"}, [0], id="more than the limit"),
        pytest.param({f"{V1}/{LIMIT_V1}": "2000\n", f"{V1}/memory.stat": "cache 1500\nrss 400\n"}, [1600], id="v1"),
        pytest.param(
            {f"{V1}/{LIMIT_V1}": "2000", f"{V1}/memory.stat": "rss 100\ntotal_rss 700\n"}, [1300], id="v1, with others"
        ),
        pytest.param(
            {f"{V1}/{LIMIT_V1}": "9223372036854771712\n", f"{V1}/memory.stat": "rss 1\n"}, [], id="v1, no limit"
        ),
        pytest.param(
            {
                f"{V2}/memory.max": "1000",
                f"{V2}/memory.stat": "anon 1\n",
                f"{V1}/{LIMIT_V1}": "900",
                f"{V1}/memory.stat": "rss 1\n",
            },
            [999, 899],
            id="both",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/user/one\n",
                f"{V2}/user/one/memory.max": "500",
                f"{V2}/user/one/memory.stat": "anon 100\n",
                f"{V2}/user/memory.max": "450",
                f"{V2}/user/memory.stat": "anon 300\n",
            },
            [400, 150],
            id="one group in another",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:cpu,memory:/docker/0a1b\n3:cpuset:/\n0::/\n",
                f"{V1}/{LIMIT_V1}": "800",
                f"{V1}/memory.stat": "rss 300\n",
            },
            [500],
            id="a path of outside the container",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/a\n",
                "proc/self/status": "Name: x\nRssFile:\t 2 kB\nRssAnon: 7 kB\n",
                f"{V1}/a/{LIMIT_V1}": "9000",
                f"{V1}/a/memory.stat": "rss 1000\ncache 5000\n",
            },
            [9000 - 1000 - 2048],
            id="libraries that are mapped",
        ),
        pytest.param(
            {
                "proc/self/status": "RssFile:\t 2 kB\n",
                f"{V2}/memory.max": "9000",
                f"{V2}/memory.stat": "anon 1000\nfile 5000\nfile_mapped 500\n",
                f"{V1}/{LIMIT_V1}": "9000",
                f"{V1}/memory.stat": "rss 1000\nmapped_file 0\ntotal_mapped_file 700\n",
            },
            [9000 - 1000 - 500, 9000 - 1000 - 700],
            id="libraries that another group brought",
        ),
        pytest.param(
            {f"{V2}/memory.max": "max", f"{V2}/memory.high": "900\n", f"{V2}/memory.stat": "anon 300\n"},
            [600],
            id="high",
        ),
        pytest.param(
            {f"{V2}/memory.max": "500", f"{V2}/memory.high": "max\n", f"{V2}/memory.stat": "anon 300\n"},
            [200],
            id="high without a limit",
        ),
        pytest.param({f"{V2}/memory.max": "1000", f"{V2}/memory.stat": "what is this"}, [], id="not understood"),
        pytest.param({"proc/self/cgroup": "nothing here\n\n:", f"{V2}/memory.max": "max"}, [], id="no groups named"),
    ],
)
def test_limits_of_control_groups(tmp_path: Path, files: dict[str, str], rooms: list[int]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [group.room for group in free_memory.group_limits(tmp_path)] == rooms


LIMITS = """
import resource, sys
from rabbitllm.engine import free_memory
from pathlib import Path
import psutil
Path(sys.argv[1], "proc/self").mkdir(parents=True)
rooms = lambda: [limit.room for limit in free_memory.process_limits(Path(sys.argv[1]))]
Path(sys.argv[1], "proc/self/status").write_text("VmSize: 3 kB\\nVmData: 5 kB\\n")
assert rooms() == []
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
assert rooms() == [(3 << 30) - (3 << 10)]
resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
assert rooms() == [(3 << 30) - (3 << 10), (2 << 30) - (5 << 10)]
used = psutil.Process().memory_info().vms
assert free_memory.available_ram() <= (3 << 30) - used + (64 << 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system cannot be asked")
def test_limits_of_the_process(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LIMITS, str(tmp_path)], check=True)


def test_memory_for_less_than_a_layer_is_refused_before_the_first_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_checkpoint(tmp_path / "model", "llama")
    split(folder)
    monkeypatch.setattr(devices, "available_ram", lambda: 1 << 20)
    with pytest.raises(
        NotEnoughMemoryError, match=r"A pass takes at least .* of memory .*may take 1\.05 MB"
    ) as refused:
        AutoModel.from_pretrained(folder, device="cpu", max_memory={"cpu": 0})
    assert "its largest unit is " in refused.value.problem
    monkeypatch.setattr(devices, "available_ram", lambda: 64 << 20)
    AutoModel.from_pretrained(folder, device="cpu", max_memory={"cpu": 0})


IN_A_GROUP = """
import sys
import rabbitllm
import rabbitllm.engine.load
from rabbitllm import AutoModel, RabbitLLMError
small, wide = sys.argv[1:]
def once(folder):
    model = AutoModel.from_pretrained(folder, device="cpu", max_memory={"cpu": 0}, show_layer_progress=False)
    return model.generate(model.tokenizer("a", return_tensors="pt")["input_ids"], max_new_tokens=1).shape[1]
once(small)  # all that is imported is there
print("idle", flush=True)
sys.stdin.readline()
print(rabbitllm.plan(wide, device="cpu", max_memory={"cpu": 0}).generations[0].too_little_memory is not None)
try:
    print(once(wide))
except RabbitLLMError as error:
    print(type(error).__name__)
"""


@pytest.mark.long
@pytest.mark.skipif(not can_limit_memory(), reason="no control group with a memory limit can be made")
@pytest.mark.parametrize(
    ("spare", "lines"),
    [
        (48 << 20, ["True", "NotEnoughMemoryError"]),
        (100 << 20, ["True", "NotEnoughMemoryError"]),
        (768 << 20, ["False", "3"]),
    ],
)
def test_small_control_group_is_an_error(tmp_path: Path, spare: int, lines: list[str]) -> None:
    """With too little for a layer of 56 MiB the load is an error, and the process is not killed."""
    small = build_checkpoint(tmp_path / "small", "llama", dtype=torch.bfloat16)
    sizes = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 2}
    wide = build_checkpoint(tmp_path / "wide", "llama", dtype=torch.bfloat16, **sizes)
    for folder in (small, wide):
        split(folder)
    with control_group(f"rabbitllm-test-{os.getpid()}") as group:
        command = [*group.entering(), sys.executable, "-c", IN_A_GROUP, str(small), str(wide)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "idle\n"
        group.limit_to_idle_and(spare)
        output, _ = process.communicate("\n", timeout=600)
    assert (process.returncode, output.split()) == (0, lines)


@pytest.mark.skipif(sys.platform != "linux", reason="the system cannot be asked")
def test_unfilled_buffers_count_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available_ram", lambda: 1 << 30)
    device = CpuDevice()
    whole = 8 << 20
    buffers = [device.host_buffer(whole) for _ in range(2)]
    assert device.free_bytes() == (1 << 30) - 2 * whole
    buffers[0][:] = 1
    assert device.free_bytes() == (1 << 30) - whole  # the system counts what was written to
    buffers[1][: whole // 2] = 1
    assert device.free_bytes() == (1 << 30) - whole // 2
    buffers.clear()
    assert device.free_bytes() == 1 << 30


with_glibc = pytest.mark.skipif(trimming() is None, reason="no glibc here")

CODE = """
import sys
import psutil, torch
from rabbitllm.engine.free_memory import keep_large_apart, trimming
if sys.argv[1] == "apart":
    assert keep_large_apart()
used = lambda: psutil.Process().memory_info().rss >> 20
for size in (8, 24):  # after which glibc has blocks of up to so many MiB in its heap
    torch.ones(size << 20, dtype=torch.uint8)
large, stays = [], []
before = used()
for number in range(20):
    large.append(torch.ones(6 << 20, dtype=torch.uint8))
    stays.append(torch.ones(60_000, dtype=torch.uint8))
filled = used()
del large
freed = used()
trimming()()
print(filled - before, freed - before, used() - before)
"""


@pytest.mark.long
@with_glibc
def test_large_blocks_are_allocated_apart() -> None:
    filled_by_mode = {}
    for how in ("apart", "as usual"):
        done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
        filled_by_mode[how] = [int(part) for part in done.stdout.split()]
    assert min(filled for filled, _, _ in filled_by_mode.values()) > 110
    assert filled_by_mode["apart"][1] < 20
    assert filled_by_mode["as usual"][1] > 80  # else there is nothing to mend
    assert filled_by_mode["as usual"][2] < 20
