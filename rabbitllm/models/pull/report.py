"""The final report of `rabbitllm pull`: locations, sizes, and the next command. Decides nothing."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.text import Text

from rabbitllm.base.terminal import counted, put, put_fact, size, size_rounded_up
from rabbitllm.models.pull.make import DryRun, Pulled, Shards, Wish
from rabbitllm.splitter.split_estimate import STANDARD


def show_pulled(pulled: Pulled, wish: Wish, console: Console) -> None:
    """Print the outcome."""
    entry = pulled.entry
    how = entry.compression or "uncompressed"
    state = "is ready; it was whole already" if pulled.before else "is ready"
    put(console, Text(f"{pulled.name}, {how}, {state}", "bold green"))
    put_fact(console, "layers", f"{entry.layers}, {size(entry.nbytes)} in {entry.folder}")
    if (said := _of_the_original(pulled)) is not None:
        put_fact(console, "original", said)
    if not pulled.before:
        put_fact(console, "time", f"{pulled.seconds:.1f} s, at most {size(pulled.peak_disk_bytes)} in the folder")
    put_fact(console, "next", next_command(pulled, wish))


def _of_the_original(pulled: Pulled) -> str | None:
    match pulled.shards:
        case Shards.KEPT:
            return f"kept, in {pulled.shards_at}"
        case Shards.FETCHED:
            return "on the hub; the shards that were fetched for this are not kept"
        case Shards.DELETED:
            return "its shards are gone: these layer files are the only copy"
        case Shards.PARTLY:
            return f"some of its shards are in {pulled.shards_at}"
        case None:
            return None


def next_command(pulled: Pulled, wish: Wish) -> str:
    """The command that runs this model."""
    return shlex.join(["rabbitllm", "run", *model_words(pulled.name, wish)]) + ' "What is a rabbit?"'


def model_words(name: str, wish: Wish) -> list[str]:
    """The arguments that name a model and this split of it."""
    words = [name]
    if wish.compression is not None:
        words += ["--compression", wish.compression]
    if wish.folder is not None:
        words += ["--dir", str(wish.folder)]
    if wish.access.revision is not None:
        words += ["--revision", wish.access.revision]
    return words


def show_dry_run(found: DryRun, wish: Wish, console: Console) -> None:
    """Print the plan, and whether it fits."""
    outlook, how = found.outlook, found.outlook.compression or "uncompressed"
    put(console, Text(f"{found.name}, {how}", "bold"))
    if outlook.output_bytes is not None:
        put_fact(console, "layers", f"{size(outlook.output_bytes)} in {outlook.folder}")
    if outlook.state == "unfinished":
        used = f"{outlook.shards_used} of {counted(outlook.shards, 'shard')} used up"
        put_fact(console, "begun", f"{used}; pull goes on from there")
    route = found.route or (found.routes[-1] if found.routes else None)
    if route is not None:
        put_fact(console, "on the disk", f"at most {size_rounded_up(route.disk_bytes)} more than now")
        created = f"{size_rounded_up(route.created_bytes)} ({route.created_bytes:,} bytes)"
        put_fact(console, "it creates", f"at most {created}; --max-disk limits this")
        put_fact(console, "shards", _of_the_shards(found, wish))
    put(console, _verdict(found))


def _of_the_shards(found: DryRun, wish: Wish) -> str:
    if wish.sequential:
        return "each is deleted when it is used up"
    route = found.route or found.routes[-1]
    if wish.keep_shards:
        return "fetched into the hub cache, and kept"
    return "kept where they are" if route.name == STANDARD else "fetched one by one and not kept; those here stay"


def _verdict(found: DryRun) -> Text:
    if found.outlook.finished:
        return Text("It is whole already: nothing to do.", "bold green")
    if found.outlook.obstacle is not None:
        return Text(f"It cannot be split: {found.outlook.obstacle}.", "bold red")
    if found.fits:
        return Text("It fits. `rabbitllm plan` says how long it takes.", "bold green")
    if not found.routes:
        return Text("There is no such way: `rabbitllm plan` shows those there are.", "bold red")
    lacking = found.routes[-1].lacking
    assert lacking is not None
    text = f"It does not fit: it needs {lacking.needed} at its peak; {size(lacking.have)} is {lacking.where}."
    return Text(f"{text} `rabbitllm plan` shows what would.", "bold red")
