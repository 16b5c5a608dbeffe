"""Prints what rabbitllm/estimate/models.json has of a model's tensors, from the headers of its shards.

    python -m tools.outlined_model FOLDER

Of the shards only the headers are read. Layers with equal tensors are of one kind, and are written once; so are tensors
of experts, of parts of a table and of blocks outside of the decoder, that differ in their number alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rabbitllm.formats.safetensors_file import read_header

_LAYER = re.compile(r"((?:language_model\.)?model\.(?:language_model\.)?layers\.)(\d+)(\..*)")
_ALIKE = re.compile(r"(?<=\.experts\.)\d+(?=\.)|(?<=\.shard_)\d+(?=\.)")
"""Numbers of experts, and of the parts of a table."""
_BLOCK = re.compile(r"(?<=[a-z]\.)\d+(?=\.)")
"""Number of a block outside of the decoder, unless `_ALIKE` finds one."""
_NUMBERED = ("ple_layer_ids",)
"""Settings with numbers of layers, from 1 on."""
Form = list[Any]
"""A shape, after its dtype unless that is BF16."""


def entry_of(config: Mapping[str, Any], tensors: Mapping[str, Form]) -> dict[str, Any]:
    """Return the entry of a model with these tensors, by name."""
    text = config.get("text_config", config)
    number, stem = text["num_hidden_layers"], "model.layers."
    layers: list[dict[str, Form]] = [{} for _ in range(number)]
    around: dict[str, Form] = {}
    for name, form in tensors.items():
        match = _LAYER.fullmatch(name)
        if match and int(match[2]) < number:
            stem = match[1]
            layers[int(match[2])][match[3]] = form
        else:
            around[name] = form
    firsts = [index for index, layer in enumerate(layers) if layer not in layers[:index]]
    kinds = [layers[index] for index in firsts]
    sample: dict[str, Any] = {"num_hidden_layers": len(kinds)}
    for key, value in text.items():
        if isinstance(value, list) and len(value) == number:  # layer_types and the like
            sample[key] = [value[index] for index in firsts]
        elif key in _NUMBERED:
            sample[key] = [new for new, index in enumerate(firsts, 1) if index + 1 in value]
    if "first_k_dense_replace" in text:
        sample["first_k_dense_replace"] = sum(index < text["first_k_dense_replace"] for index in firsts)
    inside = {f"{stem}{index}{rest}": form for index, layer in enumerate(kinds) for rest, form in layer.items()}
    return {
        "config": dict(config),
        "sample": {"text_config": sample} if "text_config" in config else sample,
        "layers": "".join(str(kinds.index(layer)) for layer in layers),
        "tensors": _folded({**around, **inside}),
    }


def _folded(tensors: Mapping[str, Form]) -> dict[str, Form]:
    """Write tensors that differ in one number alone once, with how many they are in place of the number."""
    groups: dict[tuple[str, str], dict[int, tuple[str, Form]]] = {}
    for name, form in tensors.items():
        match = _ALIKE.search(name) or (None if _LAYER.fullmatch(name) else _BLOCK.search(name))
        before, number, after = (name[: match.start()], int(match[0]), name[match.end() :]) if match else (name, 0, "")
        groups.setdefault((before, after), {})[number] = name, form
    folded: dict[str, Form] = {}
    for (before, after), members in groups.items():
        forms = [form for _, form in members.values()]
        if len(members) > 1 and sorted(members) == [*range(len(members))] and all(form == forms[0] for form in forms):
            folded[f"{before}{{{len(members)}}}{after}"] = forms[0]
        else:
            folded |= dict(members.values())
    return folded


def tensors_in(folder: Path) -> dict[str, Form]:
    """Return the tensors of a folder's shards, by name."""
    tensors = [tensor for path in sorted(folder.glob("*.safetensors")) for tensor in read_header(path).tensors]
    return {t.name: [*([t.dtype] if t.dtype != "BF16" or not t.shape else []), *t.shape] for t in tensors}


def as_text(content: Any, indent: int = 0) -> str:
    """JSON with each list in one line."""
    if not isinstance(content, Mapping) or not content:
        return json.dumps(content, ensure_ascii=False)
    inner = " " * (indent + 1)
    lines = [f"{inner}{json.dumps(key)}: {as_text(value, indent + 1)}" for key, value in content.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    """Print the entry."""
    folder = Path(arguments[0])
    print(as_text(entry_of(json.loads((folder / "config.json").read_text()), tensors_in(folder)), 2))


if __name__ == "__main__":
    main()
