"""What importing costs. Which way imports go is a contract in pyproject.toml, which `make lint` checks."""

from __future__ import annotations

import ast
import functools
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

import rabbitllm
from tests.support.fresh_process import python

PACKAGE = Path(rabbitllm.__file__).parent
ROOT = PACKAGE.parent

PUBLIC = {
    "__version__",
    "AutoModel",
    "Hosts",
    "NotEnoughSpaceException",
    "batch",
    "RabbitLLMBaichuan",
    "RabbitLLMBaseModel",
    "RabbitLLMChatGLM",
    "RabbitLLMError",
    "RabbitLLMInternLM",
    "RabbitLLMLlama2",
    "RabbitLLMMistral",
    "RabbitLLMMixtral",
    "RabbitLLMQWen",
    "RabbitLLMQWen2",
    "RabbitLLMQWen3",
    "compress_layer_state_dict",
    "lazy_load",
    "plan",
    "quality",
    "register_layer_naming",
    "split_and_save_layers",
    "uncompress_layer_state_dict",
}


def modules() -> dict[str, Path]:
    """Every module of the package: dotted name -> file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@dataclass(frozen=True)
class Contents:
    """What tests ask about a file: names of imported modules, texts, names of classes."""

    imported: frozenset[str]
    needed: frozenset[str]
    members: frozenset[str]
    texts: frozenset[str]
    classes: tuple[str, ...]


@functools.cache
def contents(path: Path) -> Contents:
    """Each file is parsed once; trees of all would take hundreds of megabytes.

    `members` are what is imported from a module, with its name, which may be modules. `needed` are the first names of
    what is imported whenever the file is.
    """
    imported, needed, members, texts, classes = set(), set(), set(), set(), []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        match node:
            case ast.Import(names=names):
                needed |= {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=module):
                needed.add((module or "").partition(".")[0])
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                imported |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), names=names):
                imported.add(module)
                members |= {f"{module}.{alias.name}" for alias in names}
            case ast.Constant(value=str(text)):
                texts.add(text)
            case ast.ClassDef(name=name):
                classes.append(name)
    return Contents(*map(frozenset, (imported, needed, members, texts)), tuple(classes))


def output_of(code: str) -> str:
    return python(code).stdout.strip()


def test_few_modules_name_bitsandbytes() -> None:
    naming = {
        name
        for name, path in modules().items()
        if any(imported.startswith("bitsandbytes") for imported in contents(path).imported)
    }
    # the one quantizes with it; the other measures its own modules, of checkpoints that are published for them
    assert naming == {"rabbitllm.quant.schemes", "rabbitllm.estimate.machine"}


def test_importing_the_package_imports_nothing_heavy() -> None:
    loaded = output_of("import sys, rabbitllm; print(*sys.modules)").split()
    heavy = {"torch", "transformers", "numpy", "huggingface_hub", "safetensors", "accelerate", "bitsandbytes", "psutil"}
    assert not heavy & set(loaded)
    assert {name for name in loaded if name.startswith("rabbitllm")} == {"rabbitllm", "rabbitllm.version"}


def test_the_front_door_itself_needs_no_torch() -> None:
    """So that `rabbitllm --help` and a wrong argument answer at once."""
    loaded = output_of("import sys; from rabbitllm import AutoModel; print(*sys.modules)").split()
    assert not {"torch", "transformers", "bitsandbytes"} & set(loaded)


def test_pip_install_without_extras_brings_what_modules_import() -> None:
    """So that every command of the README runs; packages of the extras are imported where they are used."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in project["dependencies"]}  # type: ignore[index]
    needed = {name for path in modules().values() for name in contents(path).needed}
    assert needed >= {"uvicorn", "starlette", "pydantic", "greenlet"}
    assert needed - {*sys.stdlib_module_names, "rabbitllm", "llvmlite"} <= installed  # numba brings llvmlite


def test_all_is_exact() -> None:
    assert set(rabbitllm.__all__) == PUBLIC
    assert len(rabbitllm.__all__) == len(PUBLIC)
    assert dir(rabbitllm) == sorted(PUBLIC)
    for name in rabbitllm.__all__:
        assert getattr(rabbitllm, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Automodel'"):
        rabbitllm.Automodel  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text(encoding="utf-8"))
    homes = {
        alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert homes == {**rabbitllm._HOME, "__version__": "rabbitllm.version"}


def test_every_module_is_importable_without_a_gpu() -> None:
    names = [name for name in modules() if not name.endswith("__main__")]
    code = f"""
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import importlib
for name in {names!r}:
    importlib.import_module(name)
import torch
print(torch.cuda.is_available())
"""
    assert output_of(code).splitlines()[-1] == "False"


@pytest.mark.parametrize(
    "module",
    ["errors", "base.options", "base.progress", "storage.durable", "telemetry.profiler", "display.pictures", "version"],
)
def test_the_ground_floor_stands_alone(module: str) -> None:
    loaded = set(output_of(f"import sys; import rabbitllm.{module}; print(*sys.modules)").split())
    assert not {"torch", "transformers", "numpy", "huggingface_hub", "matplotlib"} & loaded


def test_class_names_are_unique() -> None:
    """So that a search for `class Request` has one answer; an underscore makes no other name."""
    homes: dict[str, list[str]] = {}
    for name, path in modules().items():
        for cls in contents(path).classes:
            homes.setdefault(cls.lstrip("_"), []).append(name)
    assert {cls: found for cls, found in homes.items() if len(found) > 1} == {}


def imports_of(module: str, path: Path, known: set[str]) -> set[str]:
    """The modules among `known` that a file imports, by whichever form."""
    inside = contents(path)
    # texts, too: a module may be imported by its name when it is first used
    return (inside.imported | inside.members | inside.texts) & known - {module}


def test_a_module_begins_with_an_underscore_if_and_only_if_no_other_room_imports_it() -> None:
    files = modules()
    users: dict[str, set[str]] = {module: set() for module in files}
    for module, path in files.items():
        for imported in imports_of(module, path, set(files)):
            users[imported].add(module.split(".")[1] if "." in module else "")
    for path in (*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tools/**/*.py")):
        for imported in imports_of("", path, set(files)):
            users[imported].add(path.relative_to(ROOT).parts[0])
    for module, path in files.items():
        inside = module.split(".")[2:]
        if inside and path.name not in {"__init__.py", "__main__.py"}:
            own_room = users[module] <= {module.split(".")[1]}
            assert inside[-1].startswith("_") == own_room, f"{module} is imported by {sorted(users[module])}"


@pytest.mark.parametrize("init", sorted(PACKAGE.glob("*/**/__init__.py")), ids=lambda init: init.parent.name)
def test_a_room_lists_its_public_modules(init: Path) -> None:
    statements = ast.parse(init.read_text(encoding="utf-8")).body
    (names,) = (
        ast.literal_eval(node.value)
        for node in statements
        if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "__all__"
    )
    modules_inside = {
        path.stem for path in (*init.parent.glob("*.py"), *(file.parent for file in init.parent.glob("*/__init__.py")))
    }
    if not any(isinstance(node, ast.ImportFrom) and node.module != "__future__" for node in statements):
        assert names == sorted(name for name in modules_inside if not name.startswith("_"))
