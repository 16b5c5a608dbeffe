"""Tables of codes: their values, or straight lines."""

from __future__ import annotations

import math

import numba
import numpy as np
import numpy.typing as npt
import pytest
from llvmlite.binding import get_host_cpu_name

from rabbitllm.quant import _product_kernels, _vectors
from rabbitllm.quant._vectors import table_of
from rabbitllm.quant.schemes import int8_code


def test_the_4bit_table_is_its_values() -> None:
    values = np.linspace(-1, 1, 16, dtype=np.float32)
    assert np.array_equal(table(4, values), values)


def on_ramps(ramps: npt.NDArray[np.float32], code: int) -> float:
    """What a code means, by a table of slopes and starts."""
    distance = 4.0 * abs(code - 127)
    exponent = math.frexp(distance)[1] + 126 if distance else 0  # float32's own exponent
    return math.copysign(float(ramps[exponent % 8]) * distance + float(ramps[16 + exponent % 8]), code - 127)


def test_the_dynamic_map_of_bitsandbytes_is_eight_ramps() -> None:
    values = np.frombuffer(int8_code(), np.float32)
    ramps = table(8, values)
    assert ramps.shape == (32,)
    assert np.array_equal(ramps.reshape(4, 8)[::2], ramps.reshape(4, 8)[1::2])
    for code in range(256):
        assert on_ramps(ramps, code) == pytest.approx(float(values[code]), rel=3e-7, abs=0)


@pytest.mark.parametrize("code", [0, 63, 126, 128, 130, 254])  # 127 and 255 have a line to themselves
@pytest.mark.parametrize("wrong", [1.00001, -1.0, math.nan, math.inf])
def test_maps_without_ramps_have_no_table(code: int, wrong: float) -> None:
    values = np.frombuffer(int8_code(), np.float32).copy()
    values[code] *= wrong
    assert table_of("8bit", values.tobytes()) is None


def table(bits: int, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    result = table_of(f"{bits}bit", values.tobytes())
    assert result is not None
    return result


@pytest.mark.parametrize(("name", "is_zen"), [("znver3", True), ("znver5", True), ("sapphirerapids", False)])
def test_codes_pass_the_smallest_cache_on_zen_alone(name: str, is_zen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (_product_kernels.CACHES == 2) is _vectors.is_zen()
    monkeypatch.setattr(numba.config, "CPU_NAME", name)
    assert _vectors.is_zen() is is_zen
    monkeypatch.setattr(numba.config, "CPU_NAME", None)
    assert _vectors.is_zen() is get_host_cpu_name().startswith("znver")
