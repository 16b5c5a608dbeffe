"""Names, signatures, errors and enumerations that users have: more may come, none may go or change unsaid."""

from __future__ import annotations

import ast
import importlib
import json
import pickle
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rabbitllm
from tests.frozen.support import golden
from tests.support.builders import build_checkpoint
from tests.support.one_thread import one_thread as one_thread

GOLDEN = "public_names.json"
HERE = Path(__file__).parent
SEAM = "seam.py"

DOCUMENTED = {
    "rabbitllm.generation.batch": ("Batch", "Limits"),
    "rabbitllm.generation.request": ("Delta", "Request"),
    "rabbitllm.notebooks": ("settle",),
}
"""Names that the documents import from modules of the package."""
RESULTS = {"lazy_load": "rabbitllm", "plan": "rabbitllm", "quality": "rabbitllm", "settle": "rabbitllm.notebooks"}
"""Public functions whose annotation is the record that they return -> their module."""
ATTRIBUTES = ("config", "device", "dtype", "generation_config", "placement", "profiler", "tokenizer")
"""What every model has, besides methods."""
FOR_THE_PACKAGE = ("joint_pass", "pass_line", "shared_passes")
"""Members of a model that only the package itself uses; no document names them."""


def names() -> dict[str, Any]:
    """The surface of every name that can be imported."""
    found = {f"rabbitllm.{name}": golden.surface_of(getattr(rabbitllm, name)) for name in rabbitllm.__all__}
    for module, own in DOCUMENTED.items():
        found |= {f"{module}.{name}": golden.surface_of(getattr(importlib.import_module(module), name)) for name in own}
    return found


def errors() -> dict[str, Any]:
    """Every error class: its bases, what it is called with, and the data that it has."""
    for name in rabbitllm.__all__:
        getattr(rabbitllm, name)  # an error class is known once its module is imported
    found = {}
    for cls in _subclasses(rabbitllm.RabbitLLMError):
        surface = golden.surface_of(cls)
        data = {name: type(value).__name__ for name, value in vars(cls("problem", "remedy")).items()}
        found[cls.__name__] = {"bases": surface["bases"], "call": surface["call"], "data": data}
    return found


def _subclasses(cls: type) -> Iterator[type]:
    if cls.__module__.partition(".")[0] == "rabbitllm":
        yield cls
        for below in cls.__subclasses__():
            yield from _subclasses(below)


def results(folder: Path) -> dict[str, Any]:
    """The surface of what public functions return: records, a model, and what a model has."""
    found = {}
    for name, module in RESULTS.items():
        hints = typing.get_type_hints(getattr(importlib.import_module(module), name))
        found[name] = golden.surface_of(hints["return"])
    checkpoint = build_checkpoint(folder / "model", "llama")
    model = rabbitllm.AutoModel.from_pretrained(str(checkpoint), device="cpu", profiling_mode=True, split=False)
    progress = rabbitllm.batch(model, [{"prompt": "a"}], folder / "out.jsonl", max_new_tokens=1)
    of_the_model = golden.surface_of(type(model))["members"]
    unit = model.placement.units[0]
    return {
        **found,
        "batch": golden.surface_of(type(progress)),
        "model": {name: surface for name, surface in of_the_model.items() if name not in FOR_THE_PACKAGE},
        "model attributes": {name: hasattr(model, name) for name in ATTRIBUTES},
        "model.placement": golden.surface_of(type(model.placement)),
        "model.placement.units[0]": golden.surface_of(type(unit)),
        "model.placement.units[0].tier": golden.surface_of(type(unit.tier)),
        "model.profiler": golden.surface_of(type(model.profiler)),
        "model.profiler.passes[0]": golden.surface_of(type(model.profiler.passes[0])),
        "model.profiler.as_json": golden.structure_of(model.profiler.as_json()),
    }


def make(folder: Path) -> None:
    """Write the golden file; for `tests.frozen.make`."""
    golden.write(GOLDEN, {"names": names(), "errors": errors(), "results": results(folder)})


def test_names() -> None:
    assert golden.unexcused(golden.read(GOLDEN)["names"], names()) == []


def test_errors() -> None:
    assert golden.unexcused(golden.read(GOLDEN)["errors"], errors()) == []


def test_errors_show_their_remedy_and_survive_other_processes() -> None:
    for cls in _subclasses(rabbitllm.RabbitLLMError):
        error = cls("found this", "do that")
        assert (error.problem, error.remedy) == ("found this", "do that")  # type: ignore[attr-defined]
        assert all(part in str(error) for part in ("found this", "do that"))
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), vars(again)) == (cls, vars(error))


def test_results(tmp_path: Path) -> None:
    assert golden.unexcused(golden.read(GOLDEN)["results"], results(tmp_path)) == []


def test_the_comparison_notices_what_matters() -> None:
    def now(a: Any, /, b: int = 1, *, c: str = "x") -> None: ...
    def more(a: Any, /, b: int = 1, d: int = 2, *, c: str = "x") -> None: ...
    def other_default(a: Any, /, b: int = 2, *, c: str = "x") -> None: ...
    def one_less(a: Any, /, b: int = 1) -> None: ...
    def one_required(a: Any, /, b: int = 1, *, c: str = "x", d: int) -> None: ...
    def moved(a: Any, /, d: int = 2, b: int = 1, *, c: str = "x") -> None: ...

    known = golden.surface_of(now)
    assert list(golden.differences(known, golden.surface_of(more))) == []
    for changed in (other_default, one_less, one_required, moved):
        assert list(golden.differences(known, golden.surface_of(changed))), changed.__name__
    gone = "`rabbitllm.plan` has no bandwidth"
    text = f"| `rabbitllm.batch` |\n{golden.SECTION}\n\n| name | now |\n| --- | --- |\n| {gone} | `max_disk` |\n"
    assert golden.excused(text + "\n## More\n\n| `rabbitllm.quality` | |\n") == {"rabbitllm.plan"}


def test_only_the_seam_knows_the_inside() -> None:
    """The frozen suite stays as it is while everything inside the package moves."""
    public = {"rabbitllm", *DOCUMENTED}
    wrong = []
    for path in sorted(HERE.rglob("*.py")):
        if path == HERE / SEAM:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            inner = [name for name in modules if name.startswith("rabbitllm.") and name not in public]
            wrong += [f"{path.name} imports {name}" for name in inner]
            if isinstance(node, ast.ImportFrom) and node.module == "rabbitllm":
                public_here = {*rabbitllm.__all__, *(name.partition(".")[2] for name in DOCUMENTED)}
                wrong += [f"{path.name} imports {alias.name}" for alias in node.names if alias.name not in public_here]
    assert wrong == []


def test_what_it_takes_of_the_tests_knows_nothing_inside_either() -> None:
    support, wrong = HERE.parent / "support", []
    of_kills = "tests.support.crashes"  # which the seam is about
    for path in sorted(HERE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.support."):
                if node.module == of_kills:
                    continue
                taken = support / f"{(node.module or '').rpartition('.')[2]}.py"
                if "rabbitllm." in taken.read_text(encoding="utf-8") and _imports_inside(taken):
                    wrong.append(f"{path.name} takes {taken.name}")
    assert wrong == []


def _imports_inside(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    named = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return any(name.startswith("rabbitllm.") for name in named)


def test_golden_files_are_small() -> None:
    assert sum(path.stat().st_size for path in golden.FOLDER.rglob("*") if path.is_file()) < 3 << 20
    for path in golden.FOLDER.rglob("*.json"):
        json.loads(path.read_text(encoding="utf-8"))
