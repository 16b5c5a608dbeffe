"""llama.cpp's own quantisers, called on single matrices: ggml's base library, from llama-cpp-python's source package.

A file that llama-quantize writes holds these bytes. Which type a matrix gets is `src/llama-quant.cpp`'s decision, told
here for dense Qwen3s and Llamas and three presets (0.3.36): the output layer gets Q6_K beside 4-bit types; in Q4_K_M
half of the value and down projections do; and where rows are no multiple of 256, Q4_K becomes Q5_0 and Q6_K Q8_0.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

from benchmarks.llama_server import built

PRESETS = ("Q4_0", "Q4_K_M", "Q8_0")
_FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
_BLOCK = 256


def library(work: Path) -> Path:
    """`libggml-base.so`, built unless an earlier run did.

    Raises:
        PeerError: it cannot be built here.
    """
    return built(work, "ggml-base", "libggml-base.so", ("-DBUILD_SHARED_LIBS=ON",))


def type_of(preset: str, name: str, columns: int, layers: int) -> str:
    """The type that a matrix of a checkpoint gets.

    Args:
        preset: one of `PRESETS`.
        name: the tensor's, as transformers calls it.
        columns: of the matrix.
        layers: of the model.
    """
    if preset == "Q8_0":
        return preset
    chosen = "Q4_K" if preset == "Q4_K_M" else preset
    layer = re.search(r"\.layers\.(\d+)\.", name)
    more = preset == "Q4_K_M" and layer is not None and _gets_more(int(layer[1]), layers)
    if name == "lm_head.weight" or (more and name.endswith(("v_proj.weight", "down_proj.weight"))):
        chosen = "Q6_K"
    return _FALLBACK[chosen] if chosen in _FALLBACK and columns % _BLOCK else chosen


def _gets_more(layer: int, layers: int) -> bool:
    """`use_more_bits`: the first and the last eighth, and every third of those between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


class Quantiser:
    """Quantises by the library, and makes matrices of the bytes again by the `gguf` package.

    Args:
        path: see `library`.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        chunk = self._library.ggml_quantize_chunk
        chunk.restype = ctypes.c_size_t
        pointer, whole = ctypes.c_void_p, ctypes.c_int64
        chunk.argtypes = [ctypes.c_int, pointer, pointer, whole, whole, whole, pointer]

    def there_and_back(self, matrix: Any, kind: str) -> tuple[Any, int]:
        """A matrix after a trip through a type, and how many bytes it was meanwhile.

        Args:
            matrix: (rows, columns) float32 array of numpy, contiguous.
            kind: as `type_of` gives it.
        """
        import gguf
        import numpy

        chosen = gguf.GGMLQuantizationType[kind]
        elements, nbytes = gguf.GGML_QUANT_SIZES[chosen]
        rows, columns = matrix.shape
        packed = numpy.empty((rows, columns // elements * nbytes), dtype=numpy.uint8)
        written = self._library.ggml_quantize_chunk(
            int(chosen), matrix.ctypes.data, packed.ctypes.data, 0, rows, columns, None
        )
        if written != packed.nbytes:
            raise ValueError(f"{kind} took {written:,} bytes, not {packed.nbytes:,}")
        return gguf.quants.dequantize(packed, chosen), packed.nbytes
