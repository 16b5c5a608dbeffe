"""The names under which the parts of a compressed tensor are stored: RabbitLLM 1.1's (and AirLLM's) pattern.

- 4bit: `<name>` uint8 ((n+1)//2, 1), `<name>.4bit.absmax` float32 (blocks of 64), `<name>.4bit.quant_map`
  float32 (16), `<name>.4bit.quant_state.bitsandbytes__nf4` (the JSON bytes of bitsandbytes' packed QuantState);
- 4bit-double: the same, but `<name>.4bit.absmax` is uint8 codes, with their scales in `<name>.4bit.nested_absmax`
  float32 (blocks of 256 scales) and their values in `<name>.4bit.nested_quant_map` float32 (256); bitsandbytes' names;
- 8bit: `<name>` uint8 in the tensor's own shape, `<name>.8bit.absmax` float32 (blocks of 2048), `<name>.8bit.code`
  float32 (256).
"""

from __future__ import annotations

from collections.abc import Iterable

from rabbitllm.quant.compression.schemes import DOUBLE

NF4_STATE = ".4bit.quant_state.bitsandbytes__nf4"
INT8_SCALES = ".8bit.absmax"
NESTED_SCALES = ".4bit.nested_absmax"


def part_names(name: str, scheme: str | None) -> tuple[str, ...]:
    """The stored keys of a tensor: payload first, then its scales, then its code table."""
    if scheme == "4bit":
        return (name, f"{name}.4bit.absmax", f"{name}.4bit.quant_map", name + NF4_STATE)
    if scheme == DOUBLE:
        four = part_names(name, "4bit")
        return (*four[:3], name + NESTED_SCALES, f"{name}.4bit.nested_quant_map", four[3])
    if scheme == "8bit":
        return (name, name + INT8_SCALES, f"{name}.8bit.code")
    return (name,)


def schemes(keys: Iterable[str]) -> dict[str, str | None]:
    """The tensors of a layer file with these stored keys: tensor name -> scheme, None or one of `BLOCKS`."""
    found: dict[str, str | None] = dict.fromkeys(keys)
    for scheme, mark in (("4bit", NF4_STATE), ("8bit", INT8_SCALES)):
        for key in [key for key in found if key.endswith(mark)]:
            name = key.removesuffix(mark)
            if name in found:
                found[name] = DOUBLE if scheme == "4bit" and name + NESTED_SCALES in found else scheme
    for name, how in tuple(found.items()):
        for part in part_names(name, how)[1:]:
            found.pop(part, None)
    return found


def state_key(name: str, scheme: str | None) -> str | None:
    """The stored key of a tensor's packed QuantState; None if the scheme has none."""
    return name + NF4_STATE if scheme in ("4bit", DOUBLE) else None
