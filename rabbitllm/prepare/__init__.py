"""Finds the source that the user named, and finishes or makes its split directory.

Depends on the checkpoint and splitter packages; on the engine only for the check of a model and its memory for weights.
"""

from rabbitllm.prepare._finding import (
    ModelSpec,
    SmallFiles,
    Source,
    config_folder,
    config_of,
    find,
    folder_at,
    is_complete,
    open_weights,
    refuse_half_repaired,
    split_options,
    whole_checkpoint,
)
from rabbitllm.prepare._make import (
    acceptance,
    check_finished,
    check_from_headers,
    devices_of,
    ensure_split,
    finish_repair,
    lock_source,
    original_around,
    repair_split,
    with_memory,
)
from rabbitllm.splitter.lock import read_lock

__all__ = [
    "ModelSpec",
    "SmallFiles",
    "Source",
    "acceptance",
    "check_finished",
    "check_from_headers",
    "config_folder",
    "config_of",
    "devices_of",
    "ensure_split",
    "find",
    "finish_repair",
    "folder_at",
    "is_complete",
    "lock_source",
    "open_weights",
    "original_around",
    "read_lock",
    "refuse_half_repaired",
    "repair_split",
    "split_options",
    "whole_checkpoint",
    "with_memory",
]
