"""The split directory: the interface between splitter and engine."""

__all__ = [
    "checkpoint_folder",
    "checksums",
    "layer_file",
    "layer_store",
    "locations",
    "manifest",
    "stored_form",
    "tensor_values",
]
