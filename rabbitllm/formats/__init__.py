"""One file format each: bytes in, tensor specs out. Independent of models, layers and devices."""

__all__ = [
    "bounded",
    "gguf",
    "gguf_types",
    "media_file",
    "pickle_reader",
    "safetensors_file",
    "sentencepiece_model",
    "shard_header",
    "tensor_spec",
    "tiktoken_ranks",
    "torch_file",
]
