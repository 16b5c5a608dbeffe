"""The program of the process that runs chat templates. `template_process` starts it by its path, and is the other end.

It imports nothing of this package, and neither torch nor transformers, so it starts in a tenth of a second. Each line
of its input is a request in JSON, each line of its output an answer.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

TEXT, LONG, REFUSED, FAILED = "text", "long", "refused", "failed"
"""First item of an answer. The second is the text, its number of letters if it has too many, or the error's text."""
_LONGEST_ERROR = 4000


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more.

    The first one is the import path, the source of transformers' function, and limits: bytes of address space (0 for no
    limit), seconds of processor time and seconds by the clock for a request. Its answer is the number of this process.
    A later one is a template, or a template with its variables and the limit of letters.
    """
    sys.path[:], source, memory, seconds, patience = json.loads(requests.readline())
    compiled = _compiler(source)
    _set_limit("RLIMIT_CORE", 0)
    if memory:
        _set_limit("RLIMIT_AS", memory)
    answers.write(b"%d\n" % os.getpid())
    answers.flush()
    for line in requests:
        _limit_time(seconds, patience)
        answers.write(_answer(compiled, line))
        answers.flush()
        faulthandler.cancel_dump_traceback_later()


def _compiler(source: str) -> Callable[[str], Any]:
    """transformers' own function that compiles a template, from its source.

    Importing it takes a second; a copy of it might differ from the installed version.
    """
    import contextlib
    import contextvars
    import datetime
    import typing

    import jinja2.ext
    import jinja2.meta
    import jinja2.sandbox
    import packaging.version

    names: dict[str, Any] = {
        "jinja2": jinja2,
        "json": json,
        "version": packaging.version,
        "datetime": datetime.datetime,
        "Extension": jinja2.ext.Extension,
        "is_jinja_available": lambda: True,
        "ImmutableSandboxedEnvironment": jinja2.sandbox.ImmutableSandboxedEnvironment,
        "ContextVar": contextvars.ContextVar,
        "contextmanager": contextlib.contextmanager,
        "no_type_check": typing.no_type_check,
    }
    exec(source, names)
    return functools.lru_cache(4)(names["_cached_compile_jinja_template"])


def _limit_time(seconds: int, patience: float) -> None:
    """End this process if the request takes too long; neither kernel nor faulthandler waits for the interpreter."""
    faulthandler.dump_traceback_later(patience, exit=True)
    _set_limit("RLIMIT_CPU", math.ceil(time.process_time()) + seconds)


def _set_limit(name: str, value: int) -> None:
    """Set a limit of this process by its name in `resource`; Windows has none."""
    if sys.platform != "win32":
        import resource

        limit: int = getattr(resource, name)
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _answer(compiled: Callable[[str], Any], line: bytes) -> bytes:
    """The answer to a request; an error of the template is one too."""
    import jinja2

    try:
        try:
            answer = _worked(compiled, json.loads(line))
        except (RecursionError, MemoryError):
            raise
        except Exception as error:  # templates may raise anything
            answer = REFUSED if isinstance(error, jinja2.TemplateError) else FAILED, str(error)[:_LONGEST_ERROR]
        return json.dumps(answer).encode() + b"\n"
    except (RecursionError, MemoryError) as error:
        why = "infinite recursion" if isinstance(error, RecursionError) else "it uses too much memory"
        return json.dumps((FAILED, why)).encode() + b"\n"


def _worked(compiled: Callable[[str], Any], request: Sequence[Any]) -> tuple[str, Any]:
    if len(request) == 1:
        return TEXT, _names(compiled, request[0])
    template, variables, letters = request
    text = compiled(template).render(**variables)
    return (TEXT, text) if len(text) <= letters else (LONG, len(text))


def _names(compiled: Callable[[str], Any], template: str) -> tuple[list[str], list[str]]:
    """Names of the variables, attributes and keys in a template, and names of the variables that it does not set."""
    import jinja2.meta
    from jinja2 import nodes

    try:
        tree = compiled("").environment.parse(template)
    except jinja2.TemplateError:  # an unknown extension
        return sorted({*re.findall(r"[A-Za-z_]\w*", template)}), []
    names = {node.name for node in tree.find_all(nodes.Name)}
    names |= {node.attr for node in tree.find_all(nodes.Getattr)}
    names |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str) and len(node.value) < 64}
    return sorted(names), sorted(jinja2.meta.find_undeclared_variables(tree))


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
