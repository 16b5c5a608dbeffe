"""The chat loop at a terminal or over a pipe: reads lines, shows answers as they are generated, executes commands.

On a terminal there is a prompt, and Ctrl-C stops an answer. Over a pipe each line is a message, only answers go to
stdout, and everything else to stderr.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import attrgetter
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.text import Text

from rabbitllm.base.interrupts import handling
from rabbitllm.base.terminal import LABEL, counted, disarmed, harmless, put_fact, size
from rabbitllm.chat.conversation import Conversation, Exchange, SavedChat, read_chat, write_chat
from rabbitllm.display.answer_printer import AnswerPrinter
from rabbitllm.errors import ChatError, OptionError, RabbitLLMError
from rabbitllm.formats.media_file import read_picture
from rabbitllm.generation.media import MediaFile, media_file
from rabbitllm.generation.reasoning import thoughts_note
from rabbitllm.generation.request import FinishReason, Result, Sampling, Work
from rabbitllm.generation.session import Session
from rabbitllm.telemetry.passes import PINNED_UPLOAD, READ, UPLOAD

COMMANDS: dict[str, tuple[str, str]] = {
    "/system": ("[TEXT]", "set the system prompt; without TEXT show it; - removes it"),
    "/image": ("FILE", "send a picture with the next message"),
    "/save": ("FILE", "write the conversation as JSON"),
    "/load": ("FILE", "continue a saved conversation"),
    "/retry": ("", "ask the last question again, and replace its answer"),
    "/undo": ("", "remove the last exchange"),
    "/drop": ("[N]", "remove the oldest exchange, or the N oldest"),
    "/reset": ("", "remove all exchanges, keep the system prompt"),
    "/temperature": ("[T]", "set the sampling temperature (/temperature 0.7; 0 is greedy), or show it"),
    "/thoughts": ("", "show what the model thought before the last answer"),
    "/stats": ("", "tokens, times, passes and bytes of the last answer and of all"),
    "/help": ("", "show this list"),
    "/exit": ("", "exit, like Ctrl-D, /bye and exit"),
}
"""Command -> its argument, in brackets if optional, and its help text."""
_PLACES = {
    READ: "from the disk",
    UPLOAD: "of that copied to the device",
    PINNED_UPLOAD: "from pinned RAM to the device",
}
"""Stage -> source of its bytes, in words."""
ALIASES = {"/bye": "/exit"}
QUOTES = '"""'
"""Mark at the beginning and end of a message of several lines."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command with its argument; an empty one if there is none."""

    name: str
    argument: str


def command_of(line: str) -> Command | None:
    """The command on a line; None if the line is a message for the model.

    Raises:
        ChatError: an unknown command, a missing argument, or an unexpected one.
    """
    if not line.startswith("/"):
        return None
    name, _, rest = line.partition(" ")
    name, argument = ALIASES.get(name, name), rest.strip()
    if name not in COMMANDS:
        raise ChatError(
            f"There is no command {name[:40]!r}.",
            "/help lists the commands; to send a message that starts with a slash, put a space before it.",
        )
    takes = COMMANDS[name][0]
    if argument and not takes:
        raise ChatError(f"{name} takes no argument.", f"Type {name} alone.")
    if not argument and takes and not takes.startswith("["):
        raise ChatError(f"{name} needs a file name.", f"Type {name} FILE, with its name.")
    return Command(name, argument)


def count_of(argument: str) -> int:
    """The number in the argument of /drop; 1 by default.

    Raises:
        ChatError: the argument is not a number, or below 1.
    """
    if not argument:
        return 1
    if not (argument.isascii() and argument.isdigit()) or int(argument[:9]) < 1:
        raise ChatError(f"/drop takes a number of exchanges, not {argument[:40]!r}.", "For example /drop 3.")
    return int(argument[:9])


def temperature_of(argument: str) -> float:
    """The number in the argument of /temperature.

    Raises:
        ChatError: the argument is not a number, or out of range.
    """
    with contextlib.suppress(ValueError, OptionError):
        Sampling(temperature := float(argument))
        return temperature
    raise ChatError(f"/temperature takes 0 or a larger number, not {argument[:40]!r}.", "For example /temperature 0.7.")


def show_stats(console: Console, answers: Sequence[Result], session: Session, in_place: Mapping[str, int]) -> None:
    """Print the output of /stats.

    Args:
        console: console to print to.
        answers: all answers so far.
        session: the session, for the state of its KV cache.
        in_place: "device tier" -> bytes of weights that each pass uses without copying them.
    """
    if not answers:
        put_fact(console, "answers", "none yet")
    else:
        last = answers[-1]
        console.print(Text("last answer", "bold"))
        first = last.seconds if last.first_seconds is None else last.first_seconds
        put_fact(console, "  first token", _duration(first))
        _put_sums(console, [last])
        if len(answers) > 1:
            console.print(Text(f"all {len(answers):,} answers", "bold"))
            put_fact(console, "  time", _duration(sum(answer.seconds for answer in answers)))
            _put_sums(console, answers)
    for tier, nbytes in in_place.items():
        put_fact(console, "in place", f"{size(nbytes)} {tier}, used in place by each pass")
    of = f" of {session.context:,}" if session.context is not None else ""
    cached = f"{session.cached_tokens:,}{of} tokens, {size(session.cache_bytes)}"
    put_fact(console, "KV cache", cached if session.cache is not None else f"not kept: {session.uncached}")


def _put_sums(console: Console, answers: Sequence[Result]) -> None:
    tokens = sum(len(answer.tokens) for answer in answers)
    prompt, kept = (sum(map(attrgetter(name), answers)) for name in ("prompt_tokens", "kept_tokens"))
    further = sum(max(len(answer.tokens) - 1, 0) for answer in answers)
    seconds = sum(answer.seconds - answer.first_seconds for answer in answers if answer.first_seconds is not None)
    rate = f", {further / seconds:,.2f} a second" if further and seconds else ""
    work = reduce(Work.plus, (answer.work for answer in answers))
    thoughts = sum(answer.reasoning_tokens for answer in answers)
    of_them = f", {thoughts:,} of them thoughts" if thoughts else ""
    put_fact(console, "  generated", counted(tokens, "token") + of_them + rate)
    put_fact(console, "  prompt", f"{counted(prompt, 'token')}: {kept:,} kept in the cache, {prompt - kept:,} computed")
    put_fact(console, "  passes", f"{work.passes:,}, with {counted(work.tokens, 'token')} altogether")
    moved = [f"{size(work.moved[stage])} {where}" for stage, where in _PLACES.items() if stage in work.moved]
    put_fact(console, "  moved", ", ".join(moved) if moved else "nothing: all weights are resident")
    if work.drafts is not None:
        put_fact(console, "  drafts", work.drafts.words())
    if work.experts:
        experts = ", ".join(f"{count:,} {where.removeprefix('experts ')}" for where, count in work.experts.items())
        put_fact(console, "  experts", experts)


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


PROMPT = ">>> "
CONTINUATION = "... "


def read_message(read_line: Callable[[str], str]) -> str:
    """Read the next message or command; an empty line is an empty message.

    A message of several lines has `QUOTES` at the beginning of its first line and at the end of its last one, which may
    be the same line. It also ends at the end of the input.

    Args:
        read_line: shows a prompt and returns a line without its end.

    Raises:
        EOFError: there is no further line.
    """
    line = read_line(PROMPT).rstrip()
    if not line.startswith(QUOTES):
        return line
    text = line = line[len(QUOTES) :]
    while not line.rstrip().endswith(QUOTES):
        try:
            line = read_line(CONTINUATION)
        except EOFError:
            return text.strip()
        text += f"\n{line}"
    return text.rstrip().removesuffix(QUOTES).strip()


PATIENCE = 0.4
"""Seconds until the progress of the first pass is shown."""
HOW_TO_LEAVE = "/exit or Ctrl-D exits"
_FIRST_LINE = (
    f"/help lists the commands, {QUOTES} starts a message of several lines, Ctrl-C stops an answer, Ctrl-D exits"
)


@dataclass(frozen=True, slots=True)
class ChatStreams:
    """The input and output of a conversation.

    Attributes:
        read_line: shows a prompt and returns a line without its end; raises EOFError after the last.
        answers: file that answers are written to.
        notes: console for everything else.
        interactive: whether input and output are a terminal.
        answering: context of an answer.
    """

    read_line: Callable[[str], str]
    answers: TextIO
    notes: Console
    interactive: bool
    answering: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


def standard_streams() -> ChatStreams:
    """This process's stdin and stdout."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        with contextlib.suppress(ImportError):  # gives `input` history and editing, where available
            import readline

            if sys.platform != "win32":  # pasted lines are one message; Python has it off
                readline.parse_and_bind("set enable-bracketed-paste on")
    else:
        with contextlib.suppress(AttributeError, ValueError):  # stdin is not a text file
            cast(Any, sys.stdin).reconfigure(errors="replace")
    return ChatStreams(
        lambda prompt: input(prompt if interactive else ""),
        sys.stdout,
        Console(highlight=False, stderr=not interactive),
        interactive,
        _unechoed if interactive else contextlib.nullcontext,
    )


@contextlib.contextmanager
def _unechoed() -> Iterator[None]:
    """Leave what is typed meanwhile to the next prompt: amid an answer the terminal would show it, and ^C."""
    if sys.platform == "win32":
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, [*before[:3], before[3] & ~termios.ECHO, *before[4:]])
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


@dataclass(eq=False)
class ChatLoop:
    """Runs a conversation.

    Args:
        session: session that generates the answers.
        streams: input and output.
        model: name of the model, for files.
        conversation: conversation to continue.
        sampling: how tokens are chosen, in words.
        with_stats: whether to show statistics after each answer.
    """

    session: Session
    streams: ChatStreams
    model: str
    conversation: Conversation
    sampling: str = ""
    with_stats: bool = field(default=False, kw_only=True)
    _answers: list[Result] = field(default_factory=list, init=False)
    _failed: bool = field(default=False, init=False)
    _pictures: tuple[MediaFile, ...] = field(default=(), init=False)

    def run(self, in_place: dict[str, int] | None = None) -> bool:
        """Run until the input ends or /exit; returns False if a pipe's message or command was refused.

        Args:
            in_place: see `show_stats`.
        """
        self._in_place = in_place or {}
        if self.streams.interactive:
            self._note(_FIRST_LINE)
            self._note(f"sampling: {self.sampling}")
        for remark in self.session.remarks:
            self._note(remark)
        while True:
            try:
                message = read_message(self.streams.read_line)
            except EOFError:
                if self.streams.interactive:
                    self._put("\n")
                break
            except KeyboardInterrupt:
                if not self.streams.interactive:
                    raise
                self._put("\n")
                self._note(HOW_TO_LEAVE)
                continue
            try:
                if not self._take(message):
                    break
            except RabbitLLMError as error:
                self._refuse(str(error))
            except BrokenPipeError:  # the reader has closed the pipe
                raise
            except (OSError, RuntimeError, MemoryError) as error:  # includes torch's out-of-memory errors
                self.session.forget()
                self._refuse(
                    f"{type(error).__name__}: {harmless(str(error), 500)}\n  What to do: /save writes the conversation."
                )
        return self.streams.interactive or not self._failed  # at a terminal the user has seen and mended it

    def _take(self, message: str) -> bool:
        """Handle a message or command; returns whether to continue."""
        command = command_of(message) if "\n" not in message else None
        if command is not None:
            self._execute(command)
        elif message.strip() == "exit" and self.streams.interactive:
            return False
        elif message.strip():
            self._ask(message.strip())
        return command is None or command.name != "/exit"

    def _ask(self, question: str) -> None:
        """Answer a question, which goes with the pictures that wait for it."""
        question = question.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        printer = AnswerPrinter(self.streams.notes, self.streams.answers)
        with self.streams.answering(), _interruptible() as stopped, self._waiting() as (at_unit, begin):
            came = False

            def write(text: str) -> None:
                nonlocal came
                text = text if came else text.lstrip()
                if text:
                    came = True
                    begin()
                    printer.write(text)

            def think(text: str, tokens: int) -> None:
                begin()
                printer.think(text, tokens)

            pictures, self._pictures = self._pictures, ()
            messages = self.conversation.messages(question, pictures)
            try:
                answer = self.session.answer(messages, write, stopped=stopped, at_unit=at_unit, think=think)
            finally:
                printer.end()
        if not came and not self.streams.interactive:  # each message gets a line
            self._put("\n")
        self._answers.append(answer)
        is_stopped = answer.finish is FinishReason.CANCELLED
        context = self.session.context
        is_full = context is not None and answer.prompt_tokens + len(answer.tokens) >= context
        if is_stopped and not answer.text:
            begin_of = "answer" if answer.reasoning else "first token"
            self._note(f"stopped before the {begin_of}; the question was removed")
            return
        exchange = Exchange(question, answer.text, is_stopped, pictures, answer.reasoning)
        self.conversation = self.conversation.with_exchange(exchange)
        if is_stopped:
            self._note("stopped; the partial answer stays in the conversation")
        elif answer.is_cut_off_in_thoughts:
            less = self.session.template.less_thinking
            self._note(thoughts_note(len(answer.tokens), less, is_full=is_full))
        elif answer.finish is FinishReason.LENGTH and is_full:
            self._note(
                f"the context of {context:,} tokens is full: /drop removes the oldest exchange, /reset all exchanges"
            )
        elif answer.finish is FinishReason.LENGTH:
            self._note(f"ended after {counted(len(answer.tokens), 'token')}, the limit of --max-new-tokens")
        elif not answer.text:
            self._note("the model gave an empty answer")
        if self.with_stats:
            show_stats(self.streams.notes, [answer], self.session, self._in_place)
        if self.streams.interactive:
            self._put("\n")

    def _execute(self, command: Command) -> None:
        match command.name:
            case "/help":
                self._help()
            case "/stats":
                show_stats(self.streams.notes, self._answers, self.session, self._in_place)
            case "/thoughts":
                exchanges, answers = self.conversation.exchanges, self._answers
                last = answers[-1] if answers else exchanges[-1] if exchanges else None
                self._note(disarmed(last.reasoning if last else "") or "there are no thoughts")
            case "/reset":
                self.conversation = self.conversation.emptied()
                self.session.forget()
                kept = ", kept the system prompt" if self.conversation.system else ""
                self._note(f"removed all exchanges{kept}")
            case "/drop":
                had = len(self.conversation.exchanges)
                self.conversation = self.conversation.without_oldest(count_of(command.argument))
                remaining = len(self.conversation.exchanges)
                self._note(f"removed {counted(had - remaining, 'exchange')}; {remaining:,} left")
            case "/undo" | "/retry":
                self._undo(retries=command.name == "/retry")
            case "/temperature":
                self._temperature(command.argument)
            case "/system":
                self._system(command.argument)
            case "/save":
                path = _path(command.argument)
                write_chat(path, SavedChat(self.model, self.conversation))
                self._note(f"wrote {counted(len(self.conversation.exchanges), 'exchange')} to {harmless(str(path))}")
            case "/image":
                self._attach(_path(command.argument))
            case "/load":
                self._load(_path(command.argument))

    def _help(self) -> None:
        for name, (argument, does) in COMMANDS.items():
            usage = f"{name} {argument.strip('[]')}"
            put_fact(self.streams.notes, usage if len(usage) < LABEL else name, does)
        put_fact(self.streams.notes, QUOTES, f"starts a message of several lines; it ends with {QUOTES}")
        put_fact(self.streams.notes, "Ctrl-C", "stops an answer; its text stays in the conversation")

    def _system(self, text: str) -> None:
        if text:
            self.conversation = self.conversation.with_system(None if text == "-" else text)
            self._note("removed the system prompt" if text == "-" else "set the system prompt")
        else:
            self._note(harmless(self.conversation.system or "", 2000) or "there is no system prompt")

    def _undo(self, *, retries: bool) -> None:
        before = self.conversation
        if not before.exchanges:
            raise ChatError("There is no exchange yet.", "Ask a question first.")
        last = before.exchanges[-1]
        self.conversation = replace(before, exchanges=before.exchanges[:-1])
        if not retries:
            self._note(f"removed the last exchange; {len(self.conversation.exchanges):,} left")
            return
        if not self.session.sampling.samples:
            self._note("the temperature is 0, so the answer changes only by rounding; /temperature 0.7 varies it")
        waiting, self._pictures = self._pictures, last.pictures
        try:
            self._ask(last.question)
        finally:
            self._pictures = waiting
            if len(self.conversation.exchanges) < len(before.exchanges):  # no answer came
                self.conversation = before
                self._note("the earlier answer stays in the conversation")

    def _temperature(self, argument: str) -> None:
        sampling = self.session.sampling
        if argument:
            self.session.sampling = sampling = replace(sampling, temperature=temperature_of(argument))
        shown = f"{sampling.temperature or 0:g}" if sampling.samples else "0 (greedy)"
        if sampling.samples and sampling.temperature is None:
            shown = "that of the model"
        self._note(f"temperature: {shown}")

    def _attach(self, path: Path) -> None:
        picture = media_file("image", path)
        read_picture(picture.data, picture.name)  # says now if it is damaged
        has_others = self._pictures or any(exchange.pictures for exchange in self.conversation.exchanges)
        if self.session.drafts and not has_others:
            self._note("drafts are not used in a conversation with pictures")
        self._pictures = (*self._pictures, picture)
        self._note(f"{harmless(str(path))} goes with the next message")

    def _load(self, path: Path) -> None:
        saved = read_chat(path)
        self.conversation = saved.conversation
        count = counted(len(saved.conversation.exchanges), "exchange")
        model = f" with {harmless(saved.model)}" if saved.model != self.model else ""
        self._note(f"loaded {count}{model} from {harmless(str(path))}")

    def _put(self, text: str) -> None:
        self.streams.answers.write(text)
        self.streams.answers.flush()

    def _note(self, text: str, style: str = "dim") -> None:
        notes = self.streams.notes
        notes.print(Text(text, style), soft_wrap=not notes.is_terminal)

    def _refuse(self, text: str) -> None:
        self._failed = True
        self._note(f"error: {text}", "red")

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[tuple[Callable[[int, int], None], Callable[[], None]]]:
        """Show the progress of the first pass; yields callbacks for each of its units and for the first text."""
        status = self.streams.notes.status("")
        began = time.monotonic()

        def at_unit(done: int, units: int) -> None:
            if self.streams.interactive and time.monotonic() - began > PATIENCE:
                status.update(f"[dim]reading the question: {done} of {units} layers[/]")
                status.start()  # this and `stop` do nothing the second time

        try:
            yield at_unit, status.stop
        finally:
            status.stop()


def _path(argument: str) -> Path:
    return Path(argument.strip("\"'")).expanduser()


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Catch Ctrl-C inside the context; yields a function that returns whether it was pressed.

    The second Ctrl-C interrupts at once. Has an effect only in the main thread.
    """
    pressed = False

    def on_interrupt(sig: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    with handling(signal.SIGINT, on_interrupt):
        yield lambda: pressed
