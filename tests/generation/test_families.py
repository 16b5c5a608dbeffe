"""Models of every kind answer several requests in shared passes as they answer each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.generation.batch import Batch, Limits
from rabbitllm.generation.request import Request
from tests.generation.asking import alone, asked
from tests.support.builders import FAMILIES, VOCABULARY_SIZE, build_checkpoint
from tests.support.tiny_models import plain_model, split

Open = Callable[..., tuple[Batch, Any]]
CAUSAL = sorted(name for name, family in FAMILIES.items() if not family.encoder_decoder)


def prompt(length: int, seed: int) -> tuple[int, ...]:
    drawn = torch.randint(3, VOCABULARY_SIZE, (length,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())


def every_way() -> Iterator[Any]:
    """Families, resident and streamed; at once one of the two for each by turns, and both for the first."""
    for number, family in enumerate(CAUSAL):
        for streamed in (True, False):
            later = number > 0 and streamed == bool(number % 2)
            name = f"{'streamed' if streamed else 'resident'}-{family}"
            yield pytest.param(family, streamed, id=name, marks=pytest.mark.long if later else ())


@pytest.mark.parametrize(("family", "streamed"), [*every_way()])
def test_several_requests(tmp_path: Path, open_batch: Open, family: str, streamed: bool) -> None:
    folder = build_checkpoint(tmp_path / family, family, dtype=torch.float32)
    plain = plain_model(folder, dtype=torch.float32).eval()
    batch, _ = open_batch(Limits(chunk=24), folder=split(folder), budget=100_000 if streamed else 1 << 30)
    shared = prompt(30, 0)
    requests = [Request(prompt(3 + 11 * number, number), 6 + number) for number in range(4)]
    requests += [Request(shared + prompt(6, number), 6) for number in (7, 8)]
    for one in asked(batch, requests):
        assert one.tokens == alone(plain, one.request), f"prompt of {len(one.request.prompt)}"
