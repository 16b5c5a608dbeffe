"""No damage that headers, config and tokenizer files show costs a shard: checkpoints with one thing wrong.

Each is split sequentially in a child process, and either loads and computes, or is refused by an error of ours with
every file as it was.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import transformers

from tests.support.builders import build_checkpoint
from tests.support.crashes import CrashServer


@pytest.mark.parametrize(
    ("family", "first", "count"),
    [
        ("llama", 0, 8),
        pytest.param("qwen3_moe", 5_000, 8, marks=pytest.mark.long),
        *(pytest.param("llama", 100 + 250 * part, 250, marks=pytest.mark.long) for part in range(4)),
        *(pytest.param("qwen3_moe", 5_100 + 250 * part, 250, marks=pytest.mark.long) for part in range(4)),
    ],
)
def test_no_shard_is_lost(tmp_path: Path, crash_server: CrashServer, family: str, first: int, count: int) -> None:
    sound = build_checkpoint(tmp_path / "sound", family, shards=3, num_hidden_layers=2)
    transformers.GenerationConfig(eos_token_id=2).save_pretrained(sound)
    call = {"sound": str(sound), "first": first, "count": count, "to": str(tmp_path / "rows")}
    assert crash_server.ask("tests.support.damaged_checkpoints:tell", call).status == 0
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row[0] for row in rows] == list(range(first, first + count))
    assert not [row for row in rows if row[2] not in ("loads", "refused")]
    kinds = Counter(row[2] for row in rows)
    assert min(kinds["loads"], kinds["refused"]) > count // 10  # or nothing was tried
