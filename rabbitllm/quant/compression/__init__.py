"""Compression of tensors: their stored form, quantization block by block, and dequantization.

The only room that quantizes with bitsandbytes. `keys.py` has the stored keys, `schemes.py` the choice of tensors to
compress, `forms.py` their stored parts, `states.py` bitsandbytes' JSON; the arithmetic is in `quantize.py`, `nested.py`
(scales that are quantized themselves) and `way_back.py`. Reads and writes no files.
"""

from rabbitllm.quant.compression.forms import (
    Settling,
    StoredForm,
    arriving,
    code_values,
    constants,
    form_in,
    settling,
    stored_form,
)
from rabbitllm.quant.compression.keys import NF4_STATE, part_names, schemes, state_key
from rabbitllm.quant.compression.nested import (
    expand_scales,
    expanded_bytes,
    mean_of,
    scales_at,
    settled,
)
from rabbitllm.quant.compression.quantize import quantize_blocks
from rabbitllm.quant.compression.schemes import (
    BLOCKS,
    CODES,
    CODES_A_BYTE,
    COMPRESSIONS,
    DOUBLE,
    INT8_BLOCK,
    MAX_ROUTER_ROWS,
    MIN_ELEMENTS,
    NESTED_BLOCK,
    NF4_BLOCK,
    SCALE_BYTES,
    check_compression,
    check_fitting,
    is_compressible,
    scheme_of,
)
from rabbitllm.quant.compression.states import Quantized, nested_state, read_state
from rabbitllm.quant.compression.way_back import dequantize, multiply_4bit, operands

__all__ = [
    "BLOCKS",
    "CODES",
    "CODES_A_BYTE",
    "COMPRESSIONS",
    "DOUBLE",
    "INT8_BLOCK",
    "MAX_ROUTER_ROWS",
    "MIN_ELEMENTS",
    "NESTED_BLOCK",
    "NF4_BLOCK",
    "NF4_STATE",
    "SCALE_BYTES",
    "Quantized",
    "Settling",
    "StoredForm",
    "arriving",
    "check_compression",
    "check_fitting",
    "code_values",
    "constants",
    "dequantize",
    "expand_scales",
    "expanded_bytes",
    "form_in",
    "is_compressible",
    "mean_of",
    "multiply_4bit",
    "nested_state",
    "operands",
    "part_names",
    "quantize_blocks",
    "read_state",
    "scales_at",
    "scheme_of",
    "schemes",
    "settled",
    "settling",
    "state_key",
    "stored_form",
]
