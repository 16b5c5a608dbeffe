"""Renders chat templates in a process of its own, which has limits of time, memory and output.

A template is untrusted, and one operation of it (`'x' * 10**10`, a comparison of nested lists) can take all memory or
go on for hours, where no other thread of its process can stop it. So the template runs in `template_child`: started
with the first one, kept for the next, and ended with this process or by a limit. It has transformers' own environment,
so a template gives the same text.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes

from rabbitllm.base.contexts import assigned
from rabbitllm.base.forks import DaemonThread, in_child, own_lock
from rabbitllm.base.terminal import error_line
from rabbitllm.generation import _template_child
from rabbitllm.generation._template_child import FAILED, LONG, REFUSED

SECONDS = 10
"""Limit of processor time for a template (not on Windows); conversations that fill a context take a second."""
PATIENCE = 60.0
"""Limit of a template in seconds by the clock."""
MEMORY = 1 << 30
"""Limit of the process's address space (Linux) or resident memory (elsewhere), in bytes."""
LONGEST_LINE = 128 << 20
"""Limit of a request and of an answer, in bytes."""
BETWEEN_LOOKS = 0.02
"""Seconds between two looks at the process's memory, where the kernel does not limit it."""
KERNEL_LIMITS_MEMORY = sys.platform == "linux"


class TooManyLetters(Exception):
    """A template made a text of more letters than allowed."""

    def __init__(self, letters: int) -> None:
        super().__init__(f"{letters:,} letters")
        self.letters = letters


class TemplateProcess:
    """The process that runs templates, one request at a time; started on demand."""

    def __init__(self) -> None:
        self._lock = own_lock(threading.Lock())
        self._process: subprocess.Popen[bytes] | None = None
        self._busy = threading.Event()
        self._is_too_large = False
        in_child(self._forget)
        atexit.register(self._end)

    def rendered(self, template: str, variables: dict[str, Any], letters: int) -> str:
        """The text that a template makes.

        Args:
            template: its source.
            variables: its variables, of the types of JSON.
            letters: limit of the text.

        Raises:
            TooManyLetters: the text is longer.
            jinja2.TemplateError: the template refuses.
            RuntimeError: it fails.
            ValueError: it exceeds a limit, or calls itself without end.
        """
        text: str = self._answer(template, variables, letters)
        return text

    def names(self, template: str) -> tuple[list[str], list[str]]:
        """Names of the variables, attributes and keys in a template, and names of the variables that it does not set.

        Raises:
            RuntimeError, ValueError: see `rendered`.
        """
        occurring, variables = self._answer(template)
        return occurring, variables

    def _answer(self, *request: Any) -> Any:
        line = json.dumps(request).encode() + b"\n"
        if len(line) > LONGEST_LINE:
            raise ValueError("the conversation is too long for it")
        with self._lock:
            try:
                status, value = json.loads(self._exchanged(line))
            except BaseException:  # also a KeyboardInterrupt: a later request must not get this answer
                self._end()
                raise
        if status == LONG:
            raise TooManyLetters(value)
        if status == REFUSED:
            raise jinja2.TemplateError(value)
        if status == FAILED:
            raise RuntimeError(value)
        return value

    def _exchanged(self, line: bytes) -> bytes:
        process = self._process
        if process is None or process.poll() is not None:
            self._end()
            process = self._start()
        self._busy.set()
        try:
            _send(process, line)
            assert process.stdout is not None
            answer = process.stdout.readline(LONGEST_LINE)
        finally:
            self._busy.clear()
        if not answer.endswith(b"\n"):
            raise ValueError(self._why_it_ended(process) if not answer else "its output is too long")
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process.

        Raises:
            RuntimeError: that is not possible.
        """
        from rabbitllm.generation.transformers_api import template_compiler_source

        source = template_compiler_source()
        group: dict[str, Any] = {"start_new_session": True}  # Ctrl-C is not for it
        if sys.platform == "win32":
            group = {"creationflags": subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP}
        command, pipe = [sys.executable, "-PS", _template_child.__file__], subprocess.PIPE
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, **group)
            self._process, self._is_too_large = process, False
            limits = (MEMORY if KERNEL_LIMITS_MEMORY else 0, SECONDS, PATIENCE)
            _send(process, json.dumps([[str(folder) for folder in sys.path], source, *limits]).encode() + b"\n")
            assert process.stdout is not None
            pid = int(process.stdout.readline())
        except (OSError, ValueError) as error:
            raise RuntimeError(f"the process that runs it does not start ({error_line(error)})") from error
        if not KERNEL_LIMITS_MEMORY:
            DaemonThread(self._watch, "rabbitllm-templates", process, pid).start()
        return process

    def _watch(self, process: subprocess.Popen[bytes], pid: int) -> None:
        """End the process once it takes too much memory.

        Args:
            process: the process as it was started; on Windows this may be a launcher.
            pid: the process that runs templates.
        """
        import psutil

        with contextlib.suppress(psutil.Error):
            program = psutil.Process(pid)
            while self._busy.wait() and process is self._process:
                if program.memory_info().rss > MEMORY:
                    self._is_too_large = True
                    program.kill()
                time.sleep(BETWEEN_LOOKS)

    def _why_it_ended(self, process: subprocess.Popen[bytes]) -> str:
        code = process.wait()
        if self._is_too_large:
            return "it uses too much memory"
        if sys.platform != "win32" and code == -signal.SIGXCPU:
            return f"it takes more than {SECONDS} s of processor time"
        if code == 1:  # by faulthandler
            return f"it takes more than {PATIENCE:.0f} s"
        return f"it ends the process that runs it (exit code {code})"

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError), process:  # what was not sent cannot be
                pass

    def _forget(self) -> None:
        """In a forked child: leave the process to the parent."""
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0
            pipes: tuple[Any, Any] = (process.stdin, process.stdout)
            for pipe in pipes:
                pipe.raw.close()  # without sending what is in its buffer


def _send(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Send a line; if the process has ended, reading its answer tells that."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()


PROCESS = TemplateProcess()


_LETTERS: ContextVar[int | None] = ContextVar("letters of a template", default=None)
"""The limit of letters of the templates that run here; None outside of `in_the_process`."""


def in_the_process(letters: int) -> contextlib.AbstractContextManager[None]:
    """Make transformers run chat templates in the process, for this thread while the context is open.

    Args:
        letters: limit of the text that a template makes.

    Raises:
        TooManyLetters, jinja2.TemplateError, RuntimeError, ValueError: see `TemplateProcess.rendered`.
    """
    _install()
    return assigned(_LETTERS, letters)


@functools.cache
def _install() -> None:
    from rabbitllm.generation.transformers_api import wrap_template_compiler

    def wrapped(plain: Callable[[str], Any]) -> Callable[[str], Any]:
        def compiled(template: str) -> Any:
            letters = _LETTERS.get()
            return plain(template) if letters is None else _RemoteTemplate(template, letters)

        return compiled

    wrap_template_compiler(wrapped)


class _RemoteTemplate:
    """What transformers uses of a compiled template and of its environment.

    Args:
        source: source of the template.
        letters: limit of its text.
    """

    def __init__(self, source: str, letters: int) -> None:
        self._source = source
        self._letters = letters

    def render(self, **variables: Any) -> str:
        return PROCESS.rendered(self._source, variables, self._letters)

    @property
    def environment(self) -> _RemoteTemplate:
        return self

    def parse(self, source: str) -> nodes.Template:
        """A template that reads the same variables."""
        names = PROCESS.names(source)[1]
        tree = nodes.Template([nodes.Output([nodes.Name(name, "load") for name in names])])
        tree.set_environment(jinja2.Environment())
        return tree
