"""The journal: its replay, and lines that a crash truncated."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.checkpoints.naming import assign_layers
from rabbitllm.errors import IncompleteSplitError
from rabbitllm.formats.tensor_spec import TensorSpec, byte_size
from rabbitllm.splitter import journal
from rabbitllm.splitter.journal import Replay, SplitJournal, replay
from rabbitllm.splitter.plan import PlannedShard, SplitPlan, make_plan
from rabbitllm.splitter.sums import part_sums
from rabbitllm.storage.durable import Step, observe_steps
from tests.support.splitting import names_in

A, B, C = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def spec(name: str, shape: tuple[int, ...], shard: str, dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name, dtype, shape, shard, 512, byte_size(dtype, shape))


@pytest.fixture(params=[None, "4bit", "8bit"])
def plan(request: pytest.FixtureRequest) -> SplitPlan:
    shards = (
        PlannedShard(A, 1000, "sha256:12", (spec("model.embed_tokens.weight", (160, 64), A),), True),
        PlannedShard(B, 2000, "sampled:ab", (spec("model.layers.0.猫 'x'\"", (65, 67), B, "F32"),), False),
        PlannedShard(
            C, 0, "blob:0", (spec("model.layers.0.scale", (), C), spec("model.norm.weight", (0, 4), C)), False
        ),
    )
    names = [tensor.name for shard in shards for tensor in shard.tensors]
    source = SourceIdentity("hub", "acme/tiny", "c" * 40, {shard.name: shard.fingerprint for shard in shards})
    return make_plan(source, shards, assign_layers(names, "llama"), request.param)


@pytest.fixture
def folder(tmp_path: Path, plan: SplitPlan) -> Path:
    journal.begin(tmp_path, plan, "bitsandbytes 0.50.2 on cpu")
    return tmp_path


def sums_of(shard: str) -> dict[str, tuple[bytes, ...]]:
    """Of a tensor whose second part has runs in three blocks."""
    return {f"{shard}.w": (part_sums(1), part_sums(2**32 - 1, bytes(range(12))))}


def mark(folder: Path, *shards: str) -> None:
    opened = SplitJournal(folder)
    for shard in shards:
        opened.mark_used(shard, sums_of(shard))
    opened.close()


def used(folder: Path) -> set[str]:
    replayed = replay(folder)
    assert replayed is not None
    return set(replayed.used)


def test_round_trip(folder: Path, plan: SplitPlan) -> None:
    assert names_in(folder) == ["split.journal"]
    assert replay(folder) == Replay(plan, "bitsandbytes 0.50.2 on cpu", frozenset(), {})
    mark(folder, A)
    mark(folder, B)
    sums = sums_of(A) | sums_of(B)
    assert replay(folder) == Replay(plan, "bitsandbytes 0.50.2 on cpu", frozenset([A, B]), sums)
    mark(folder, A)
    assert used(folder) == {A, B}


def test_lines_without_sums_of_runs(folder: Path) -> None:
    """As versions without blocks wrote them; the fields that those read of a new line are unchanged."""
    mark(folder, A)
    path = folder / "split.journal"
    head, line, _ = path.read_text().split("\n")
    content = json.loads(line)
    assert content.pop("runs") == [["", b64encode(bytes(range(12))).decode()]]
    assert content == {"used": A, "crc32": {f"{A}.w": [1, 2**32 - 1]}}
    path.write_text(f"{head}\n{json.dumps(content)}\n")
    replayed = replay(folder)
    assert replayed is not None
    assert (replayed.used, replayed.checksums) == ({A}, {f"{A}.w": (part_sums(1), part_sums(2**32 - 1))})


def test_layouts_are_replayed_exactly(folder: Path, plan: SplitPlan) -> None:
    replayed = replay(folder)
    assert replayed is not None
    assert {layer: layout.header for layer, layout in replayed.plan.layouts.items()} == {
        layer: layout.header for layer, layout in plan.layouts.items()
    }
    assert {layer: layout.offsets for layer, layout in replayed.plan.layouts.items()} == {
        layer: layout.offsets for layer, layout in plan.layouts.items()
    }


def test_no_journal(tmp_path: Path) -> None:
    assert replay(tmp_path) is None
    assert replay(tmp_path / "nowhere") is None


def test_line_is_durable_before_the_next_step(folder: Path) -> None:
    steps: list[Step] = []
    with observe_steps(steps.append):
        mark(folder, A)
    assert [step.kind for step in steps] == ["write", "sync"]


def test_torn_last_line_is_ignored(folder: Path) -> None:
    mark(folder, A)
    path = folder / "split.journal"
    before = path.read_bytes()
    mark(folder, B)
    whole = path.read_bytes()
    for length in range(len(before), len(whole)):
        path.write_bytes(whole[:length])
        shards = used(folder)
        assert shards == ({A, B} if length == len(whole) - 1 else {A})  # all of it but the newline is all of it
        mark(folder, C)
        assert used(folder) == shards | {C}  # the next line stands alone


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0\0\0\0",
        b"{}",
        b'{"used": 5, "crc32": {}}',
        b'{"used": "x"}',
        b'{"used": "x", "crc32": [1]}',
        b'{"used": "x", "crc32": {"w": [1]}, "runs": []}',
        b'{"used": "x", "crc32": {"w": [1]}, "runs": [["?"]]}',
        b"[]",
        b"5",
        b"\xff\xfe",
        b"",
    ],
)
def test_garbage_after_the_first_line_is_ignored(folder: Path, garbage: bytes) -> None:
    mark(folder, A)
    with (folder / "split.journal").open("ab") as stream:
        stream.write(garbage + b"\n")
    mark(folder, B)
    assert used(folder) == {A, B}


@pytest.mark.parametrize(
    "head",
    [b"", b"garbage", b"[]", b"null", b"{}", b'{"journal_version": 2}', b'{"journal_version": 1}', b"\xff", b"\0" * 99],
)
def test_unreadable_first_line_is_refused(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "split.journal").write_bytes(head + b"\n" + json.dumps({"used": A}).encode() + b"\n")
    with pytest.raises(IncompleteSplitError, match=r"split.journal is not a readable") as refused:
        replay(tmp_path)
    assert "If every shard of the source is still there (or it is on the hub), delete that folder" in str(refused.value)
    assert "Otherwise keep it: it may hold the only copy of some tensors." in str(refused.value)


@pytest.mark.parametrize("field", ["source", "compression", "shards", "layers", "quantiser"])
def test_incomplete_first_line_is_refused(folder: Path, field: str) -> None:
    content: dict[str, Any] = json.loads((folder / "split.journal").read_text())
    del content[field]
    (folder / "split.journal").write_text(json.dumps(content) + "\n")
    with pytest.raises(IncompleteSplitError, match="is not a readable"):
        replay(folder)


def test_truncated_first_line_is_refused(folder: Path) -> None:
    raw = (folder / "split.journal").read_bytes()
    for length in range(0, len(raw) - 2, 37):
        (folder / "split.journal").write_bytes(raw[:length])
        with pytest.raises(IncompleteSplitError):
            replay(folder)
