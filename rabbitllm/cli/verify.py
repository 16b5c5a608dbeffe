"""`rabbitllm verify`: check the integrity of a split directory, and advise or repair."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from rabbitllm.cli.arguments import FolderOption, JsonOption, ModelArgument, WhichSplitOption, put_json
from rabbitllm.store.layer_store import Verification, verify


def verify_command(
    model: ModelArgument,
    compression: WhichSplitOption = None,
    place: FolderOption = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Write damaged layer files again, from the original shards.")
    ] = False,
    original: Annotated[
        Path | None,
        typer.Option(help="With --repair: folder of the original checkpoint; by default the parent of the split."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check the layer files of a split, and repair damaged ones.

    Reads every layer file and checks checksum, shapes and tensors. Exits with 1 if a damaged file is left.

    Examples:
      rabbitllm verify my-checkpoint --compression 4bit
      rabbitllm verify my-checkpoint --repair
    """
    from rabbitllm.base.options import expand
    from rabbitllm.models.library import of_model, one_of_model
    from rabbitllm.models.library_report import repair_advice, verification_record, verification_text
    from rabbitllm.prepare import read_lock, repair_split

    folder, saving_path = expand(model), expand(place) if place is not None else None
    if of_model(model, compression, saving_path) or not folder.is_dir():  # else the check itself reports the problem
        folder = one_of_model(model, compression, saving_path).folder
    start = time.perf_counter()
    with read_lock(folder):
        found = _verify_and_show(folder)
    seconds = time.perf_counter() - start
    if as_json:
        put_json(verification_record(found, seconds))
    else:
        print(verification_text(found, seconds))
    if not found.damaged:
        return
    if not repair or found.manifest is None:
        if not as_json:
            print(repair_advice(found))
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
