"""`rabbitllm verify`: check the integrity of a split directory, and advise or repair."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from rabbitllm.base.terminal import size
from rabbitllm.cli.arguments import FolderOption, JsonOption, ModelArgument, WhichSplitOption, put_json
from rabbitllm.store.layer_store import Verification, verify
from rabbitllm.store.manifest import Manifest


def verify_command(
    model: ModelArgument,
    compression: WhichSplitOption = None,
    place: FolderOption = None,
    repair: Annotated[bool, typer.Option("--repair", help="Make damaged layers again from their shards.")] = False,
    original: Annotated[
        Path | None,
        typer.Option(
            help="With --repair: the checkpoint's folder, for a split of a folder; by default the one around it."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read every layer file of a split directory and check its checksum, shapes and tensors.

    Exits with 1 if any is damaged (and was not repaired).

    Example: rabbitllm verify Qwen/Qwen2.5-7B-Instruct --compression 4bit
    """
    from rabbitllm.base.options import expand
    from rabbitllm.models.library import of_model, one_of_model
    from rabbitllm.prepare import read_lock, repair_split

    folder, saving_path = expand(model), expand(place) if place is not None else None
    if of_model(model, compression, saving_path) or not folder.is_dir():  # else the check itself reports the problem
        folder = one_of_model(model, compression, saving_path).folder
    start = time.perf_counter()
    with read_lock(folder):
        found = _verify_and_show(folder)
    seconds = time.perf_counter() - start
    if as_json:
        put_json(_as_record(found, seconds))
    else:
        print(_report(found, seconds))
    if not found.damaged:
        return
    if not repair or found.manifest is None:
        if not as_json:
            print(_advice(found))
        raise typer.Exit(1)
    repair_split(folder, found.manifest, {damage.layer for damage in found.damaged}, original)
    left = _verify_and_show(folder).damaged
    if not as_json:
        print(f"repaired: {len(found.damaged)} layers" if not left else f"{len(left)} layers are still damaged")
    raise typer.Exit(1 if left else 0)


def _verify_and_show(folder: Path) -> Verification:
    from rabbitllm.display.split_display import shown_reading

    with shown_reading(sum(path.stat().st_size for path in folder.glob("*.safetensors"))) as tell:
        return verify(folder, tell)


def _report(found: Verification, seconds: float) -> str:
    rate = f"{size(found.nbytes)} read in {seconds:.1f} s"
    if found.manifest is None:
        head = f"{found.folder}: {found.files} layers of RabbitLLM 1.1, which wrote no checksums"
        sound = "sound as far as headers and shapes tell"
    else:
        how = found.manifest.compression or "uncompressed"
        head = f"{found.folder}: {found.files} layers, {how}, of {_source(found.manifest)}"
        sound = "sound: every checksum, shape and tensor is as written"
    if not found.damaged:
        return f"{head}\n{sound} ({rate})"
    lines = [f"  {damage.file}: {damage.problem}" for damage in found.damaged]
    return "\n".join([head, f"{len(found.damaged)} of {found.files} layers are damaged ({rate}):", *lines])


def _advice(found: Verification) -> str:
    from rabbitllm.prepare import original_around
    from rabbitllm.splitter.split import shards_for

    if found.manifest is None:
        return "To repair: split the model again, into another folder."
    layers = {damage.layer for damage in found.damaged}
    shards = shards_for(found.manifest, layers)
    of = f"{len(shards)} of {len(found.manifest.source.fingerprints)} shards"
    if found.manifest.source.kind == "hub":
        return f"To repair (fetches {of} again): rabbitllm verify {found.folder} --repair"
    if (around := original_around(found.folder, found.manifest, layers)) is not None:
        return f"To repair (reads {of} in {around}): rabbitllm verify {found.folder} --repair"
    return (
        f"To repair, if the checkpoint still has {', '.join(shards)}:\n"
        f"  rabbitllm verify {found.folder} --repair --original CHECKPOINT_FOLDER\n"
        "Otherwise split another copy of the model. Keep this folder until then: it may hold the only copy of the "
        "other layers."
    )


def _source(manifest: Manifest) -> str:
    source = manifest.source
    return f"{source.name} at {source.commit[:8]}" if source.commit else source.name


def _as_record(found: Verification, seconds: float) -> dict[str, object]:
    return {
        "folder": str(found.folder),
        "sound": not found.damaged,
        "checksums": found.manifest is not None,
        "layers": found.files,
        "bytes": found.nbytes,
        "seconds": seconds,
        "damaged": [{"file": d.file, "layer": d.layer, "problem": d.problem} for d in found.damaged],
    }
