"""docs/reference/cli.md, from the commands of `rabbitllm`: their docstrings and declared options."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import typer

from rabbitllm.cli.arguments import ModelOptions
from rabbitllm.cli.help import PANELS, word_of
from rabbitllm.cli.main import app
from tools.reference.markdown import one_line, paragraphs, table
from tools.reference.source import module

EXAMPLES = re.compile(r"^Examples?:\s*(?P<lines>.*)", re.DOTALL)
BEGIN = """\
# Command line

```text
rabbitllm COMMAND [OPTIONS]
python -m rabbitllm COMMAND [OPTIONS]
```

`--help` after a command shows its options.

**MODEL** is one of these:

- a repository on the hub: `Qwen/Qwen2.5-7B-Instruct`, `hf://Qwen/Qwen2.5-7B-Instruct`, or its address in the browser;
- a folder that holds a checkpoint;
- a file of weights or its index: it stands for the checkpoint in its folder (`inspect` reads the file itself);
- a split directory.

**SIZE** is a number of bytes, or a number with a unit: `50GB`, `50G`, `500MB`. 1 GB is 1,000,000,000 bytes, here and in
all output, as on the hub and of disks; 1 GiB, which an option takes too, is 1,073,741,824.

**Output.** Results go to stdout. Progress, logs and errors go to stderr. `--json` prints one JSON object to stdout; its
sizes are in bytes, its times in seconds. Without a terminal, progress is one plain line every few seconds.

**Files.** Your files are kept, unless you pass `--sequential` or `--delete-original`.
[Files](files.md#what-is-deleted-and-when) says what is deleted when, and where split directories are. If you pass
`--dir` once, pass it to later commands on that model too.

**Completion.** `rabbitllm --install-completion` installs completion for bash, zsh, fish or PowerShell. It completes
commands, options and the names of models that are split on this machine.
"""


ALL_MODEL_OPTIONS = "run"
"""The command that has all options of `ModelOptions`."""


def page() -> str:
    """The page."""
    infos = [info for info in app.registered_commands if not info.hidden]
    commands = dict(vars(typer.main.get_command(app))["commands"])
    names = {field.name for field in dataclasses.fields(ModelOptions)}
    shared = {param.name: _row(param) for param in _options(commands[ALL_MODEL_OPTIONS]) if param.name in names}
    lines = [BEGIN, "## Exit codes", "", *table(["code", "meaning"], _exit_codes()), "", "## Commands", ""]
    panels: dict[str, list[tuple[str, str]]] = {}
    for info in infos:
        summary = _described(info.callback)[0][0]
        panels.setdefault(str(info.rich_help_panel), []).append((f"[`{info.name}`](#{info.name})", summary))
    rows = [("" if number else panel, *row) for panel, entries in panels.items() for number, row in enumerate(entries)]
    lines += table(["", "command", "purpose"], rows)
    lines += ["", "## Model options", "", "Of the commands that load, split or plan a model:", ""]
    lines += table(["option", "default", "meaning"], shared.values())
    for info in infos:
        lines += ["", *_section(str(info.name), info.callback, commands[info.name], shared)]
    return "\n".join(lines) + "\n"


def _exit_codes() -> Iterator[tuple[str, str]]:
    """Number and meaning, from the constants and their docstrings."""
    from rabbitllm.cli import exit_codes

    for name, member in module("rabbitllm.cli.exit_codes").members.items():
        value = getattr(exit_codes, name, None)
        if name.isupper() and isinstance(value, int):
            yield str(value), one_line(member.docstring.value) if member.docstring else name.lower().capitalize() + "."


def _described(callback: Callable[..., Any] | None) -> tuple[list[str], list[str]]:
    """The paragraphs of a command's docstring, and its examples."""
    said: list[str] = []
    examples: list[str] = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(callback.__doc__ or "")):
        if match := EXAMPLES.match(part):
            examples += [line.strip() for line in match["lines"].splitlines() if line.strip()]
        else:
            said += map(_with_code, paragraphs(part))
    return said, examples


def _options(command: Any) -> list[Any]:
    """In the order of the help."""
    options = [param for param in command.params if param.param_type_name == "option" and not param.hidden]
    options = [param for param in options if param.name != "help"]
    return sorted(
        options, key=lambda param: PANELS.index(param.rich_help_panel) if param.rich_help_panel else len(PANELS)
    )


Row = tuple[str, str, str]


def _section(name: str, callback: Callable[..., Any] | None, command: Any, shared: Mapping[str, Row]) -> Iterator[str]:
    said, examples = _described(callback)
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = _options(command)
    words = [_argument(param) if param.required else f"[{_argument(param)}]" for param in arguments]
    words += [f"{max(param.opts, key=len)} {param.metavar or word_of(param)}" for param in options if param.required]
    yield f"## {name}"
    for paragraph in said:
        yield from ("", paragraph)
    yield from ("", "```text", " ".join(["rabbitllm", name, *words, "[OPTIONS]"]), "```")
    if examples:
        yield from ("", "```bash", *examples, "```")
    own = [
        (f"`{_argument(param)}`", "", _meaning(param)) for param in arguments if param.name not in ("model", "source")
    ]
    own += [row for param in options if (row := _row(param)) not in shared.values()]
    if own:
        yield from ("", *table(["", "default", "meaning"], own))
    names = {param.name for param in options}
    rows = [_row(param) for param in options]
    has = [f"`{row[0].split()[0].strip('`,')}`" for row in shared.values() if row in rows]
    left_out = [f"`{row[0].split()[0].strip('`,')}`" for name, row in shared.items() if name not in names]
    if len(has) >= len(left_out):
        yield from ("", f"And the [model options](#model-options){', except ' * bool(left_out)}{', '.join(left_out)}.")
    elif has:
        yield from ("", f"And {', '.join(has)}: see [model options](#model-options).")


def _row(param: Any) -> Row:
    spelled = [*sorted(param.opts, key=len, reverse=True), *param.secondary_opts]
    word = "" if getattr(param, "is_flag", False) else f" {param.metavar or word_of(param)}"
    spelled[0] += word
    default = "required" if param.required else "" if param.default in (None, False, []) else f"`{param.default}`"
    return ", ".join(f"`{text}`" for text in spelled), default, _meaning(param)


def _meaning(param: Any) -> str:
    text = _with_code(one_line(param.help or ""))
    least = getattr(param, "min", None)
    text += f" At least {least}." if least is not None and least > 1 else ""
    return text + (f" Environment: `{param.envvar}`." if param.envvar else "")


def _with_code(text: str) -> str:
    """With options as code, where they are not yet."""
    return "`".join(
        re.sub(r"(?<![\w-])(--[a-z][\w-]*\w)", r"`\1`", part) if number % 2 == 0 else part
        for number, part in enumerate(text.split("`"))
    )


def _argument(param: Any) -> str:
    return str(param.metavar or param.name.upper())
