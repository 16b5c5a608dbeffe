"""A small model of a plain family, split once."""

from __future__ import annotations

from tests.support.one_tiny_model import checkpoint, plain, split_folder
from tests.support.tiny_models import one_thread

__all__ = ["checkpoint", "one_thread", "plain", "split_folder"]
