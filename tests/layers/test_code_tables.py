"""Tables of codes: rounded as torch rounds, with the factor that loses least."""

from __future__ import annotations

import numpy as np
import torch

from rabbitllm.layers.code_tables import PAIRS, _nearest_bfloat16, table_of


def test_rounding_to_bfloat16_is_torchs() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0])
    for found in (values, ties):
        assert torch.equal(torch.from_numpy(_nearest_bfloat16(found.numpy())), found.bfloat16().float())


def test_a_factor_loses_less_than_none() -> None:
    values = np.sort(np.random.default_rng(3).uniform(-1, 1, 16)).astype(np.float32)
    words = table_of("4bit", PAIRS, values.tobytes())
    assert len(words) == 34
    assert np.array_equal(words[:16], words[16:32])
    back = float(words[32:].view(np.float32)[0])
    with_factor = (words[:16].astype(np.uint32) << 16).view(np.float32) * back
    assert np.square(with_factor - values).sum() < 0.5 * np.square(_nearest_bfloat16(values) - values).sum()


def test_what_bfloat16_can_say_stays_as_it_is() -> None:
    values = np.linspace(-1, 1, 257, dtype=np.float32)[:256]
    words = table_of("8bit", PAIRS, values.tobytes())
    back = float(words[256:].view(np.float32)[0])
    assert np.array_equal((words[:256].astype(np.uint32) << 16).view(np.float32) * back, values)


def test_the_other_tables_are_the_values_themselves() -> None:
    values = np.linspace(-1, 1, 256, dtype=np.float32)
    assert np.array_equal(table_of("4bit", 16, values[:16].tobytes()), values[:16])
    words = table_of("8bit", 16, values.tobytes()).astype(np.uint32)
    assert np.array_equal((words[:256] << 16 | words[256:]).view(np.float32), values)
