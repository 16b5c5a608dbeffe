"""What all commands have in common: examples, completion, exit codes, what they import, and the page about them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from rabbitllm.cli import exit_codes
from rabbitllm.cli.arguments import complete_model
from rabbitllm.cli.main import app
from rabbitllm.store import locations
from tests.frozen.support.command_line import rabbitllm
from tests.support.builders import build_checkpoint
from tests.support.commands import invoke
from tests.support.pages import examples_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
COMMANDS: dict[str, Any] = dict(vars(typer.main.get_command(app))["commands"])
WITH_A_MODEL = sorted(name for name, command in COMMANDS.items() if any(p.metavar == "MODEL" for p in command.params))


def process(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rabbitllm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload,no-any-return]


def options_of(name: str) -> set[str]:
    """Of what all processes of the tests collect; to have the help shown took a second in each."""
    return {option for parameter in COMMANDS[name].params for option in parameter.opts}


def help_of(name: str) -> str:
    result = invoke(name, "--help", columns=200)
    return " ".join(result.stdout.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_two_examples(name: str) -> None:
    """Each is parsed down to the last option; tests/test_documented_commands.py runs them."""
    command = COMMANDS[name]
    assert len(examples_of(command)) == 2
    for example in examples_of(command):
        program, subcommand, *arguments = shlex.split(example.rpartition("| ")[2])
        assert (program, subcommand) == ("rabbitllm", name)
        with command.make_context(name, arguments) as context:
            named = [parameter for parameter in command.params if context.params[parameter.name] != parameter.default]
        assert len(named) >= min(1, len(arguments))


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_fit_into_80_columns(name: str) -> None:
    shown = invoke(name, "--help", columns=80).stdout
    for example in examples_of(COMMANDS[name]):
        assert example in [line.strip() for line in shown.splitlines()]


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_names_values_by_words_and_flags_by_none(name: str) -> None:
    """Not by Python's types, as typer does."""
    shown = invoke(*([name, "--help"] if name else ["--help"]), columns=80).stdout
    assert "--help" in shown
    assert not re.search(r"<\w+|list\[|[<>]=|\{MODEL|\bprompt\]|\[\[", shown)


@pytest.mark.parametrize("name", [name for name in COMMANDS if "--compression" in options_of(name)])
def test_options_of_the_model_come_first(name: str) -> None:
    shown = invoke(name, "--help", columns=80).stdout
    first = shown.partition("╭─ Arguments")[2].partition("╭─ ")[2]
    assert first.split("\n")[1].startswith("│ --compression")


def test_the_main_commands_come_first_each_in_one_line() -> None:
    shown = invoke("--help", columns=80).stdout
    rows = [row.split(maxsplit=1) for row in re.findall(r"^│ ([a-z]\w* .*\S) *│$", shown, re.MULTILINE)]
    assert [name for name, _ in rows][:5] == ["pull", "run", "chat", "serve", "plan"]
    assert {name for name, _ in rows} == set(COMMANDS)
    for name, summary in rows:
        assert summary == (COMMANDS[name].help or "").partition("\n\n")[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_wrapped_at_the_width_of_the_terminal(name: str) -> None:
    """And nowhere else: a line of a paragraph is ended by the width, or by the paragraph's end."""
    shown = invoke(name, "--help", columns=80).stdout
    paragraphs = [line.strip() for line in shown.partition("Examples:")[0].splitlines()]
    for line, following in pairwise(paragraphs):
        if line and following:
            assert len(f"{line} {following.split()[0]}") > 78, (line, following)


def test_every_model_is_named_in_the_same_way() -> None:
    assert set(COMMANDS) - set(WITH_A_MODEL) == {"demo", "doctor", "ls"}
    for name in WITH_A_MODEL:
        assert "A repository, a folder, a file of weights, or a split directory." in help_of(name)


def test_exit_codes_are_in_help_and_page() -> None:
    codes = {
        value
        for name, value in vars(exit_codes).items()
        if name.isupper() and isinstance(value, int) and name[0] != "_"
    }
    output = invoke("--help", columns=300).stdout
    for code in codes:
        assert re.search(rf"^ +{code} +\w", output.rpartition("Exit codes")[2], re.MULTILINE)
        assert re.search(rf"^\| {code} \|", PAGE, re.MULTILINE)


def test_errors_exit_with_1_and_wrong_arguments_with_2(tmp_path: Path) -> None:
    failed = rabbitllm("ls", str(tmp_path / "nowhere"))
    assert (failed.code, failed.out) == (exit_codes.ERROR, "")
    assert failed.err.startswith("error: There is no folder")
    assert "What to do:" in failed.err
    assert rabbitllm("ls", "--nonsense").code == exit_codes.USAGE
    unknown = rabbitllm("pull", str(build_checkpoint(tmp_path / "hare", "llama")), "--compression", "5bit")
    assert (unknown.code, unknown.out) == (exit_codes.USAGE, "")
    assert "expected 'auto', '4bit', '4bit-double', '8bit', 'q8_0'" in unknown.err


def test_the_advice_to_install_is_of_the_copy_and_not_of_another_package() -> None:
    """The name in the package index is the ancestor's."""
    texts = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "rabbitllm").rglob("*.py")]
    wrong = [path.name for path in texts if re.search(r"""pip install ["']?rabbitllm\[""", path.read_text("utf-8"))]
    assert not wrong


def test_help_and_page_agree_on_the_memory_of_keys_and_values() -> None:
    assert "by default half of what the weights leave" in help_of("serve")
    guide = " ".join((ROOT / "docs" / "guides" / "serving.md").read_text(encoding="utf-8").split())
    assert "| `--cache-memory` | half of what the weights leave |" in guide


# Completion


def test_shell_completion_is_installed() -> None:
    shown = process(
        "--show-completion", "bash", env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    )
    assert shown.returncode == 0, shown.stderr
    assert "COMPLETE" in shown.stdout


def completed(words: str) -> list[str]:
    """What bash is told by the program itself."""
    variables = {
        "_RABBITLLM_COMPLETE": "complete_bash",
        "COMP_WORDS": f"rabbitllm {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    code = "import sys; sys.argv = ['rabbitllm']; from rabbitllm.cli.main import app; app(prog_name='rabbitllm')"
    ran = subprocess.run([sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True)
    return ran.stdout.split()


def test_commands_and_options_are_completed() -> None:
    assert completed("pu") == ["pull"]
    assert completed("pull --seq") == ["--sequential"]


def test_models_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(locations.HOME_VARIABLE, str(tmp_path / "home"))
    (tmp_path / "home" / "models--org--rabbit").mkdir(parents=True)
    assert completed("run org/r") == ["org/rabbit"]
    build_checkpoint(tmp_path / "hare", "llama")
    (tmp_path / ".hidden").mkdir()
    monkeypatch.chdir(tmp_path)
    assert complete_model("") == ["org/rabbit", "hare/", "home/"]
    assert complete_model("ha") == ["hare/"]
    assert complete_model("hare/mod") == ["hare/model.safetensors"]
    assert complete_model(".h") == [".hidden/"]
    assert complete_model("nowhere/x") == []
    assert complete_model(f"{tmp_path}/ha") == [f"{tmp_path}/hare/"]


def test_help_and_completion_import_no_heavy_packages() -> None:
    code = "import sys; import rabbitllm.cli.main; from rabbitllm.cli.arguments import complete_model; "
    code += "complete_model('x'); print(*sys.modules)"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split())
    assert "rabbitllm.store.locations" in loaded
    assert not {"torch", "transformers", "numpy", "bitsandbytes", "numba", "psutil"} & loaded
