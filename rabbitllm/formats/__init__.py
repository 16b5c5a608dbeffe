"""One file format each: bytes in, tensor specs out. Independent of models, layers and devices."""
