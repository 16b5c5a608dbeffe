"""A scratch file that lacks scales is refused; `test_double.py` has what comes of whole ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rabbitllm.errors import IncompleteSplitError
from rabbitllm.quant.schemes import SCALE_BYTES
from rabbitllm.splitter.mover import settled_parts
from tests.support.plans import plan_of, shard_of


def test_a_scratch_file_that_ends_too_early(tmp_path: Path) -> None:
    plan = plan_of((shard_of("shard", {"model.layers.0.w": ("BF16", (512, 256))}),), "4bit-double")
    (form,) = plan.layouts["layers.0"].settles
    scales = np.random.default_rng(0).random(form.source.elements, np.float32).tobytes()
    scratch = tmp_path / "scratch"
    scratch.write_bytes(bytes(form.source.offset) + scales)
    runs = list(settled_parts(form, scratch))
    assert {part for part, _, _ in runs} == {0, 1, 2}
    scratch.write_bytes(bytes(form.source.offset) + scales[:-SCALE_BYTES])
    with pytest.raises(IncompleteSplitError, match=r"ends before the scales of 'model\.layers\.0\.w' do"):
        list(settled_parts(form, scratch))
