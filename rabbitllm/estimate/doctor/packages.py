"""The installed packages, by their metadata; with `load`, whether those with compiled parts can be loaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata

from rabbitllm.estimate.doctor.records import Package
from rabbitllm.quant.schemes import check_compression

NAME = "rabbitllm"
ESSENTIAL: Mapping[str, str] = {
    "torch": "computes",
    "transformers": "has the models",
    "safetensors": "the format of layer files",
    "huggingface_hub": "fetches models",
    "accelerate": "moves outputs between devices",
    "psutil": "knows how much memory is free",
    "filelock": "keeps two splits apart",
}
WANTED: Mapping[str, str] = {
    "bitsandbytes": "compression, 8bit and 4bit",
    "numba": "quantizes and multiplies with codes at full speed on the CPU",
}
OPTIONAL: Mapping[str, str] = {
    "hf_xet": "faster downloads on the standard route",
    "matplotlib": "pictures (--plot)",
    "kernels": "transformers' own kernels for FP8 and MXFP4 on GPUs",
    "flash-attn": "FlashAttention 2, on GPUs with bfloat16",
    "sentencepiece": "tokenizers of some older models",
    "tiktoken": "tokenizers of some models",
    "compressed-tensors": "checkpoints that are published as compressed-tensors",
}
"""Packages -> their use."""
_LOADED: Mapping[str, Callable[[], object]] = {
    "torch": lambda: importlib.import_module("torch"),
    "transformers": lambda: importlib.import_module("transformers"),
    "bitsandbytes": lambda: check_compression("4bit"),
    "numba": lambda: importlib.import_module("numba"),
}
"""Packages with compiled parts, which may not fit this machine -> a function that loads them."""


def packages(*, load: bool = True) -> tuple[Package, ...]:
    """Return all packages that are used, the essential first.

    Args:
        load: try to import those with compiled parts, which takes seconds.
    """
    demands = _demands()
    found = []
    for names, essential, optional in ((ESSENTIAL, True, False), (WANTED, False, False), (OPTIONAL, False, True)):
        for name, brings in names.items():
            found.append(_package(name, brings, demands.get(_plain(name), ""), essential, optional, load))
    return tuple(found)


def _package(name: str, brings: str, wanted: str, essential: bool, optional: bool, load: bool) -> Package:
    try:
        version: str | None = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = None
    fits = version is not None and _fits(version, wanted)
    problem = _loading(_LOADED[name]) if load and version is not None and name in _LOADED else None
    return Package(name, version, wanted, fits, brings, essential, optional, problem)


def _loading(load: Callable[[], object]) -> str | None:
    """Return why a package cannot be loaded; None if it can."""
    try:
        load()
    except Exception as error:  # a broken library may raise anything
        return f"{type(error).__name__}: {error}".split("\n")[0]
    return None


def _demands() -> dict[str, str]:
    """Return package -> required versions; empty if this package is on the path but not installed."""
    try:
        lines = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        return {}
    return dict(_parsed(lines))


def _parsed(lines: list[str]) -> Iterator[tuple[str, str]]:
    from packaging.requirements import InvalidRequirement, Requirement

    for line in lines:
        try:
            one = Requirement(line)
        except InvalidRequirement:
            continue
        if str(one.specifier):
            yield _plain(one.name), str(one.specifier)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _fits(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return not wanted or SpecifierSet(wanted).contains(version, prereleases=True)
