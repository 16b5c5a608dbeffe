"""Which libraries a command imports: none that it does not use. They are most of the time until the first answer.

Garbage collections during the imports were a fifth of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rabbitllm.cli.main import app
from tests.support.commands import invoke
from tests.support.demo_models import demo_model

COMMANDS = [command.name or "" for command in app.registered_commands]
WITH_A_MODEL = sorted({*COMMANDS} - {"demo", "doctor", "ls"})
RUN = """
import atexit, gc, sys
sys.argv[0] = "rabbitllm"
collections = []

def collected(phase, found):
    is_importing = "torch" in sys.modules and not hasattr(sys.modules.get("rabbitllm.engine.load"), "load_model")
    if phase == "start" and found["generation"] == 2 and is_importing:
        collections.append("collection")

gc.callbacks.append(collected)
atexit.register(lambda: print(*sys.modules, *collections, "on" * gc.isenabled(), file=open({to!r}, "w")))
"""
RABBITLLM = "from rabbitllm.cli.main import main; main()"
TRANSFORMERS = """
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
ids = AutoTokenizer.from_pretrained(folder)("Hello", return_tensors="pt")
AutoModelForCausalLM.from_pretrained(folder).generate(**ids, max_new_tokens=2)
"""


def imported(tmp_path: Path, code: str, *arguments: str, exit_code: int = 0) -> set[str]:
    """The modules of a process at its end; "on" if it collects garbage then, "collection" if it did while importing."""
    to = tmp_path / "modules"
    command = [sys.executable, "-c", RUN.format(to=str(to)) + code, *arguments]
    environment = os.environ | {"RABBITLLM_HOME": str(tmp_path / "home"), "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == exit_code, done.stderr
    return set(to.read_text().split())


def heavy(modules: set[str]) -> set[str]:
    """The packages that take most time to import, and the submodules of torch that `import torch` does not need."""
    packages = {"torch", "transformers", "bitsandbytes", "numba", "sympy", "networkx"}
    parts = ("torch._dynamo", "torch._inductor", "torch.distributed")
    return {name for name in modules if name in packages or name.startswith(parts)}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["ls"], *([name, "--help"] for name in COMMANDS)])
def test_help_and_lists_need_no_torch(tmp_path: Path, arguments: list[str]) -> None:
    assert heavy(imported(tmp_path, RABBITLLM, *arguments)) == set()


FURTHER = {
    "batch": ["questions.jsonl", "-o", "answers.jsonl"],
    "convert": ["-o", "new"],
    "worker": ["--join", "127.0.0.1:1"],
}


@pytest.mark.parametrize("name", WITH_A_MODEL)
def test_a_path_without_a_model_is_refused_before_the_slow_imports(tmp_path: Path, name: str) -> None:
    arguments = (name, str(tmp_path / "nothing"), *FURTHER.get(name, ()))
    assert heavy(imported(tmp_path, RABBITLLM, *arguments, exit_code=1)) == set()


def test_a_path_without_a_draft_is_refused_before_the_slow_imports(tmp_path: Path) -> None:
    arguments = ("run", str(demo_model(tmp_path / "model")), "Hello", "--draft", str(tmp_path / "nothing"))
    assert heavy(imported(tmp_path, RABBITLLM, *arguments, exit_code=1)) == set()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What plain transformers imports."""
    folder = tmp_path_factory.mktemp("plain")
    return heavy(imported(folder, TRANSFORMERS, str(demo_model(folder / "model"))))


@pytest.mark.parametrize("compression", ["none", "q8_0", "4bit"])
def test_a_run_imports_no_more_than_plain_transformers(tmp_path: Path, compression: str, plain: set[str]) -> None:
    """Of a finished split, on the CPU; numba is for products with codes, and for those of bfloat16."""
    model = str(demo_model(tmp_path / "model"))
    invoke("pull", model, "--compression", compression)
    arguments = ("run", model, "Hello", "--compression", compression, "--device", "cpu", "--max-new-tokens", "2")
    modules = imported(tmp_path, RABBITLLM, *arguments)
    assert heavy(modules) - plain <= {"numba"}
    assert modules & {"collection", "on"} == {"on"}
