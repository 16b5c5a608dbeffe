"""Split directories and models as text. Decides nothing.

Values from files are printed as plain text, never as markup.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rabbitllm.base.terminal import (
    Column,
    counted,
    harmless,
    large,
    listed,
    minute,
    put,
    put_fact,
    put_table,
    shortened,
    size,
)
from rabbitllm.checkpoints.index import gguf_label, gguf_named
from rabbitllm.models.convert import outtype_of
from rabbitllm.models.library import DAMAGED, HALF_REMOVED, UNFINISHED, WHOLE, SplitEntry
from rabbitllm.models.remove import Original, Removal
from rabbitllm.models.show import ConfigSummary, Shown
from rabbitllm.splitter import journal
from rabbitllm.store import locations
from rabbitllm.store.layer_file import LAYER_SUFFIX
from rabbitllm.store.layer_store import Verification

_COLUMNS = (
    Column("name"),
    Column("compression", rank=2),
    Column("size", right=True, rank=1),
    Column("layer files", right=True, rank=3),
    Column("state", rank=1),
    Column("commit", rank=6),
    Column("changed", rank=5),
    Column("folder", rank=4, least=20),
)
COMMIT_CHARACTERS = 8


def _label(entry: SplitEntry) -> str:
    """The state of a split in text."""
    return {WHOLE: "complete", HALF_REMOVED: "partly removed"}.get(entry.state, entry.state)


def put_entries(entries: Sequence[SplitEntry], console: Console) -> None:
    """Print a table of split directories, with problems and the sum of their sizes."""
    if not entries:
        text = "No model is split here yet. `rabbitllm pull MODEL` does it; `rabbitllm ls FOLDER` looks into a folder."
        put(console, Text(text))
        return
    left_out = put_table(console, _COLUMNS, [_row(entry) for entry in entries])
    for entry in entries:
        if (note := _note(entry)) is not None:
            put(console, Text(f"{harmless(entry.title)}: {note}", "yellow"))
    put(console, Text(f"{len(entries)} in all, {size(sum(entry.nbytes for entry in entries))}", "dim"))
    if left_out:
        put(console, Text(f"too narrow for {', '.join(left_out)}: a wider terminal or --json has them", "dim"))


def _row(entry: SplitEntry) -> list[str]:
    layers = f"{entry.layers:,}" if entry.state == WHOLE else f"{entry.layers:,} of {entry.layers_of:,}"
    return [
        harmless(entry.title),
        entry.compression or entry.gguf or "none",
        size(entry.nbytes),
        layers,
        _label(entry),
        (entry.commit or "")[:COMMIT_CHARACTERS],
        minute(entry.changed_at),
        shortened(entry.folder),
    ]


def _note(entry: SplitEntry) -> str | None:
    """Missing or damaged parts, and the command that helps."""
    if entry.state == UNFINISHED:
        remaining = entry.shards - entry.shards_used
        used = f"{entry.shards_used} of {counted(entry.shards, 'shard')} used, {remaining} to go"
        return f"{used}; to resume: {resume_command(entry)}"
    if entry.state == HALF_REMOVED:
        return f"its removal was interrupted; `rabbitllm rm {_quoted(entry.folder)}` finishes it"
    if entry.state == DAMAGED:
        return f"{harmless(entry.problem or 'damaged')}; see `rabbitllm verify {_quoted(entry.folder)}`"
    return None


def _quoted(folder: Path) -> str:
    return harmless(shlex.quote(str(folder)), 400)


def resume_command(entry: SplitEntry) -> str:
    """The command that resumes an unfinished split or repair, as far as its folder records it."""
    if (repair := journal.repair_command(entry.folder)) is not None:
        return harmless(repair, 400)
    folder, source = locations.spelled_out(entry.folder), entry.source
    around, model = folder.parent, locations.model_of(folder, entry.compression)
    is_hub = source is not None and source.kind == "hub"
    shards = source.fingerprints if source is not None else ()
    has_any = any((around / shard).is_file() for shard in shards)
    is_inside = not is_hub and (around.resolve().name == entry.name or has_any)
    place = str(around) if is_inside else entry.name if is_hub else f"PATH/TO/{entry.name}"
    if (outtype := outtype_of(around)) is not None:
        words = ["rabbitllm", "convert", place, "-o", str(around.parent), "--outtype", outtype]
        return harmless(shlex.join(words), 400)
    if model:
        place = f"{place}:{model}" if is_hub else f"{place}/{gguf_named(around, model)}"
    words = ["rabbitllm", "pull", place]
    if entry.compression is not None:
        words += ["--compression", entry.compression]
    if not is_inside and not entry.folder.is_relative_to(locations.home()):
        words += ["--dir", str(around)]
    return harmless(shlex.join(words), 400)


def put_shown(shown: Shown, console: Console) -> None:
    """Print a model."""
    put(console, Text(harmless(shown.name), "bold"))
    if shown.config is not None:
        _put_config(shown.config, shown.inside.gguf if shown.inside is not None else None, console)
    if shown.tensors is not None and shown.inside is not None:
        tensors, inside = shown.tensors, shown.inside
        kinds = ", ".join(f"{count:,} {dtype}" for dtype, count in tensors.dtypes.items())
        put_fact(console, "parameters", f"{large(tensors.parameters)} in {len(tensors.tensors):,} tensors ({kinds})")
        files = f"{size(inside.size)} in {counted(len(inside.shards), 'file')}" if inside.shards else size(inside.size)
        put_fact(console, "weights", f"{files}: {harmless(inside.format)}")
        if inside.refusal is not None:
            put_fact(console, "refused", harmless(inside.refusal.problem, 400))
    if not shown.splits:
        put_fact(console, "split", "none; `rabbitllm plan` estimates one, `rabbitllm pull` makes it")
    for entry, original in shown.splits:
        put(console, Text())
        _put_split(entry, original, console)


def _put_config(config: ConfigSummary, gguf: str | None, console: Console) -> None:
    if config.architecture is not None or config.family is not None:
        family = f" ({harmless(config.family)})" if config.family is not None and config.architecture else ""
        put_fact(console, "architecture", harmless(config.architecture or config.family or "") + family)
    if config.layers is not None:
        heads = f", {config.heads} heads" if config.heads is not None else ""
        groups = f" ({config.key_value_heads} KV heads)" if config.key_value_heads is not None else ""
        wide = f", {config.hidden_size:,} wide" if config.hidden_size is not None else ""
        put_fact(console, "layers", f"{config.layers}{wide}{heads}{groups if heads else ''}")
    if config.experts is not None:
        used = f", {config.experts_a_token} a token" if config.experts_a_token is not None else ""
        put_fact(console, "experts", f"{config.experts} a layer{used}")
    if config.context is not None:
        put_fact(console, "context", f"{config.context:,} tokens")
    if config.vocabulary is not None:
        put_fact(console, "vocabulary", f"{config.vocabulary:,} tokens")
    if config.dtype is not None:
        put_fact(console, "published in", harmless(gguf or config.dtype))
    if config.quantized is not None:
        put_fact(console, "quantized", harmless(config.quantized))


def _put_split(entry: SplitEntry, original: Original, console: Console) -> None:
    put_fact(console, "split", f"{entry.form}, {_label(entry)}, {minute(entry.changed_at)}")
    put_fact(console, "folder", harmless(str(entry.folder), 400))
    of = "" if entry.state == WHOLE else f" of {entry.layers_of:,}"
    put_fact(console, "layer files", f"{entry.layers:,}{of}; the folder has {size(entry.nbytes - entry.copies_bytes)}")
    if entry.copies_bytes:
        put_fact(console, "copies", f"{size(entry.copies_bytes)}, for --draft self")
    commit = f" at commit {entry.commit}" if entry.commit else ""
    put_fact(console, "made from", f"{harmless(entry.name)}{commit}" if not entry.legacy else "unknown (RabbitLLM 1.1)")
    put_fact(console, "original", harmless(original.where, 400))
    if (note := _note(entry)) is not None:
        put_fact(console, "note", note)


def put_removal(removal: Removal, original: Original, console: Console) -> None:
    """Print which files would be removed, and whether the original is kept."""
    entry = removal.entry
    put(console, Text(f"{harmless(entry.title)}, {entry.form}, {_label(entry)}", "bold"))
    put_fact(console, "folder", harmless(str(entry.folder), 400))
    put_fact(console, "frees", f"{size(removal.nbytes)} in {counted(len(removal.files), 'file')}")
    copies = [path.name for path in removal.files if LAYER_SUFFIX not in path.name]
    if copies:
        put_fact(console, "copies", harmless(listed(copies, 12), 400))
    stays = "stays" if original.there else "NOT FOUND"
    put_fact(console, "original", f"{stays}: {harmless(original.where, 400)}")


def verification_text(result: Verification, seconds: float) -> str:
    """The result of a verification, as text."""
    rate = f"{size(result.nbytes)} read in {seconds:.1f} s"
    if result.manifest is None:
        head = f"{result.folder}: {result.files} layer files of RabbitLLM 1.1, which wrote no checksums"
        sound = "sound, by headers and shapes; a load tells whether a tensor of the model is missing"
    else:
        source = result.manifest.source
        gguf = gguf_label(source.fingerprints, result.manifest.source_metadata)
        how = result.manifest.compression or gguf or "uncompressed"
        name = f"{source.name} at {source.commit[:8]}" if source.commit else source.name
        head = f"{result.folder}: {result.files} layer files, {how}, of {name}"
        sound = "sound: every checksum, shape and tensor matches"
    if not result.damaged:
        return f"{head}\n{sound} ({rate})"
    lines = [f"  {damage.file}: {damage.problem}" for damage in result.damaged]
    return "\n".join([head, f"{len(result.damaged)} of {result.files} layer files are damaged ({rate}):", *lines])


def repair_advice(result: Verification) -> str:
    """The command that repairs the damaged layers of a split, as text."""
    from rabbitllm.prepare import original_around
    from rabbitllm.splitter.request import shards_for

    if result.manifest is None:
        return "To repair: split the model again, into another folder."
    layers = {damage.layer for damage in result.damaged}
    shards = shards_for(result.manifest, layers)
    of = f"{len(shards)} of {len(result.manifest.source.fingerprints)} shards"
    if result.manifest.source.kind == "hub":
        return f"To repair (downloads {of} again): rabbitllm verify {_quoted(result.folder)} --repair"
    if (around := original_around(result.folder, shards)) is not None:
        return f"To repair (reads {of} in {around}): rabbitllm verify {_quoted(result.folder)} --repair"
    return (
        f"To repair, if the checkpoint still has {', '.join(shards)}:\n"
        f"  rabbitllm verify {_quoted(result.folder)} --repair --original CHECKPOINT_FOLDER\n"
        "Otherwise split another copy of the model. Keep this folder until then: it may hold the only copy of the "
        "other layers."
    )


def verification_record(result: Verification, seconds: float) -> dict[str, object]:
    """For `json.dumps`."""
    return {
        "folder": str(result.folder),
        "sound": not result.damaged,
        "checksums": result.manifest is not None,
        "layers": result.files,
        "bytes": result.nbytes,
        "seconds": seconds,
        "damaged": [{"file": d.file, "layer": d.layer, "problem": d.problem} for d in result.damaged],
    }
