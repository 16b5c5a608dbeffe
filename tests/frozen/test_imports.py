"""What a command imports, and how much memory splitting and streaming take: either may shrink, neither may grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.frozen.support import checkpoints, golden
from tests.frozen.support.command_line import rabbitllm

GOLDEN = "imports.json"
ROOT = Path(__file__).parent.parent.parent

HEAVY = (
    *("accelerate", "bitsandbytes", "compressed_tensors", "fastapi", "httpx", "huggingface_hub", "jinja2", "llvmlite"),
    *("lm_eval", "matplotlib", "numba", "numpy", "openai", "pandas", "peft", "PIL", "psutil", "pyarrow", "pydantic"),
    *("ray", "rich", "safetensors", "scipy", "starlette", "tokenizers", "torch", "tqdm", "transformers", "typer"),
    *("uvicorn", "yaml"),
)
"""Packages that take time or memory to import."""

COMMANDS: dict[str, tuple[str, ...]] = {
    "--help": ("--help",),
    "--version": ("--version",),
    "a wrong option": ("run", "--nothing"),
    "a wrong value": ("pull", "model", "--max-disk", "much"),
    **{f"{name} --help": (name, "--help") for name in ("pull", "run", "chat", "serve", "batch")},
    "ls": ("ls", "."),
    "show of a split": ("show", "model/splitted_model"),
    "verify": ("verify", "model"),
    "inspect": ("inspect", "model"),
    "pull of what is there": ("pull", "model"),
    "rm": ("rm", "model/splitted_model", "--yes"),
}
"""Run in this order, in a folder with a checkpoint `model` that is split."""
CODE = {
    "import rabbitllm": "import rabbitllm",
    "AutoModel": "from rabbitllm import AutoModel",
    "errors": "from rabbitllm import NotEnoughSpaceException, RabbitLLMError",
    "Hosts": "from rabbitllm import Hosts",
    "a wrong argument": "from rabbitllm import AutoModel\nAutoModel.from_pretrained('x', nothing=1)",
}
DRAWN = ("import rabbitllm", "AutoModel", "--help", "ls", "a wrong value", "pull of what is there")
"""Those that the short run looks at."""


def imported(code: str, folder: Path) -> list[str]:
    """The heavy packages that a process has imported when it ends."""
    told = (
        "import atexit, json, sys\natexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", told + code],
        capture_output=True,
        text=True,
        cwd=folder,
        env=_environment(),
        check=False,
    )
    modules = json.loads(ran.stderr.splitlines()[-1])
    return sorted(set(HEAVY) & {name.partition(".")[0] for name in modules})


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _running(arguments: tuple[str, ...]) -> str:
    words = ["rabbitllm", *arguments]
    return f"import runpy, sys\nsys.argv = {words!r}\nrunpy.run_module('rabbitllm', run_name='__main__')\n"


def everything() -> dict[str, str]:
    """Name -> code of a process."""
    return {**CODE, **{name: _running(arguments) for name, arguments in COMMANDS.items()}}


def with_a_split(folder: Path) -> Path:
    checkpoints.write(folder / "model")
    assert rabbitllm("pull", folder / "model").code == 0
    return folder


def make(folder: Path) -> None:
    """Write the golden file; for `tests.frozen.make`."""
    with_a_split(folder)
    golden.write(GOLDEN, {name: imported(code, folder) for name, code in everything().items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_a_split(tmp_path_factory.mktemp("imports"))


@pytest.mark.parametrize(
    "name", [name if name in DRAWN else pytest.param(name, marks=pytest.mark.long) for name in everything()]
)
def test_nothing_more_is_imported(folder: Path, name: str) -> None:
    known = golden.read(GOLDEN)[name]
    found = imported(everything()[name], folder)
    assert set(found) <= set(known)


def test_the_golden_sets_are_small() -> None:
    """Else nothing could be more."""
    known = golden.read(GOLDEN)
    assert known["import rabbitllm"] == []
    for name in ("AutoModel", "--help", "--version", "ls", "a wrong value", "rm"):
        assert not {"torch", "transformers", "bitsandbytes", "numba", "fastapi"} & set(known[name]), name


MEASURE = """
import sys, threading

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

class Watch:
    def __enter__(self):
        self.idle = self.most = anonymous()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self
    def look(self):
        while not self.over.wait(0.005):
            self.most = max(self.most, anonymous())
    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        print(self.most - self.idle)

import torch, transformers, bitsandbytes.functional
import rabbitllm
torch.set_num_threads(1)
"""
SPLIT = """
rabbitllm.split_and_save_layers(sys.argv[2], compression={compression!r}, sequential_shard_processing=True)
with Watch():
    rabbitllm.split_and_save_layers(sys.argv[1], compression={compression!r}, sequential_shard_processing=True)
"""
PASS = """
model = rabbitllm.AutoModel.from_pretrained(sys.argv[1], device="cpu", max_memory={"cpu": 0}, split=False)
ids = torch.tensor([[1, 2, 3, 4]])
with Watch(), torch.inference_mode():
    model(ids)
    model(ids)
"""


def over_idle(code: str, *arguments: Path) -> int:
    """Bytes of anonymous memory that a process takes at most over what it had before."""
    command = [sys.executable, "-c", MEASURE + code, *map(str, arguments)]
    ran = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout.split()[-1])


def zeros(folder: Path, *, hidden: int, layers: int, vocabulary: int) -> Path:
    """A Llama of which all weights are zero, in one file that takes no room on the disk."""
    settings: dict[str, Any] = {**checkpoints.LLAMA, "hidden_size": hidden, "intermediate_size": hidden}
    settings |= {"num_hidden_layers": layers, "vocab_size": vocabulary, "num_attention_heads": 8}
    config = transformers.LlamaConfig(**{key: value for key, value in settings.items() if key != "model_type"})
    folder.mkdir()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        names = transformers.LlamaForCausalLM(config).state_dict()
    header, at = {}, 0
    for name, tensor in names.items():
        end = at + tensor.numel() * 2
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(file.tell() + at)
    return folder


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("compression", [None, "4bit", "8bit"])
def test_memory_of_a_sequential_split(tmp_path: Path, compression: str | None) -> None:
    """It depends on no tensor, layer, shard or model: the bound is less than half of one tensor."""
    model = zeros(tmp_path / "model", hidden=1024, layers=1, vocabulary=200_000)
    warm = checkpoints.write(tmp_path / "warm")
    tensor = 200_000 * 1024 * 2
    assert over_idle(SPLIT.format(compression=compression), model, warm) < min(tensor / 2, 200_000_000)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_streamed_pass(tmp_path: Path) -> None:
    """Twice the largest layer, and what a pass computes in; a fifth of the model."""
    model = zeros(tmp_path / "model", hidden=1024, layers=32, vocabulary=2000)
    size = (model / "model.safetensors").stat().st_size
    layer = 7 * 1024 * 1024 * 2
    assert over_idle(PASS, model) < min(3 * layer + 40_000_000, size / 5)
