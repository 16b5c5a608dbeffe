"""The pages of docs/reference that are made from the code are current, and name all that is public."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import griffe
import pytest

import rabbitllm
from rabbitllm import errors
from rabbitllm.chat.conversation import Conversation, Exchange, SavedChat, encode
from rabbitllm.storage import durable
from tests.support.builders import build_checkpoint
from tests.support.tiny_models import split
from tools.reference import api
from tools.reference.__main__ import FOLDER, PAGES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rabbitllm"
OLD_CLASSES = re.findall(r"`(\w+)`", api.OTHER_CLASSES)
NOT_VARIABLES = frozenset(
    {
        *("AVX2", "KMGT", "ERROR", "POST", "BF16", "VNNI", "NEON", "I8MM", "AMX", "SHA", "CPU", "GPU"),
        *("RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_CPU"),
    }
)
"""Words in capital letters in modules that read the environment."""


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_current(name: str) -> None:
    assert read(name) == PAGES[name](), f"docs/reference/{name} differs: run `python -m tools.reference`"


@pytest.mark.parametrize("name", PAGES)
def test_marks_of_code_are_in_pairs(name: str) -> None:
    outside = re.sub(r"^```.*?^```$", "", read(name), flags=re.MULTILINE | re.DOTALL)
    assert not [line for line in outside.splitlines() if line.count("`") % 2 or ",`." in line]


def test_every_public_name_has_its_entry() -> None:
    there = {*api.public_names(), *OLD_CLASSES, "__version__", "RabbitLLMError", "NotEnoughSpaceException"}
    assert set(rabbitllm.__all__) <= there
    assert set(OLD_CLASSES) <= set(rabbitllm.__all__)


def functions() -> Iterator[griffe.Function]:
    """The functions and methods on the page."""
    for shown in (one for found in api.GROUPS.values() for one in found):
        one = api.found_at(shown.path)
        members = {
            name: member for path in (*shown.bases, shown.path) for name, member in api.found_at(path).members.items()
        }
        yield from (f for f in (one, *map(members.get, shown.members)) if isinstance(f, griffe.Function))


@pytest.mark.parametrize("function", list(functions()), ids=lambda function: function.path)
def test_every_argument_is_described(function: griffe.Function) -> None:
    """And nothing that is no argument."""
    arguments = {one.name for one in function.parameters if not one.kind.name.startswith("var")} - {"self", "cls"}
    assert api.described(function) - {"kwargs"} == arguments


def test_every_error_says_what_to_do() -> None:
    """Each class has its section; but for the base, whose section says what all have."""
    kinds = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.RabbitLLMError)]
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", read("errors.md"), re.MULTILINE | re.DOTALL))
    assert set(sections) == {kind.__name__ for kind in kinds}
    for kind in kinds:
        assert kind is errors.RabbitLLMError or "**What to do:** " in sections[kind.__name__], kind


def test_every_environment_variable_that_is_read_is_named() -> None:
    """Constants in capital letters, in modules that read the environment."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if re.search(r"environ|envvar|VARIABLE", text):
            nodes = [*ast.walk(ast.parse(text))]
            words = {node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "metavar"}
            constants = (node.value for node in nodes if isinstance(node, ast.Constant) and node not in words)
            found |= {
                one
                for one in constants
                if isinstance(one, str) and re.fullmatch(r"[A-Z][A-Z0-9]{2,}(_[A-Z0-9]+)*", one)
            }
    named = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", read("environment.md")))
    assert {"RABBITLLM_HOME", "RABBITLLM_LOG", "RABBITLLM_API_KEY"} <= found
    assert found - NOT_VARIABLES <= named


def test_every_field_of_a_split_directory_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the journal while it is there, and of the manifest."""
    page = read("files.md")
    source = build_checkpoint(tmp_path / "model", "llama", shards=2)
    journals = []
    remove = durable.remove

    def kept(path: Path) -> None:
        if path.name == "split.journal":
            journals.append(path.read_text(encoding="utf-8").splitlines())
        remove(path)

    monkeypatch.setattr(durable, "remove", kept)
    folder = split(source, "4bit")
    manifest = json.loads((folder / "split.json").read_text(encoding="utf-8"))
    [(head, *used)] = journals
    plan = json.loads(head)
    for fields in (
        manifest,
        manifest["source"],
        manifest["layers"][0],
        plan,
        plan["shards"][0],
        *map(json.loads, used),
    ):
        assert [name for name in fields if not re.search(rf"`(?:\w+(?:\[\])?)?\.?{name}`", page)] == []


def test_every_field_of_a_chat_file_is_described() -> None:
    section = read("files.md").partition("## Chat file")[2].partition("\n## ")[0]
    stopped = Exchange("How many?", "Tw", stopped=True)
    made = json.loads(encode(SavedChat("model", Conversation("Be short.", (stopped,)))))
    messages = {name for message in made["messages"] for name in message}
    assert messages == {"role", "content", "stopped"}
    assert [name for name in made if f"`{name}`" not in section] == []
    assert [name for name in messages if not re.search(rf"`(?:messages\[\])?\.{name}`", section)] == []
