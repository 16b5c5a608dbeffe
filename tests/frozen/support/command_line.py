"""The `rabbitllm` command in this process, as `python -m rabbitllm` runs it; and its tree of commands and options."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
import runpy
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import typer.main


@dataclass(frozen=True)
class Ran:
    """How a command ended: its exit code, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


class _Found(BaseException):
    """The tree of commands is known, and nothing is to be run."""


def rabbitllm(*arguments: object, stdin: str = "") -> Ran:
    """Run the command with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    with (
        tempfile.TemporaryFile("w+") as piped,
        _command_line(*arguments),
        mock.patch.object(sys, "stdin", piped),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        piped.write(stdin)
        piped.seek(0)
        try:
            runpy.run_module("rabbitllm", run_name="__main__")
            code: Any = 0
        except SystemExit as ended:
            code = ended.code or 0
    gc.collect()  # a process would have ended, and with it the locks of models
    return Ran(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _command_line(*arguments: object) -> Iterator[None]:
    with mock.patch.object(sys, "argv", ["rabbitllm", *map(str, arguments)]), warnings.catch_warnings():
        yield


def tree() -> dict[str, Any]:
    """Every command with its parameters, "" for options of the command itself."""
    found: list[Any] = []
    original = typer.main.get_command

    def look(app: typer.Typer) -> Any:
        found.append(original(app))
        raise _Found

    with _command_line(), mock.patch.object(typer.main, "get_command", look), contextlib.suppress(_Found):
        runpy.run_module("rabbitllm", run_name="__main__")
    root = found[0]
    return {"": _parameters(root), **{name: _parameters(command) for name, command in root.commands.items()}}


def _parameters(command: Any) -> dict[str, Any]:
    """Options by their longest flag, arguments by their metavar; each with what a user can give."""
    return {_name(one): _parameter(one) for one in command.params}


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        return str(max(parameter.opts, key=len))
    return re.sub(r"\W", "", str(parameter.metavar or parameter.name))


def _parameter(parameter: Any) -> dict[str, Any]:
    is_option = parameter.param_type_name == "option"
    return {
        "kind": parameter.param_type_name,
        "flags": dict.fromkeys((*parameter.opts, *parameter.secondary_opts), True) if is_option else {},
        "takes a value": not getattr(parameter, "is_flag", False),
        "may be given again": bool(parameter.multiple or parameter.nargs == -1),
        "required": bool(parameter.required),
        "default": parameter.default or None if isinstance(parameter.default, list | tuple) else parameter.default,
        "type": _type(parameter),
        "environment": parameter.envvar,
    }


def _type(parameter: Any) -> str:
    """As typer 0.29 knows it by an annotation, and earlier ones by click's name."""
    described = getattr(parameter, "type_descriptor", None)
    name = described.annotation.__name__ if described is not None else parameter.type.name
    return {"text": "str", "integer": "int", "boolean": "bool", "path": "Path"}.get(name, name)
