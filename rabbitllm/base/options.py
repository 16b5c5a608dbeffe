"""The options of a call, validated once, here. Independent of files and devices."""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, ParamSpec, SupportsIndex, TypeVar

from rabbitllm.base.terminal import harmless
from rabbitllm.errors import OptionError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_UNITS = {"": 1, "b": 1}
_UNITS |= {p + b: 1000**i for i, p in enumerate("kmgt", 1) for b in ("", "b")}
_UNITS |= {f"{p}i{b}": 1024**i for i, p in enumerate("kmgt", 1) for b in ("", "b")}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")

_DTYPES = {"fp16": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32", "f32": "float32"}
"""Names of dtypes in other programs, and torch's."""
TRANSFERS = ("auto", "file", "stream")
"""Ways for shards of a repository to arrive; see `SplitOptions.shard_transfer`."""
BIG_LAYER_BYTES = 10 * 1000**3
"""Layers above this size cause a warning: streaming one takes that much memory; splitting does not."""


def check_model(name: object) -> None:
    """Check the name of a model.

    Raises:
        OptionError: it is no name.
    """
    if not isinstance(name, str | os.PathLike):
        raise OptionError(
            f"The model is {harmless(repr(name), 60)}; expected the path of a folder or file, or the name of a "
            "repository.",
            "Example: AutoModel.from_pretrained('Qwen/Qwen3-0.6B').",
        )


def is_named(model: object) -> bool:
    """Whether a model is given by its name; False for one that this package has loaded.

    Raises:
        OptionError: it is neither.
    """
    is_loaded = hasattr(model, "placement")
    if not is_loaded:
        check_model(model)
    return not is_loaded


class ShardPolicy(enum.Flag):
    """The shards of its source that a split deletes.

    - DELETE_FETCHED: those that the split fetches itself, one at a time. Without this and the next, those of a
      repository are all fetched into the hub cache before the split begins.
    - DELETE_USED: each as soon as it is used up, one at a time, wherever it is.
    - DELETE_REST: the rest of the original, when the split is complete.

    A local file with tensors that no layer file has is kept, except by DELETE_USED and DELETE_REST together.
    """

    KEEP = 0
    DELETE_FETCHED = enum.auto()
    DELETE_USED = enum.auto()
    DELETE_REST = enum.auto()

    @classmethod
    def of(cls, *, sequential: bool, delete_original: bool, keep_fetched: bool = True) -> ShardPolicy:
        """Return the policy for the arguments of users; `keep_fetched` has no effect with `sequential`."""
        shards = cls.DELETE_USED if sequential else cls.KEEP if keep_fetched else cls.DELETE_FETCHED
        return shards | cls.DELETE_REST if delete_original else shards

    @property
    def takes_one_at_a_time(self) -> bool:
        """Whether shards of a repository are fetched one at a time, and not kept."""
        return bool(self & (ShardPolicy.DELETE_FETCHED | ShardPolicy.DELETE_USED))

    @property
    def deletes_used(self) -> bool:
        """Whether each shard is deleted as soon as it is used up, wherever it is."""
        return ShardPolicy.DELETE_USED in self

    @property
    def deletes_rest(self) -> bool:
        """Whether the rest of the original is deleted when the split is complete."""
        return ShardPolicy.DELETE_REST in self

    @property
    def deletes_all(self) -> bool:
        """Whether also files are deleted that have tensors which the split leaves out."""
        return self.deletes_used and self.deletes_rest

    @property
    def deletes_original(self) -> bool:
        """Whether files are deleted that the split did not fetch itself."""
        return self.deletes_used or self.deletes_rest


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """Options of a split.

    Attributes:
        compression: None, one for all tensors ("8bit", "q4_k" …), a mixture of llama.cpp ("q4_k_m", "q5_k_m"), or
            "auto" for bits chosen by tensor.
        shards: which of them are deleted.
        max_disk: bytes that the split may create (layer files and fetched shards); None for all free bytes.
        shard_transfer: how shards of a repository arrive that are taken one at a time: "file" (each is fetched whole,
            and the next one meanwhile if the disk has room), "stream" (none is ever a file), or "auto" (the first of
            these that fits).
        memory: at "auto", bytes in which all weights should be resident; None for no such limit.
        memory_is_given: whether the caller gave those bytes; else they are the free memory.
        for_gpu: at "auto", choose among the compressions that a GPU multiplies from their codes.
        fit_scales: at 4bit and 4bit-double choose scales that fit their blocks best, instead of bitsandbytes' own.
        verify_source: read every shard on this machine and compare its bytes with the recorded checksum, or with the
            hub's digest; when a split begins, record the checksums.
        profiling: record the time spent on each layer.
        threads: workers that read, quantize and write; by default one per core, at least 2.
        gguf_dtype: None keeps blocks of GGUF files that compression does not touch. Else the dtype of all tensors, a
            key of `DTYPES`, or "auto": the file's own, float32 if it is quantized.
        min_free: bytes; free disk below which a split stops cleanly, since the system needs some.
    """

    compression: str | None = None
    shards: ShardPolicy = ShardPolicy.KEEP
    max_disk: int | None = None
    profiling: bool = False
    threads: int = field(default_factory=lambda: usable_cores())
    shard_transfer: str = "auto"
    min_free: int = 1_000_000_000
    memory: int | None = None
    memory_is_given: bool = False
    for_gpu: bool = False
    fit_scales: bool = False
    verify_source: bool = False
    gguf_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options for running a split model.

    Attributes:
        device: "cuda:N", "cuda", "cpu", or "auto" for every GPU; None for the first GPU, else the CPU.
        dtype: name of a torch dtype, or None for the config's own.
        attn_implementation: as in transformers, or "auto".
        prefetching: read the next layer while this one computes.
        pin_memory: pinned host buffers for a GPU.
        max_memory: device -> bytes, in accelerate's form with sizes parsed; None for the free memory.
        cache_layers: minimum number of decoder layers to keep in host memory; None leaves it to `max_memory`.
        small_layers_resident: place embeddings, norm and head before the decoder layers.
        profiling: record the time spent on each layer.
        show_progress: a line during a slow pass.
        trust_remote_code: allow the model's own Python code.
        exact: compute with the matrices that 4bit and 8bit dequantize to, even if products with their codes are faster.
        fast_bfloat16: multiply bfloat16 and float16 with a kernel of this package where it is faster than torch's;
            None: on a CPU, and not with `exact`.
        verify_checksums: compare layer files with their checksums when they are first read.
        self_draft: keep copies of what is streamed in memory, at fewer bits, so that the model can be its own draft.
        heads: keep the checkpoint's heads for multi-token prediction in memory, for a draft; None for heads that can be
            used, if passes move weights.
    """

    device: str | None = None
    dtype: str | None = None
    attn_implementation: str = "auto"
    prefetching: bool = True
    pin_memory: bool = True
    max_memory: Mapping[str, int] | None = None
    cache_layers: int | None = None
    small_layers_resident: bool = True
    profiling: bool = False
    show_progress: bool = True
    trust_remote_code: bool = False
    exact: bool = False
    fast_bfloat16: bool | None = False
    verify_checksums: bool = True
    self_draft: bool = False
    heads: bool | None = False

    def drafted(self, draft: Any) -> RunOptions:
        """The options with what a draft needs: "auto", "mtp" or "self"; a draft model needs nothing."""
        return replace(self, heads=None if draft == "auto" else draft == "mtp", self_draft=draft == "self")

    def __post_init__(self) -> None:
        """
        Raises:
            OptionError: two options that contradict each other.
        """
        if self.exact and self.fast_bfloat16:
            raise OptionError(
                "exact=True requires the bits of transformers; fast_bfloat16=True changes the last bits.",
                "Remove one of the two.",
            )


@dataclass(frozen=True, slots=True)
class Hosts:
    """Processes, on one machine or several, that compute one model together.

    Any process that reaches the address can send inputs to the model. Use it only in a trusted network.

    Attributes:
        address: "host:port" of the first process, as the others reach it; in the first one, port 0 selects a free port.
        workers: number of other processes that the first one waits for; 0 in those others.
        rank: rank of this process; None for the next free one.
        patience: seconds to wait for the others at the rendezvous.
        timeout: seconds within which each must have loaded its part, and later must answer in every pass.
        announce: called in the first process with the address at which it waits.
    """

    address: str
    workers: int = 0
    rank: int | None = None
    patience: float = 600.0
    timeout: float = 600.0
    announce: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            OptionError: no address, or an invalid number.
        """
        host, colon, port = self.address.rpartition(":")
        if not (host and colon and port.isdigit() and int(port) < 1 << 16):
            raise OptionError(f"{self.address!r} is not an address; expected HOST:PORT.", "Example: 192.168.1.5:29500.")
        if self.workers < 0 or self.patience <= 0 or self.timeout <= 0:
            raise OptionError(
                f"workers={self.workers}, patience={self.patience}, timeout={self.timeout}: expected workers >= 0, "
                "patience > 0 and timeout > 0.",
                "Omit an argument to use its default.",
            )

    @property
    def is_first(self) -> bool:
        """Whether this process has the caller's inputs, and waits for the others."""
        return self.workers > 0

    @classmethod
    def of_torchrun(cls, environment: Mapping[str, str] = os.environ) -> Hosts | None:
        """Return the hosts by torchrun's environment; None outside of it, or for a single process.

        Args:
            environment: has `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`.

        Raises:
            OptionError: the variables contradict each other.
        """
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        rank, ranks, host, port = values = [environment.get(name, "") for name in names]
        if not all(values):
            return None
        if not (rank.isdigit() and ranks.isdigit() and int(rank) < int(ranks)):
            raise OptionError(
                f"RANK={rank} and WORLD_SIZE={ranks} contradict each other; expected 0 <= RANK < WORLD_SIZE.",
                "Start the processes with torchrun, which sets both.",
            )
        if int(ranks) == 1:
            return None
        return cls(f"{host}:{port}", int(ranks) - 1 if rank == "0" else 0, int(rank))


def usable_cores() -> int:
    """Return the processor cores to use: at least 2, so that reading and computing overlap, at most 8."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return min(max(allowed, 2), 8)


def parse_size(size: int | str, name: str) -> int:
    """Parse a number of bytes from an int, or from text such as "15 GB" or "57GiB" (1000s and 1024s; "15G" is "15GB").

    Raises:
        OptionError: malformed, or negative.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise OptionError(
            f"{name}={size!r} is not a size.", "Use a number of bytes, or text such as '50GB' or '14GiB'."
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def check_transfer(transfer: str, sequential: bool) -> str:
    """Return `shard_transfer` if it is valid and suits the route.

    Raises:
        OptionError: it is not or does not.
    """
    if transfer not in TRANSFERS:
        raise OptionError(
            f"shard_transfer={transfer!r} does not exist; expected one of {', '.join(map(repr, TRANSFERS))}.",
            "'auto' uses files if they fit on the disk, else streams.",
        )
    if transfer == "stream" and not sequential:
        raise OptionError(
            "shard_transfer='stream' writes no shard to the disk, but the standard route keeps all shards.",
            "Add sequential_shard_processing=True, or remove shard_transfer.",
        )
    return transfer


_LIMITS = "Example: max_memory={0: '14GB', 'cpu': '24GB'}."


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of `from_pretrained` of a wrong type that nothing else would find.

    Raises:
        OptionError: there is such an argument.
    """
    layers = arguments["cache_layers"]
    if layers is not None and layers < 0:
        raise OptionError(f"cache_layers={layers!r} is not a number of layers.", "Use 0 or more, or None.")
    expected = {"revision": (str,), "token": (str, bool), "hf_token": (str, bool), "hosts": (Hosts,)}
    for name, types in expected.items():
        value = arguments[name]
        if value is not None and not isinstance(value, types):
            names = " or ".join(listed.__name__ for listed in types)
            raise OptionError(f"The argument {name} is {harmless(repr(value), 60)}; expected {names}.")


def parse_max_memory(limits: Mapping[int | str, int | str] | None) -> Mapping[str, int] | None:
    """Convert accelerate's `max_memory` to devices as text ("cuda:0", "cpu") and sizes in bytes.

    Raises:
        OptionError: a key that is neither a GPU number, "cuda:N" nor "cpu".
    """
    if limits is None:
        return None
    if not isinstance(limits, Mapping):
        raise OptionError(
            f"max_memory={limits!r} names no device.", f"Use {{'cpu': {limits!r}}}, or {{0: {limits!r}}} for a GPU."
        )
    parsed = {}
    for key, size in limits.items():
        device = f"cuda:{key}" if isinstance(key, int) or str(key).isdigit() else str(key)
        if device != "cpu" and not re.fullmatch(r"cuda:\d+", device):
            raise OptionError(f"max_memory names the device {key!r}; expected 0, 1, … for GPUs or 'cpu'.", _LIMITS)
        parsed[device] = parse_size(size, f"max_memory[{key!r}]")
    return parsed


def parse_dtype(dtype: Any) -> str | None:
    """Return the name of a torch dtype, or of one given as text; None, for the config's own, also for "auto"."""
    name = str(dtype).removeprefix("torch.")
    return None if dtype in (None, "auto") else _DTYPES.get(name, name)


_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (SupportsIndex,),
    "int | None": (SupportsIndex, NoneType),
    "float | None": (Real, NoneType),
    "str | Sequence[str]": (str, list, tuple),
    "Mapping[str, str] | None": (Mapping, NoneType),
}
"""Annotation -> types, for arguments whose values of other types nothing else would refuse. None of them is bool."""


def arguments_checked(
    instead: Mapping[str, str] = MappingProxyType({}),
    unsuggested: Collection[str] = (),
    without_effect: Collection[str] = (),
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """A decorator that checks the names of keyword arguments, and the types of those that are numbers, texts to stop
    at, names of columns, or True or False by default.

    A TypeError says what to use instead of an unknown name. The function itself has no `**unknown`, so that type
    checkers and editors find a wrong name too. A text such as "no", which Python takes for true, is an OptionError.

    Args:
        instead: name of another library -> a sentence about what to use here.
        unsuggested: arguments that no error suggests: a typing error must not lead to one.
        without_effect: arguments that may have any value.
    """

    def decorated(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        known = inspect.signature(function).parameters
        flags = {name for name, argument in known.items() if isinstance(argument.default, bool)} - {*without_effect}

        @functools.wraps(function)
        def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            if name := next((name for name in kwargs if name not in known), None):
                near = difflib.get_close_matches(name, sorted({*known} - {*unsuggested}), n=1)
                advice = f"Did you mean {near[0]!r}?" if near else "Its documentation lists the arguments."
                raise TypeError(
                    f"{function.__name__}() got an unexpected keyword argument {name!r}. {instead.get(name, advice)}"
                )
            for name, value in (*zip(known, args, strict=False), *kwargs.items()):
                if name in flags and value not in (True, False, None):
                    raise OptionError(f"{name}={value!r} is not a truth value.", "Use True or False, without quotes.")
                expected = str(known[name].annotation)
                types = () if name in without_effect else _TYPES.get(expected, ())
                texts: Any = value if "[" in expected and isinstance(value, types) else None
                fits = not isinstance(value, bool) and all(isinstance(item, str) for item in texts or ())
                if types and not (fits and isinstance(value, types)):
                    raise OptionError(f"The argument {name} is {harmless(repr(value), 60)}; expected {expected}.")
            return function(*args, **kwargs)

        return checked

    return decorated


def expand(path: str | os.PathLike[str], name: str = "The path") -> Path:
    """Expand `~` in a path; `name` is the argument's.

    Raises:
        OptionError: it is no path, or no home folder is known.
    """
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"{name} is {harmless(repr(path), 60)}; expected a path.", "Example: '~/splits'.")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise OptionError(
            f"{str(path)!r} is not a folder: there is no such home folder.", "Use the full path of the folder."
        ) from None
