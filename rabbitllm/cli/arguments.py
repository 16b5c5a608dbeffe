"""Arguments shared by several commands, and their conversion."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rabbitllm.base.options import Hosts
    from rabbitllm.models.pull import Wish


def complete_model(incomplete: str) -> list[str]:
    """Completions for a shell: models that are split here, and paths."""
    from rabbitllm.store import locations

    known = [name for name in locations.known_names() if name.lower().startswith(incomplete.lower())]
    path = Path(incomplete)
    folder, begun = (path, "") if incomplete.endswith("/") else (path.parent, path.name)
    lead = incomplete[: len(incomplete) - len(begun)]
    try:
        paths = sorted(lead + found.name + "/" * found.is_dir() for found in folder.expanduser().iterdir())
    except OSError:
        paths = []
    shown = (one for one in paths if begun.startswith(".") or not one.removeprefix(lead).startswith("."))
    return [*known, *(one for one in shown if one.startswith(incomplete))]


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A repository, a folder, a file of weights, or a split directory.",
        autocompletion=complete_model,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
FolderOption = Annotated[Path | None, typer.Option("--dir", help="Folder for the split directory.")]
MemoryOption = Annotated[
    list[str] | None, typer.Option(help="What weights may take, as cpu=24GiB or 0=14GiB; again for each device.")
]
DeviceOption = Annotated[
    str | None, typer.Option(help="cuda:N, cpu, or auto for every GPU; by default the first GPU there is.")
]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of the repository.")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")]
FastOption = Annotated[
    bool,
    typer.Option("--fast-bfloat16", help="A kernel of its own on CPUs without bfloat16: sooner, other last bits."),
]
NoVerifyOption = Annotated[
    bool, typer.Option("--no-verify-checksums", help="Do not compare what is read of layer files with its checksums.")
]
DtypeOption = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; by default that of the model.")]

# sharing of passes
ExactOption = Annotated[
    bool, typer.Option("--exact", help="Each text's rows by themselves: to the bit as if it were alone.")
]

# processes that compute a model together
WorkersOption = Annotated[
    int, typer.Option(help="How many `rabbitllm worker` compute it with this process, each a span of layers.", min=0)
]
AddressOption = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="With --workers: where they reach this process.")
]

# splitting
CompressionOption = Annotated[str, typer.Option(help="none, 8bit, 4bit, 4bit-double, or auto: chosen by tensor.")]
CompressionHereOption = Annotated[
    str | None,
    typer.Option(help="none, 8bit, 4bit, 4bit-double or auto; by default that of a split that is here, else none."),
]
WhichSplitOption = Annotated[
    str | None, typer.Option(help="Which of its splits: none, 8bit, 4bit, 4bit-double or auto.", show_default=False)
]
SequentialOption = Annotated[
    bool, typer.Option("--sequential", help="In a split, delete each shard when it is used up.")
]
NoSplitOption = Annotated[
    bool, typer.Option("--no-split", help="Out of the checkpoint's own shards; nothing is written.")
]
VerifySourceOption = Annotated[
    bool,
    typer.Option("--verify-source", help="Read the shards and compare them with recorded checksums."),
]
MaxDiskOption = Annotated[str | None, typer.Option(help="What a split may occupy, e.g. 57GiB.")]
MinFreeDiskOption = Annotated[str, typer.Option(help="What is to stay free of the disk.")]
DiskPlotOption = Annotated[
    Path | None, typer.Option(help="Draw the disk in use over time into this file (.png, .svg or .pdf).")
]

# the machines that do the work
RayOption = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help="On a Ray cluster: HOST:PORT of its head, or auto for the one here."),
]

# sampling
TemperatureOption = Annotated[float | None, typer.Option(help="Choose by chance; 0, the default, does not.")]
TopPOption = Annotated[float | None, typer.Option(help="By chance, among tokens of so much probability.")]
SeedOption = Annotated[int | None, typer.Option(help="For the same text again.")]


def compression_of(word: str) -> str | None:
    """`none` in any spelling -> None."""
    return None if word.lower() == "none" else word


def limits_of(given: list[str] | None) -> dict[int | str, int | str] | None:
    """`cpu=24GiB`, one for each device -> the argument `max_memory`.

    Raises:
        OptionError: no equals sign.
    """
    from rabbitllm.errors import OptionError

    found: dict[int | str, int | str] = {}
    for word in given or ():
        name, equals, size = word.partition("=")
        if not equals:
            raise OptionError(f"--max-memory {word} names no device.", "For example --max-memory cpu=24GiB.")
        found[int(name) if name.strip().isdigit() else name.strip()] = size.strip()
    return found or None


def wish_to_run(
    model: str,
    *,
    compression: str | None,
    folder: Path | None,
    sequential: bool,
    max_disk: str | None,
    device: str | None,
    max_memory: list[str] | None,
    no_split: bool = False,
    verify_source: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    no_verify_checksums: bool = False,
    hosts: Hosts | None = None,
) -> Wish:
    """The model to prepare, from the unconverted options of a command that runs a model.

    Without `--compression`, the compression is that of a split on this machine; with `--no-split` there is none.

    Raises:
        OptionError: a limit that names no device.
    """
    from rabbitllm.base.options import expand
    from rabbitllm.checkpoints.hub import HubAccess
    from rabbitllm.models.library import compression_here
    from rabbitllm.models.pull import Wish

    place = expand(folder) if folder is not None else None
    if compression is None:
        chosen = None if no_split else compression_here(model, place)
    else:
        chosen = compression_of(compression)
    return Wish(
        name=model,
        compression=chosen,
        folder=place,
        sequential=sequential,
        verify_source=verify_source,
        access=HubAccess(revision),
        max_disk=max_disk,
        device=device,
        max_memory=limits_of(max_memory),
        trust_remote_code=trust_remote_code,
        verify_checksums=not no_verify_checksums,
        hosts=hosts,
    )


def put_json(record: Any) -> None:
    """One object on stdout."""
    json.dump(record, sys.stdout, indent=1)
    print()
