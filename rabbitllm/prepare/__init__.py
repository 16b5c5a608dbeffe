"""Finds the source that the user named, and finishes or makes its split directory.

Depends on the checkpoint and splitter packages; on the engine only for the check of a model and its memory for weights.
"""

from rabbitllm.prepare.acceptance import acceptance, quantize_on
from rabbitllm.prepare.config import config_folder, family_of
from rabbitllm.prepare.finding import find, folder_at
from rabbitllm.prepare.make import check_before_fetching, ensure_split, lock_source, original_around, repair_split
from rabbitllm.prepare.memory import with_memory
from rabbitllm.prepare.source import Sought, Source
from rabbitllm.prepare.weights import open_weights, whole_checkpoint
from rabbitllm.splitter.lock import read_lock

__all__ = [
    "Sought",
    "Source",
    "acceptance",
    "check_before_fetching",
    "config_folder",
    "ensure_split",
    "family_of",
    "find",
    "folder_at",
    "lock_source",
    "open_weights",
    "original_around",
    "quantize_on",
    "read_lock",
    "repair_split",
    "whole_checkpoint",
    "with_memory",
]
