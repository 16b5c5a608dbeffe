"""One file format each: bytes in, tensor specs out. Knows no models, no layers and no devices."""
