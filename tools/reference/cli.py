"""docs/reference/cli.md, from the commands of `rabbitllm`: their signatures, docstrings and declared options."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from rabbitllm.cli.main import app
from tools.reference.markdown import one_line, paragraphs, table
from tools.reference.source import module

SIZES = frozenset(
    {"max_disk", "min_free_disk", "max_memory", "cache_memory", "cache_disk", "aside", "bandwidth", "max_body"}
)
"""Parameters that take bytes, or a number with a unit."""
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

**Size** is a number of bytes, or a number with a unit: `50GiB`, `4GB`, `500MB`. 1 GiB is 1,073,741,824 bytes, 1 GB is
1,000,000,000 bytes.

**Output.** Results go to stdout. Progress, logs and errors go to stderr. `--json` prints one JSON object to stdout; its
sizes are in bytes, its times in seconds. Without a terminal, progress is one plain line every few seconds.

**Files.** Your files are kept, unless you pass `--sequential` or `--delete-original`.
[Files](files.md#what-is-deleted-and-when) says what is deleted when, and where split directories are. If you pass
`--dir` once, pass it to later commands on that model too.

**Completion.** `rabbitllm --install-completion` installs completion for bash, zsh, fish or PowerShell. It completes
commands, options and the names of models that are split on this machine.
"""


def page() -> str:
    """The page."""
    infos = [info for info in app.registered_commands if not info.hidden]
    commands = dict(vars(typer.main.get_command(app))["commands"])
    lines = [BEGIN, "## Exit codes", "", *table(["code", "meaning"], _exit_codes()), "", "## Commands", ""]
    panels: dict[str, list[tuple[str, str]]] = {}
    for info in infos:
        summary = _described(info.callback)[0][0]
        panels.setdefault(str(info.rich_help_panel), []).append((f"[`{info.name}`](#{info.name})", summary))
    rows = [(panel if not number else "", *row) for panel, found in panels.items() for number, row in enumerate(found)]
    lines += table(["", "command", "purpose"], rows)
    for info in infos:
        lines += ["", *_section(str(info.name), info.callback, commands[info.name].params)]
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
        if found := EXAMPLES.match(part):
            examples += [line.strip() for line in found["lines"].splitlines() if line.strip()]
        else:
            said += map(_with_code, paragraphs(part))
    return said, examples


def _section(name: str, callback: Callable[..., Any] | None, parameters: list[Any]) -> Iterator[str]:
    assert callback is not None
    said, examples = _described(callback)
    hints = get_type_hints(callback, include_extras=True)
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    options = [one for one in parameters if one.param_type_name == "option" and one.name != "help" and not one.hidden]
    words = [_argument(one) if one.required else f"[{_argument(one)}]" for one in arguments]
    words += [f"{max(one.opts, key=len)} {_word(one, hints[one.name])}" for one in options if one.required]
    yield f"## {name}"
    for one in said:
        yield ""
        yield one
    yield from ("", "```text", " ".join(["rabbitllm", name, *words, "[OPTIONS]"]), "```")
    if examples:
        yield from ("", "```bash", *examples, "```")
    rows: dict[str, list[tuple[str, ...]]] = {}
    for one in (*arguments, *options):
        given = f"`{_argument(one)}`" if one in arguments else ", ".join(f"`{word}`" for word in _spelled(one))
        meaning = _with_code(one_line(one.help or ""))
        if one.envvar:
            meaning += f" Environment: `{one.envvar}`."
        row = (given, _type(one, hints[one.name]), _default(one), meaning)
        rows.setdefault(getattr(one, "rich_help_panel", None) or "", []).append(row)
    for panel, found in rows.items():
        yield ""
        if panel:
            yield from (f"{panel}:", "")
        yield from table(["argument or option", "type", "default", "meaning"], found)


def _with_code(text: str) -> str:
    """With options as code, where they are not yet."""
    return "`".join(
        re.sub(r"(?<![\w-])(--[a-z][\w-]*\w)", r"`\1`", part) if number % 2 == 0 else part
        for number, part in enumerate(text.split("`"))
    )


def _argument(one: Any) -> str:
    return str(one.metavar or one.name.upper()).strip("[]")


def _spelled(one: Any) -> list[str]:
    return [*sorted(one.opts, key=len, reverse=True), *one.secondary_opts]


def _inner(annotation: Any) -> tuple[Any, Any]:
    """The type without None and Annotated, and what was declared of it."""
    declared = None
    if get_origin(annotation) is Annotated:
        annotation, declared, *_ = get_args(annotation)
    if get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(one for one in get_args(annotation) if one is not type(None))
    return annotation, declared


def _word(one: Any, annotation: Any) -> str:
    inner, _ = _inner(annotation)
    return str(one.metavar or {int: "NUMBER", float: "NUMBER", Path: "PATH"}.get(inner, "TEXT"))


def _type(one: Any, annotation: Any) -> str:
    inner, declared = _inner(annotation)
    if inner is bool:
        return "flag"
    is_list = get_origin(inner) is list
    if is_list:
        (inner,) = get_args(inner)
    name = {int: "integer", float: "number", Path: "path", str: "text"}.get(inner, getattr(inner, "__name__", "text"))
    if one.name in SIZES:
        name = "DEVICE=SIZE" if is_list else "size"
    elif one.param_type_name == "option" and one.metavar:
        name = f"`{one.metavar}`"
    least, most = getattr(declared, "min", None), getattr(declared, "max", None)
    if least is not None and most is not None:
        name += f" from {least:,} to {most:,}"
    elif least is not None:
        name += f" of at least {least:,}"
    return f"{name}, repeatable" if is_list and "repeatable" not in one.help else name


def _default(one: Any) -> str:
    if one.required:
        return "required"
    if one.default is None or one.default is False or one.default == []:
        return ""
    return f"`{one.default}`"
