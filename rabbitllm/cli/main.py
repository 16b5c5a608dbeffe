"""The entry point: collects the subcommands, and turns the package's errors into a message and an exit code."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from rabbitllm.base.interrupts import answer_interrupts, resumable
from rabbitllm.base.terminal import size
from rabbitllm.cli import exit_codes
from rabbitllm.cli._batch import batch_command
from rabbitllm.cli._bench import bench_command
from rabbitllm.cli._chat import chat_command
from rabbitllm.cli._convert import convert_command
from rabbitllm.cli._demo import demo
from rabbitllm.cli._doctor import doctor_command
from rabbitllm.cli._inspect import inspect_command
from rabbitllm.cli._plan import plan_command
from rabbitllm.cli._pull import pull_command
from rabbitllm.cli._quality import quality_command
from rabbitllm.cli._run import run_command
from rabbitllm.cli._serve import name_and_model, serve_command
from rabbitllm.cli._spelling import TypedRecord, typed_here
from rabbitllm.cli._splits import ls_command, rm_command, show_command, verify_command
from rabbitllm.cli._start import kernels_told, shown
from rabbitllm.cli._worker import worker_command
from rabbitllm.cli.help import CommandInWords, GroupInWords
from rabbitllm.engine.free_memory import group_limits, process_limits, swap_bytes
from rabbitllm.errors import NotEnoughMemoryError, OptionError, RabbitLLMError, system_errors_by_name
from rabbitllm.version import __version__


class _Commands(GroupInWords):
    """The commands, with the same treatment of interrupts and broken pipes for every version of typer."""

    def invoke(self, ctx: Any) -> Any:
        # names in a checkpoint may hold what the terminal's encoding lacks, lone surrogates included
        with contextlib.suppress(AttributeError):  # a notebook's stream has no encoding
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        try:
            with system_errors_by_name():
                result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # otherwise the rest of the buffer fails again at exit, with a message
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(exit_codes.BROKEN_PIPE) from None
        except KeyboardInterrupt as interrupt:
            if not hasattr(interrupt, "__notes__"):  # else it was reported
                bar = "\n" if sys.stderr.isatty() else ""  # the terminal has shown ^C
                print(f"{bar}{str(interrupt) or 'interrupted'}", file=sys.stderr)
            raise typer.Exit(exit_codes.INTERRUPTED) from None


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False, epilog=exit_codes.EPILOG)


def _version(requested: bool) -> None:
    if requested:
        print(f"rabbitllm {__version__}")
        raise typer.Exit


@app.callback(help="Run language models that are larger than GPU memory, RAM or the free disk.")
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that come before a subcommand."""


TORCH_BYTES = 232 << 20
"""Memory that a command with a model takes before any weights, less what the command line took: 256 MiB on a processor
with one thread (torch 2.13); more with CUDA."""
TORCH_ADDRESSES = 512 << 20
"""Address space that torch's libraries alone take: 589 MiB with Python."""


STARTING = "loading torch and transformers …"


def _needs_torch(function: Callable[..., None]) -> Callable[..., None]:
    """A command that says that it starts. It refuses where no model has the name that it is given, before the slow
    imports, and where the system would end the process without a word.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> None:
        from rabbitllm.store.locations import require_place

        with system_errors_by_name():
            models = [model for _, model in map(name_and_model, kwargs.get("models") or ())]
            for name in filter(None, (kwargs.get("model"), *models, kwargs.get("draft"))):
                require_place(name)
        swap = swap_bytes()
        limits = [("control group", group.limit, group.room + swap, TORCH_BYTES) for group in group_limits()]
        for cap in process_limits():
            limits.append((cap.name, cap.limit, cap.room, TORCH_ADDRESSES if cap.name == "RLIMIT_AS" else TORCH_BYTES))
        for name, limit, room, needed in limits:
            if room < needed:
                raise NotEnoughMemoryError(
                    f"This process may take {size(room)} more memory ({name}, limit {size(limit)}); Python with torch "
                    f"takes {size(needed)} before any weights.",
                    "Raise the limit (container, `ulimit -v`), or end other processes in it.",
                )
        with contextlib.nullcontext() if kwargs.get("as_json") else shown(STARTING), kernels_told():
            from huggingface_hub.utils import disable_progress_bars

            disable_progress_bars()  # shards have our own bar, and other files are small
            function(*args, **kwargs)

    return called


def _resumable(function: Callable[..., None]) -> Callable[..., None]:
    """A command that says after Ctrl-C that it can be resumed."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> None:
        with contextlib.nullcontext() if kwargs.get("dry_run") else resumable():
            function(*args, **kwargs)

    return called


def _add(name: str, panel: str, function: Callable[..., None]) -> None:
    """Add a command. Each paragraph of its help is one line, which the terminal wraps; examples keep their lines."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    shown = "\n\n".join(text if text.startswith("Examples:") else " ".join(text.split()) for text in paragraphs)
    app.command(name=name, cls=CommandInWords, rich_help_panel=panel, help=shown)(function)


MAIN, MANY = "Main commands", "Many prompts, several machines"
SPLITS, OTHER, MEASURE = "Splits on this machine", "Machine and checkpoints", "Measure"
_add("pull", MAIN, _needs_torch(_resumable(pull_command)))
_add("run", MAIN, _needs_torch(run_command))
_add("chat", MAIN, _needs_torch(chat_command))
_add("serve", MAIN, _needs_torch(serve_command))
_add("plan", MAIN, _needs_torch(plan_command))
_add("batch", MANY, _needs_torch(batch_command))
_add("worker", MANY, _needs_torch(worker_command))
_add("ls", SPLITS, ls_command)
_add("show", SPLITS, show_command)
_add("verify", SPLITS, verify_command)
_add("rm", SPLITS, rm_command)
_add("doctor", OTHER, doctor_command)
_add("inspect", OTHER, inspect_command)
_add("convert", OTHER, _resumable(convert_command))
_add("bench", MEASURE, _needs_torch(bench_command))
_add("quality", MEASURE, _needs_torch(quality_command))
_add("demo", MEASURE, _needs_torch(demo))


def _open_standard_streams() -> None:
    """Open those that are closed, without effect: the next file would get their descriptor, and Python has None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def main() -> None:
    """Run the command line."""
    answer_interrupts()
    atexit.register(gc.freeze)  # else the last garbage collection visits torch's objects, which takes seconds
    _open_standard_streams()
    record_factory = logging.getLogRecordFactory()
    logging.setLogRecordFactory(TypedRecord)
    try:
        app()
    except RabbitLLMError as error:
        print(f"error: {typed_here(str(error))}", file=sys.stderr)
        sys.exit(exit_codes.USAGE if isinstance(error, OptionError) else exit_codes.ERROR)
    except SystemExit as stopped:  # rich, or typer in a help, exits with 1 if it notices the broken pipe first
        if isinstance(stopped.__context__, BrokenPipeError):
            sys.exit(exit_codes.BROKEN_PIPE)
        raise
    except KeyboardInterrupt:
        sys.exit(exit_codes.INTERRUPTED)
    finally:
        logging.setLogRecordFactory(record_factory)
