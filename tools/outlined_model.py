"""Prints what rabbitllm/estimate/models.json has of a model's tensors, from the headers of its shards.

    python -m tools.outlined_model FOLDER

Of the shards only the headers are read. Layers with equal tensors are of one kind, and are written once; so are experts
that differ in their number alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rabbitllm.formats.safetensors_file import read_header

_LAYER = re.compile(r"(model\.(?:language_model\.)?layers\.)(\d+)(\..*)")
_EXPERT = re.compile(r"(?<=\.experts\.)(\d+)")
Form = list[Any]
"""A shape, after its dtype unless that is BF16."""


def entry_of(config: Mapping[str, Any], tensors: Mapping[str, Form]) -> dict[str, Any]:
    """Return the entry of a model with these tensors, by name."""
    text = config.get("text_config", config)
    number, stem = text["num_hidden_layers"], "model.layers."
    layers: list[dict[str, Form]] = [{} for _ in range(number)]
    around: dict[str, Form] = {}
    for name, form in tensors.items():
        found = _LAYER.fullmatch(name)
        if found and int(found[2]) < number:
            stem = found[1]
            layers[int(found[2])][found[3]] = form
        else:
            around[name] = form
    firsts = [at for at, layer in enumerate(layers) if layer not in layers[:at]]
    kinds = [layers[at] for at in firsts]
    sample: dict[str, Any] = {"num_hidden_layers": len(kinds)}
    if text.get("layer_types"):
        sample["layer_types"] = [text["layer_types"][at] for at in firsts]
    if "first_k_dense_replace" in text:
        sample["first_k_dense_replace"] = sum(at < text["first_k_dense_replace"] for at in firsts)
    inside = {f"{stem}{at}{rest}": form for at, kind in enumerate(kinds) for rest, form in kind.items()}
    return {
        "config": dict(config),
        "sample": {"text_config": sample} if "text_config" in config else sample,
        "layers": "".join(str(kinds.index(layer)) for layer in layers),
        "tensors": _folded({**around, **inside}),
    }


def _folded(tensors: Mapping[str, Form]) -> dict[str, Form]:
    """Write tensors of experts once, with the number of experts in the name."""
    groups: dict[str, list[Form]] = {}
    for name, form in tensors.items():
        groups.setdefault(_EXPERT.sub("{}", name), []).append(form)
    return {name.replace("{}", f"{{{len(forms)}}}"): forms[0] for name, forms in groups.items()}


def tensors_in(folder: Path) -> dict[str, Form]:
    """Return the tensors of a folder's shards, by name."""
    found = [tensor for path in sorted(folder.glob("*.safetensors")) for tensor in read_header(path).tensors]
    return {one.name: [*([one.dtype] if one.dtype != "BF16" else []), *one.shape] for one in found}


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    """Print the entry."""
    folder = Path(arguments[0])
    print(json.dumps(entry_of(json.loads((folder / "config.json").read_text()), tensors_in(folder)), indent=1))


if __name__ == "__main__":
    main()
