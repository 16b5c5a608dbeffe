"""`rabbitllm show`: one model and its splits."""

from __future__ import annotations

from rabbitllm.cli.arguments import FolderOption, JsonOption, ModelArgument, RevisionOption, put_json


def show_command(
    model: ModelArgument,
    folder: FolderOption = None,
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a model's architecture, size and splits.

    Reads configs and headers only, of a model without a split those on the hub.

    Examples:
      rabbitllm show my-checkpoint
      rabbitllm show Qwen/Qwen2.5-7B-Instruct --json
    """
    from huggingface_hub.utils import disable_progress_bars
    from rich.console import Console

    from rabbitllm.models.library_report import put_shown
    from rabbitllm.models.show import show, shown_record

    disable_progress_bars()  # at most a config is fetched
    with Console(stderr=True).status("reading headers …"):
        found = show(model, folder, revision)
    if as_json:
        put_json(shown_record(found))
    else:
        put_shown(found, Console(highlight=False))
