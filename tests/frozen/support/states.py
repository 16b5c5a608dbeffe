"""What lies on users' disks: by which calls each golden state came about, and by which it is opened or finished.

All calls are made in the state's own folder with relative paths, so that it can lie anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SCHEMES: dict[str, tuple[str, ...]] = {
    "none": (),
    "4bit": ("--compression", "4bit"),
    "8bit": ("--compression", "8bit"),
    "4bit-double": ("--compression", "4bit-double"),
    "4bit-fitted": ("--compression", "4bit", "--fit-scales"),
    "auto": ("--compression", "auto", "--max-disk", "520kB"),
}
"""Name -> options of a split."""
LAST_SHARD = {"kind": "create", "name": "lm_head.safetensors.part"}
"""All but the last shard are used up, and deleted; of the last one the first layers are there."""


@dataclass(frozen=True)
class State:
    """A folder as an earlier process left it.

    Attributes:
        name: of it.
        base: the checkpoints that are copied into it first.
        before: calls that were carried out.
        dead: the call that was killed, at `moment`; None: the state is whole.
        after: the call that opens or finishes it.
        by_a_kill: `dead` was killed by the system; else nothing reached the disk any more from `moment` on.
        split: the split directory that there is then; "" for none.
        code: exit code of `after`.
        long: only `make test-long` opens it.
    """

    name: str
    after: dict[str, Any]
    base: tuple[str, ...] = ("model",)
    before: tuple[dict[str, Any], ...] = ()
    dead: dict[str, Any] | None = None
    moment: dict[str, Any] = field(default_factory=dict)
    by_a_kill: bool = False
    split: str = ""
    code: int = 0
    long: bool = False


def command(*words: str, **more: Any) -> dict[str, Any]:
    """A call of the command line."""
    return {"command": [*words], **more}


def _directory(scheme: str) -> str:
    suffix = {"none": "", "4bit-fitted": ".4bit"}.get(scheme, f".{scheme}")
    return f"model/splitted_model{suffix}"


def _whole() -> list[State]:
    verify = {name: command("verify", _directory(name)) for name in SCHEMES}
    return [
        State(f"whole {name}", verify[name], before=(command("pull", "model", *options),), split=_directory(name))
        for name, options in SCHEMES.items()
    ]


def _cut() -> list[State]:
    found = []
    for name, options in SCHEMES.items():
        call = command("pull", "model", "--sequential", *options)
        drawn = name in ("none", "4bit-double")
        found.append(State(f"cut {name}", call, dead=call, moment=LAST_SHARD, split=_directory(name), long=not drawn))
    return found


MOMENTS = {
    "a line of the journal is not synced": {"kind": "sync", "name": "split.journal"},
    "a used shard is still there": {"kind": "unlink", "name": "model-00001-of-00003.safetensors"},
    "a layer has no marker": {"kind": "create", "name": "model.layers.0.safetensors.done"},
    "the manifest has no name": {"kind": "rename", "name": "split.json.part"},
    "the manifest and the journal are there": {"kind": "unlink", "name": "split.journal"},
}


def _moments() -> list[State]:
    call = command("pull", "model", "--sequential")
    split = _directory("none")
    return [State(text, call, dead=call, moment=moment, split=split, long=True) for text, moment in MOMENTS.items()]


def _meta() -> list[State]:
    call = command("pull", "meta", "--sequential", "--compression", "4bit")
    split = "meta/splitted_model.4bit"
    moment = {"kind": "unlink", "name": "consolidated.00.pth"}
    return [
        State("whole of Meta's ranks", command("verify", split), ("meta",), (call,), split=split, long=True),
        State("cut of Meta's ranks", call, ("meta",), dead=call, moment=moment, split=split),
    ]


def _first_order() -> list[State]:
    """As the first format version ordered the tensors of a layer."""
    split, words = "moe/splitted_model", ("pull", "moe", "--sequential")
    first = command(*words, first_order=True)
    return [
        State("whole in the first order", command("verify", split), ("moe",), (first,), split=split, long=True),
        State("cut in the first order", command(*words), ("moe",), dead=first, moment=LAST_SHARD, split=split),
    ]


def _others() -> list[State]:
    pull = command("pull", "model")
    remove = command("rm", "model/splitted_model", "--yes")
    convert = command("convert", "model", "--output", "converted", "--sequential")
    save = {"save": ["model", "saved"]}
    batch = command(
        *("batch", "model", "in.jsonl", "-o", "out.jsonl", "--no-split", "--device", "cpu", "--dtype", "float32"),
        *("--max-new-tokens", "3", "--sequences", "1"),
    )
    lines = ("model", "in.jsonl")
    return [
        State("cut removal", remove, before=(pull,), dead=remove, moment={"kind": "unlink", "name": "*", "number": 4}),
        State("cut conversion, in its split", convert, dead=convert, moment=LAST_SHARD),
        State(
            "cut conversion, publishing",
            convert,
            dead=convert,
            moment={"kind": "rename", "name": "*.safetensors", "number": 2},
            long=True,
        ),
        State(
            "cut saving, writing",
            save,
            dead=save,
            moment={"kind": "create", "name": ".saving/model-00002-*"},
            long=True,
        ),
        State(
            "cut saving, moving",
            save,
            dead=save,
            moment={"kind": "rename", "name": ".saving/model-*", "number": 1},
        ),
        State(
            "cut batch",
            batch,
            lines,
            dead=batch,
            moment={"kind": "sync", "name": "out.jsonl.journal", "number": 4},
            by_a_kill=True,
        ),
        State("whole batch", batch, lines, before=(batch,), long=True),
    ]


STATES = [*_whole(), *_cut(), *_moments(), *_meta(), *_first_order(), *_others()]
