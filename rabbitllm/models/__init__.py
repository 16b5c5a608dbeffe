"""This machine's models: pull, library, convert, inspection."""

__all__ = [
    "convert",
    "gguf_output",
    "inspection",
    "inspection_report",
    "library",
    "library_report",
    "pull",
    "remove",
    "show",
]
