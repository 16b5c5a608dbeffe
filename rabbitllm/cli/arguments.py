"""Arguments shared by several commands, and their conversion."""

from __future__ import annotations

import functools
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from rabbitllm.cli._start import import_torch
from rabbitllm.cli.help import answer_option, hosts_option, model_option, rare_option, sampling_option
from rabbitllm.generation.reasoning import Effort, Thinking

if TYPE_CHECKING:
    from rich.console import Console

    from rabbitllm.auto_model import LoadRequest
    from rabbitllm.base.options import Hosts, ShardPolicy
    from rabbitllm.generation.request import Sampling


def complete_model(incomplete: str) -> list[str]:
    """Completions for a shell: models that are split here, and paths."""
    from rabbitllm.store import locations

    names = [name for name in locations.known_names() if name.lower().startswith(incomplete.lower())]
    path = Path(incomplete)
    folder, begun = (path, "") if incomplete.endswith("/") else (path.parent, path.name)
    lead = incomplete[: len(incomplete) - len(begun)]
    try:
        paths = sorted(lead + entry.name + "/" * entry.is_dir() for entry in folder.expanduser().iterdir())
    except OSError:
        paths = []
    shown = (path for path in paths if begun.startswith(".") or not path.removeprefix(lead).startswith("."))
    return [*names, *(path for path in shown if path.startswith(incomplete))]


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A repository, a folder, a file of weights, or a split directory. Gated repositories need HF_TOKEN.",
        autocompletion=complete_model,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
FolderOption = Annotated[
    Path | None,
    model_option(
        "--dir",
        metavar="FOLDER",
        help="Where the split directory is; by default the checkpoint's folder, for a repository RABBITLLM_HOME.",
    ),
]
RevisionOption = Annotated[str | None, model_option(metavar="NAME", help="Branch, tag or commit of a repository.")]
DequantizeOption = Annotated[
    bool, typer.Option("--exact", help="On the CPU, dequantize weights instead of multiplying by codes.")
]

# sharing of passes
ExactOption = Annotated[
    bool, rare_option("--exact", help="Compute each request separately, bit-identical to running alone; slower.")
]

# processes that compute a model together
WorkersOption = Annotated[
    int, hosts_option(help="Number of `rabbitllm worker` processes that compute a part of the layers each.", min=0)
]
AddressOption = Annotated[
    str | None, hosts_option(metavar="HOST:PORT", help="With --workers: address of this process, which workers join.")
]

# splitting
_CHOICES = "none, 8bit, 4bit, 4bit-double, llama.cpp's q8_0, q6_k, q5_k_m, q4_k_m and others, or auto"
CompressionOption = Annotated[str, model_option(metavar="NAME", help=f"{_CHOICES} (chooses bits for each tensor).")]
WhichSplitOption = Annotated[str | None, typer.Option(metavar="NAME", help=f"Compression of the split: {_CHOICES}.")]
NoSplitOption = Annotated[bool, model_option("--no-split", help="Read the original shards directly; write nothing.")]
FitScalesOption = Annotated[
    bool,
    rare_option(
        "--fit-scales", help="With 4bit or 4bit-double: search for the scales with the least error; slower to split."
    ),
]
MinFreeDiskOption = Annotated[str, model_option(metavar="SIZE", help="Disk space that must stay free.")]
DiskPlotOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Plot disk use over time to this file (.png, .svg or .pdf).")
]

# the machines that do the work
RayOption = Annotated[
    str | None, hosts_option(metavar="ADDRESS", help="Run on a Ray cluster: HOST:PORT of its head node, or auto.")
]

# generation
StatsOption = Annotated[bool, typer.Option("--verbose", "--stats", "-v", help="Report times and memory on stderr.")]
SystemOption = Annotated[str | None, answer_option(help="System prompt.")]
_DRAFT = (
    "A small model with the same vocabulary proposes tokens, and a pass checks as many of them as pays; mtp takes the "
    "checkpoint's own heads for that, ngram the tokens that followed the same words before, self copies of the "
    "streamed layers at few bits, in memory; auto is mtp or else ngram where layers are streamed; none is no draft."
)
DraftOption = Annotated[str, answer_option(metavar="MODEL", help=_DRAFT, autocompletion=complete_model)]
BatchDraftOption = Annotated[str, rare_option("--draft", metavar="MODEL", help=_DRAFT, autocompletion=complete_model)]


def limits_of(words: list[str] | None) -> dict[int | str, int | str] | None:
    """`cpu=24GB`, one for each device -> the argument `max_memory`.

    Raises:
        OptionError: no equals sign.
    """
    from rabbitllm.errors import OptionError

    limits: dict[int | str, int | str] = {}
    for word in words or ():
        name, equals, size = word.partition("=")
        if not equals:
            raise OptionError(
                f"--max-memory {word} names no device.", f"Use cpu={word} for RAM, 0={word} for the first GPU."
            )
        limits[int(name) if name.strip().isdigit() else name.strip()] = size.strip()
    return limits or None


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The options that the commands share which run a model, declared once; `with_model_options` adds them."""

    compression: Annotated[
        str | None, model_option(metavar="NAME", help=f"{_CHOICES}; by default that of an existing split, else none.")
    ] = None
    device: Annotated[
        str | None,
        model_option(
            metavar="DEVICE", help="cuda:N, cpu, or auto for all GPUs; by default the first GPU, else the CPU."
        ),
    ] = None
    max_memory: Annotated[
        list[str] | None,
        model_option(
            metavar="DEVICE=SIZE",
            help="Memory for weights, e.g. cpu=24GB or 0=14GB; repeatable; by default the free memory.",
        ),
    ] = None
    dtype: Annotated[
        str | None, model_option(metavar="DTYPE", help="float32, bfloat16 or float16; by default the checkpoint's.")
    ] = None
    folder: FolderOption = None
    max_disk: Annotated[
        str | None,
        model_option(
            metavar="SIZE", help="Maximum size of layer files and downloads, e.g. 50GB; by default the free disk."
        ),
    ] = None
    sequential: Annotated[
        bool,
        model_option(
            "--sequential", help="While splitting, delete each used shard, also shards of a local checkpoint."
        ),
    ] = False
    no_split: NoSplitOption = False
    verify_source: Annotated[
        bool, rare_option("--verify-source", help="Read the shards and compare them with their recorded checksums.")
    ] = False
    revision: RevisionOption = None
    trust_remote_code: Annotated[
        bool, rare_option("--trust-remote-code", help="Run Python code that the repository contains.")
    ] = False
    no_verify_checksums: Annotated[
        bool, rare_option("--no-verify-checksums", help="Do not compare layer files with their checksums.")
    ] = False
    fast_bfloat16: Annotated[
        bool | None,
        rare_option(
            "--fast-bfloat16/--no-fast-bfloat16",
            help="Use this package's kernels for bfloat16 and float16 where they are faster than torch's; results "
            "differ in the last bits. By default on CPUs.",
        ),
    ] = None

    def for_workers(self, model: str) -> str:
        """A model and the options that all its processes must have alike, as words of a command line."""
        named = {f"--{name}": getattr(self, name) for name in ("compression", "dtype", "revision")}
        words = [word for name, value in named.items() if value is not None for word in (name, value)]
        return shlex.join([model, *words, *["--no-split"] * self.no_split])

    def request(
        self,
        model: str,
        hosts: Hosts | None = None,
        *,
        shards: ShardPolicy | None = None,
        token: str | None = None,
        of_split: Mapping[str, Any] = MappingProxyType({}),
        loads: bool = True,
        **of_run: Any,
    ) -> LoadRequest:
        """Parse and check them.

        Without `--compression`, the compression is that of a split on this machine; with `--no-split` there is none.

        Args:
            model: the model as the user named it.
            hosts: processes that compute it together.
            shards: what becomes of the shards; by default those that are fetched are not kept.
            token: access token for the hub.
            of_split, of_run: further options of `prepare.split_options` and of `RunOptions`.
            loads: whether the model is loaded afterwards.

        Raises:
            OptionError: a limit that names no device, or options that are invalid or contradict each other.
        """
        from rabbitllm.auto_model import LoadRequest, check_unsplit
        from rabbitllm.base.options import SplitOptions, expand
        from rabbitllm.models.library import compression_to_run
        from rabbitllm.models.pull import shard_policy

        folder = expand(self.folder) if self.folder is not None else None
        word = "none" if self.no_split and self.compression is None else self.compression
        compression = compression_to_run(model, word, folder)
        request = LoadRequest.of(
            model,
            compression,
            folder,
            revision=self.revision,
            token=token,
            shards=shard_policy(sequential=self.sequential) if shards is None else shards,
            of_split={"max_disk": self.max_disk, "verify_source": self.verify_source, **of_split},
            hosts=hosts,
            device=self.device,
            dtype=self.dtype,
            max_memory=limits_of(self.max_memory),
            trust_remote_code=self.trust_remote_code,
            fast_bfloat16=self.fast_bfloat16,
            verify_checksums=not self.no_verify_checksums,
            **of_run,
        )
        if self.no_split:
            check_unsplit(SplitOptions(compression))
        if loads:
            import_torch()  # all is checked that needs none of it
        return replace(request, split=None) if self.no_split else request


def command_draft(draft: str, request: LoadRequest) -> Any:
    """The draft of a model, as `auto_model.draft_of` gives it; a draft model has the compression of its split here."""
    from rabbitllm import auto_model
    from rabbitllm.models.library import compression_here

    return auto_model.draft_of(draft, request, compression_here)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The options that the commands share which generate text, declared once; `with_model_options` adds them."""

    temperature: Annotated[float | None, sampling_option(help="Sampling temperature; 0 is greedy.")] = None
    top_p: Annotated[float | None, sampling_option(help="Nucleus sampling threshold, above 0 and up to 1.")] = None
    top_k: Annotated[
        int | None, sampling_option(help="Sample from this many of the most likely tokens; 0 for all.", min=0)
    ] = None
    min_p: Annotated[
        float | None,
        sampling_option(help="Sample from tokens that are at least this share as likely as the most likely one."),
    ] = None
    repeat_penalty: Annotated[
        float | None, sampling_option(help="Penalty on tokens that occurred already, e.g. 1.1; 1 for none.")
    ] = None
    presence_penalty: Annotated[
        float | None, sampling_option(help="Subtracted from the scores of tokens in the answer, -2 to 2.")
    ] = None
    frequency_penalty: Annotated[
        float | None, sampling_option(help="Likewise, times the number of their occurrences there.")
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        sampling_option(metavar="TOKEN=N", help="Added to the score of a token, by its id; -100 to 100; repeatable."),
    ] = None
    seed: Annotated[int | None, sampling_option(help="Random seed.")] = None
    min_tokens: Annotated[
        int | None, sampling_option(help="Tokens before which an answer does not end by itself.", min=0)
    ] = None
    ignore_eos: Annotated[
        bool | None, sampling_option("--ignore-eos", help="Go on after an end token, up to the limit of tokens.")
    ] = None
    stop: Annotated[list[str] | None, answer_option(help="Stop text; an answer ends before it; repeatable.")] = None
    context: Annotated[
        int | None, answer_option(help="Maximum tokens of prompt and answer; by default the model's context.", min=1)
    ] = None
    thinking: Annotated[
        bool | None,
        answer_option(
            "--thinking/--no-thinking", help="Let a model that can think first do so, or not; by default its own way."
        ),
    ] = None
    effort: Annotated[
        Effort | None, answer_option(metavar="LEVEL", help="How much such a model thinks: low, medium or high.")
    ] = None

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen, where an option says so.

        Raises:
            OptionError: a number out of its range.
        """
        from rabbitllm.errors import OptionError
        from rabbitllm.generation.request import Sampling, biases_of

        penalties = self.repeat_penalty, self.presence_penalty, self.frequency_penalty
        try:
            pairs = (text.partition("=") for text in self.logit_bias or ())
            biases = biases_of({token: float(bias) for token, _, bias in pairs}) or None
        except ValueError as error:
            raise OptionError(f"--logit-bias: {error}.", "Use TOKEN=N, such as 1917=-100.") from None
        numbers = self.temperature, self.top_p, self.seed, self.top_k, self.min_p
        return Sampling(*numbers, *penalties, biases, self.min_tokens, self.ignore_eos)

    @property
    def thoughts(self) -> Thinking:
        """Whether the model thinks, and how much, where an option says so."""
        return Thinking(self.thinking, self.effort)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts, without empty ones."""
        return tuple(filter(None, self.stop or ()))


NO_OPTIONS = ModelOptions()
NO_ANSWER_OPTIONS = AnswerOptions()
_SHARED: Mapping[str, type[ModelOptions | AnswerOptions]] = {"options": ModelOptions, "answers": AnswerOptions}
"""Parameter of a command -> the class whose fields are options in its place."""


def with_model_options(
    *left_out: str, uncompressed: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that declares the fields of `ModelOptions` in place of a command's parameter `options`.

    Likewise those of `AnswerOptions` in place of `answers`.

    Args:
        left_out: fields that the command does not have.
        uncompressed: whether the compression is "none" by default, also where a compressed split is here.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        groups: dict[str, list[Parameter]] = {}
        parameters: list[Parameter] = []
        for parameter in signature(command).parameters.values():
            if shared := _SHARED.get(parameter.name):
                groups[parameter.name] = _parameters_of(shared, left_out, uncompressed=uncompressed)
                parameters += groups[parameter.name]
            else:
                parameters.append(parameter.replace(annotation=hints[parameter.name]))

        @functools.wraps(command)
        def called(**arguments: Any) -> None:
            for name, group in groups.items():
                arguments[name] = _SHARED[name](**{option.name: arguments.pop(option.name) for option in group})
            command(**arguments)

        called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return decorate


def _parameters_of(shared: type, left_out: tuple[str, ...], *, uncompressed: bool) -> list[Parameter]:
    hints = get_type_hints(shared, include_extras=True)
    declared = {field.name: (field.default, hints[field.name]) for field in fields(shared)}
    if uncompressed:
        declared["compression"] = "none", CompressionOption
    return [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)
        for name, (default, annotation) in declared.items()
        if name not in left_out
    ]


def put_json(record: Any) -> None:
    """One object on stdout."""
    json.dump(record, sys.stdout, indent=1)
    print()


def put_result(as_json: bool, record: Callable[[], Any], show: Callable[[Console], object]) -> None:
    """The result of a command on stdout: one object, or text for people."""
    from rich.console import Console

    if as_json:
        put_json(record())
    else:
        show(Console(highlight=False))
