"""docs/ARCHITECTURE.md names files that exist, shows the rooms of today, and stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from rabbitllm.auto_model import AutoModel
from tests.frozen.support import checkpoints
from tests.support.call_counts import counted_calls
from tools import rooms_picture

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
CODE = re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
NAMED = sorted(set(re.findall(r"`([\w./-]+(?:\.py|\.json|/))`", CODE)) - {"split.json"})
HARD_PARTS = {
    part.partition("\n")[0]: part
    for part in TEXT.partition("\n## Hard parts\n")[2].partition("\n## ")[0].split("\n### ")[1:]
}


READING_PATH = re.findall(r"`(\w+(?:/\w+)?\.py)`", TEXT.partition("## Reading path")[2].partition("\n## ")[0])


def test_the_reading_path_is_what_runs(tmp_path: Path) -> None:
    """Each file is entered by a call that splits, loads and streams a token; together they have at most 6,000 lines."""
    folder = checkpoints.write(tmp_path / "model")
    with counted_calls() as counts:
        options = {"device": "cpu", "show_layer_progress": False, "max_memory": {"cpu": 0}}
        model = AutoModel.from_pretrained(folder, sequential_shard_processing=True, **options)
        model.generate(torch.tensor([[1, 40, 81]]), max_new_tokens=1)
    assert {f"rabbitllm/{name}" for name in READING_PATH} <= counts.files
    lines = [len((ROOT / "rabbitllm" / name).read_text(encoding="utf-8").splitlines()) for name in READING_PATH]
    assert 4_500 < sum(lines) < 6_000
    assert len(READING_PATH) > 10


@pytest.mark.parametrize("name", NAMED)
def test_files_that_it_names_exist(name: str) -> None:
    """Relative to the repository, the package, the tests or a room."""
    homes = (ROOT, ROOT / "rabbitllm", ROOT / "tests", *(ROOT / "rabbitllm").glob("*/"))
    assert any((home / name).exists() for home in homes)


def test_the_picture_shows_the_rooms_of_today() -> None:
    """If it does not: `python -m tools.rooms_picture`."""
    assert rooms_picture.PICTURE.read_text(encoding="utf-8") == rooms_picture.drawn()
    assert rooms_picture.PICTURE.name in TEXT


def test_every_room_of_the_picture_says_what_it_is() -> None:
    for floor in rooms_picture.floors():
        for room in floor:
            assert len(rooms_picture.sentence_of(room)) > 10


def test_it_is_read_in_twenty_minutes() -> None:
    assert len(TEXT.split()) <= 4000
    assert len(HARD_PARTS) > 6
    assert {name for name, part in HARD_PARTS.items() if len(part.split()) > 350} == set()
