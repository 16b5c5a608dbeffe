"""Checkpoints with one thing wrong, split sequentially in a process of their own; a line of JSON for each.

`tell` damages copies of a sound checkpoint with seeds from a first one on. What is wrong is in a header (shape, dtype,
name, place), the index, the config, the generation config or the tokenizer's files; every file stays one that its
format allows.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

SECONDS = 600
MEMORY_BYTES = 12 << 30
ODD = (None, True, False, "", "x", 0, -1, 1, 2, 3, 7, 2.5, -0.5, 10**6, 10**12, 2**63, [], {}, [1], ["x"], {"x": 1})
DTYPES = {
    1: ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"),
    2: ("F16", "BF16", "I16", "U16"),
    4: ("F32", "I32", "U32"),
    8: ("F64", "I64", "U64", "C64"),
}
JSON_FILES = (
    *("config.json", "config.json", "config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"),
)


class TookTooLong(BaseException):
    """A call took more than `SECONDS`."""


def damage(folder: Path, random: Random) -> str:
    """Change one thing of a checkpoint; returns what was changed."""
    if random.random() < 0.45:
        return _damage_header(random.choice(sorted(folder.glob("*.safetensors"))), random)
    names = [name for name in JSON_FILES if (folder / name).exists()]
    return _damage_json(folder / random.choice(names), random)


def _damage_header(path: Path, random: Random) -> str:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table: dict[str, Any] = json.loads(data[8 : 8 + length])
    names = [name for name in table if name != "__metadata__"]
    name = random.choice(names)
    entry = table[name]
    size = entry["data_offsets"][1] - entry["data_offsets"][0]
    elements = max(1, math.prod(entry["shape"]))
    change = random.choice(("shape", "shape", "dtype", "dtype", "rename", "swap", "remove", "reorder"))
    if change == "shape":
        half = elements // 2
        others = ([elements], [1, elements], entry["shape"][::-1], [half, 2], [*entry["shape"], 1], [2, half])
        entry["shape"] = random.choice(others)
    elif change == "dtype":
        width = random.choice(list(DTYPES))
        entry["dtype"] = random.choice(DTYPES[width])
        entry["shape"] = [size // width] if width != size // elements else entry["shape"]
    elif change == "rename":
        new = random.choice((name + "x", name.replace("layers.0", "layers.7"), "model." + name, name.replace("_", "-")))
        table = {new if key == name else key: value for key, value in table.items()}
    elif change == "swap":
        other = random.choice(names)
        table[name], table[other] = table[other], table[name]
    elif change == "remove":
        data = data[: 8 + length] + data[8 + length :]
        del table[name]
    else:
        other = random.choice(names)
        table[name]["data_offsets"], table[other]["data_offsets"] = (
            table[other]["data_offsets"],
            table[name]["data_offsets"],
        )
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    return f"{path.name}: {change} of {name}"


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value that holds another one, long lists by their first entries."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*place, key)
        yield from places(inner, (*place, key))


def _damage_json(path: Path, random: Random) -> str:
    content = json.loads(path.read_text())
    place = random.choice([place for place in places(content) if len(place) < 5])
    inside = content
    for key in place[:-1]:
        inside = inside[key]
    if random.random() < 0.15:
        del inside[place[-1]]
        new: Any = "gone"
    else:
        new = inside[place[-1]] = random.choice(ODD)
    path.write_text(json.dumps(content))
    return f"{path.name}: {'.'.join(map(str, place))} = {new!r}"


def outcome(folder: Path) -> tuple[str, str]:
    """Split a checkpoint and load it, as a user would: what became of it, and the error."""
    import torch

    from rabbitllm import AutoModel
    from rabbitllm.errors import RabbitLLMError

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    signal.alarm(SECONDS)
    try:
        model = AutoModel.from_pretrained(
            folder, sequential_shard_processing=True, device="cpu", show_layer_progress=False
        )
    except TookTooLong:
        result, error = "hang", f"more than {SECONDS} s"
    except RabbitLLMError as raised:
        result, error = "refused", f"{type(raised).__name__}: {raised.problem}"
    except Exception as raised:
        result, error = "raw", f"{type(raised).__name__}: {raised}"
    else:
        result, error = "loads", ""
        try:
            with torch.inference_mode():
                model(torch.tensor([[1, 5, 9]]))
        except RabbitLLMError as raised:
            result, error = "explained", f"{type(raised).__name__}: {raised.problem}"
        except Exception as raised:
            result, error = "fails", f"{type(raised).__name__}: {raised}"
    finally:
        signal.alarm(0)
    if result in ("refused", "raw", "hang"):
        after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        if after != before:
            result = "lost" if any(path not in after for path in before) else f"{result}, left something"
    return result, " ".join(error.split())[:300]


def tell(call: Mapping[str, Any]) -> None:
    """Write a line for each seed: [seed, what was changed, what became of it, the error].

    Args:
        call: the folder `sound`, the `first` seed and their `count`, and the file `to` write to.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    def alarm(number: int, frame: object) -> None:
        raise TookTooLong

    signal.signal(signal.SIGALRM, alarm)
    warnings.simplefilter("ignore")
    for seed in range(call["first"], call["first"] + call["count"]):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(shutil.copytree(call["sound"], Path(scratch) / "model"))
            changed = damage(folder, Random(seed))
            with contextlib.redirect_stdout(sys.stderr):
                result, error = outcome(folder)
        with open(call["to"], "a") as rows:
            rows.write(json.dumps([seed, changed, result, error]) + "\n")
