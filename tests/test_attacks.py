"""Every attack there is, read by what would read it, in a process that watches: refused by the right error, which says
what was found and what to do; nothing run, nothing opened outside, and within limits of memory and time.

What each message must say, the tests of the readers compare.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.attacks import folders, gguf_files, json_files, pickles, protobuf_files, safetensors_files, torch_zips
from tests.attacks.watched_reading import Outcome

ROOT = Path(__file__).parent.parent
MAX_SECONDS = 60.0
"""Of the process's own time. On an idle machine none takes one second; this is no measurement."""
LONGEST_MESSAGE = 1200
LOOKED_AT = {"outside/secret", "outside/secret.json", "disk/model.safetensors", "model/model.safetensors"}
"""The last is a link to weights on another disk, and so is the one before."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory, links and pipes")


@dataclass(frozen=True)
class Case:
    """What is read and by what, and the class of error that must come of it; None where it must be read."""

    name: str
    reader: str
    path: Path
    error: str | None


def sound(marker: Path) -> Iterator[tuple[str, str, bytes]]:
    """Files that look odd and must be read, as (reader, name, bytes); the first of each reader is an ordinary one."""
    legal = safetensors_files.LEGAL
    yield from (("safetensors", name, content) for name, (content, _) in legal.items())
    yield from (("torch zip", name, make()) for name, make in torch_zips.LEGAL.items())
    yield from (("shard", name, content) for name, (content, _) in legal.items())
    yield from (("shard", name, make()) for name, make in torch_zips.LEGAL.items())
    yield from (("shard", name, content) for name, content in gguf_files.LEGAL.items())
    yield from (("pickle", name, data) for name, data in pickles.LEGAL.items())
    yield "vocabulary", "sound", protobuf_files.SOUND
    yield from (("json", name, raw) for name, (raw, _) in json_files.LEGAL.items())


def hostile(marker: Path) -> Iterator[tuple[str, str, bytes, str]]:
    """Files that must be refused, as (reader, name, bytes, error)."""
    for name, (content, _) in safetensors_files.HOSTILE.items():
        yield "safetensors", name, content, "CorruptShardError"
    for name, (content, _, error) in gguf_files.HOSTILE.items():
        yield "shard", name, content, error.__name__
    for attack in torch_zips.ATTACKS:
        yield "torch zip", attack.name, attack.build(marker), attack.error.__name__
    for attack in pickles.ATTACKS:
        yield "pickle", attack.name, attack.build(marker), attack.error.__name__
    for name, (content, _) in protobuf_files.HOSTILE.items():
        yield "vocabulary", name, content, "CorruptVocabularyError"
    for name, (content, _) in json_files.HOSTILE.items():
        yield "json", name, content, "InvalidIndexError"


def cases(place: Path, marker: Path) -> Iterator[Case]:
    """Every case, with its file or folder in a folder of its own."""
    files = [*((*one, None) for one in sound(marker)), *hostile(marker)]
    for number, (reader, name, content, error) in enumerate(files):
        path = place / str(number) / "file"
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        yield Case(name, reader, path, error)
    folder = folders.prepare(place / "a sound folder")
    yield Case("sound", "folder", folder.parent / "outside", None)
    for number, attack in enumerate(folders.ATTACKS):
        folder = folders.prepare(place / f"folder {number}")
        attack.build(folder)
        yield Case(attack.name, "folder", folder, attack.error.__name__)


def watched(place: Path, listed: list[Case]) -> list[Outcome]:
    (place / "cases").write_text("".join(json.dumps([case.reader, str(case.path)]) + "\n" for case in listed))
    command = [sys.executable, "-m", "tests.attacks.watched_reading", str(place / "cases")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    outcomes = [Outcome(**json.loads(line)) for line in ran.stdout.splitlines()]
    assert len(outcomes) == len(listed)
    return outcomes


Came = list[tuple[Case, Outcome]]


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory) -> Came:
    """Every case and what came of it; the marker that payloads touch must not be there."""
    place = tmp_path_factory.mktemp("attacks")
    marker = place / "marker"
    listed = list(cases(place, marker))
    outcomes = watched(place, listed)
    assert not marker.exists()
    return list(zip(listed, outcomes, strict=True))


def test_each_raises_its_error(came: Came) -> None:
    """Another one shows, MemoryError at the limit included; and what is sound is read."""
    assert len(came) > 500
    wrong = {(case.reader, case.name): came.error for case, came in came if came.error != case.error}
    assert not wrong
    assert all(outcome.ours for _, outcome in came if outcome.error)


def test_each_says_what_was_found_and_what_to_do(came: Came) -> None:
    for case, outcome in came:
        if case.error:
            assert case.path.name in outcome.problem, case
            assert outcome.problem.endswith("."), case
            assert outcome.remedy.endswith("."), case
            assert len(outcome.problem) + len(outcome.remedy) < LONGEST_MESSAGE, case
            assert outcome.problem.isprintable(), case


def test_nothing_is_run_imported_or_deleted(came: Came) -> None:
    assert not {(case.reader, case.name): outcome.events for case, outcome in came if outcome.events}


def test_nothing_is_opened_outside_or_for_writing(came: Came) -> None:
    """Except for the first bytes of what a link leads to, which must show that it is no checkpoint's file."""
    opened = {(case.reader, case.name): outcome.opened for case, outcome in came if outcome.opened}
    names = {
        case: {Path(path).relative_to(Path(path).parents[1]).as_posix() for path in opened[case]} for case in opened
    }
    assert not {case: files for case, files in names.items() if case[0] != "folder" or not files <= LOOKED_AT}
    assert not any(folders.SECRET[:20] in outcome.problem for _, outcome in came)


def test_none_takes_long(came: Came) -> None:
    assert not {(case.reader, case.name): o.seconds for case, o in came if o.seconds > MAX_SECONDS}


def test_the_watch_sees_what_it_is_for(tmp_path: Path) -> None:
    """Careless readers, watched as the others are."""
    marker = tmp_path / "marker"
    live = next(attack for attack in pickles.ATTACKS if attack.live)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "file").write_bytes(live.build(marker))
    folder = folders.prepare(tmp_path / "folder")
    folders.single_file_that_is_a_link(folder)
    evil = tmp_path / "evil" / "file"
    listed = [
        *(Case("", "runs it", evil, None), Case("", "takes memory", evil, None)),
        *(Case("", "follows links", folder, None), Case("", "writes", evil, None)),
    ]
    runs, takes, follows, writes = watched(tmp_path, listed)
    assert marker.exists()
    assert "os.system" in runs.events
    assert (takes.error, takes.ours) == ("MemoryError", False)
    assert follows.opened == [str(folder / folders.SINGLE)]
    assert writes.opened == [str(evil)]
