"""Passes that are shared on GPUs, one and two, by the test device that shows what a real one hides."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from rabbitllm.base.options import StreamOptions
from rabbitllm.engine.load import load_model
from rabbitllm.generation.joint_pass import JointPasses
from tests.support.builders import VOCABULARY_SIZE, build_checkpoint
from tests.support.fake_gpu import FakeGpu, watched
from tests.support.tiny_models import plain_model, split


def generate(model: Any, ids: torch.Tensor) -> list[int]:
    ids = ids.to(model.device)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    tokens: list[int] = made[0].tolist()
    return tokens


AT_ONCE = {("llama", False, 1), ("llama", True, 2), ("gemma3", True, 1), ("gemma3", False, 2)}
"""Of each two the other half is for the long run."""


@pytest.mark.parametrize(
    ("family", "exact", "count"),
    [
        pytest.param(*way, marks=() if way in AT_ONCE else pytest.mark.long)
        for way in itertools.product(("llama", "gemma3"), (False, True), (1, 2))
    ],
)
def test_texts_on_gpus(tmp_path: Path, family: str, count: int, exact: bool) -> None:
    checkpoint = build_checkpoint(tmp_path / family, family, dtype=torch.float32)
    plain = plain_model(checkpoint, dtype=torch.float32).eval()
    split_folder = split(checkpoint)
    gpus = [FakeGpu(index) for index in range(count)]
    limits: dict[str, int] = {gpu.name: 40_000 for gpu in gpus} | {"cpu": 0}
    with watched(), torch.no_grad():
        options = StreamOptions(max_memory=limits, show_progress=False, dtype="float32", exact=True)
        model = load_model(split_folder, options, None, gpus)
        assert model.placement.uploaded_bytes > 0
        passes = JointPasses(model, exact=exact)
        prompts = [
            torch.randint(3, VOCABULARY_SIZE, (1, 4 + 9 * n), generator=torch.Generator().manual_seed(n))
            for n in range(4)
        ]
        made: dict[int, list[int]] = {}

        def work(number: int) -> None:
            made[number] = generate(model, prompts[number])

        members = [passes.add(lambda number=number: work(number)) for number in range(len(prompts))]  # type: ignore[misc]
        count_before = sum(gpu.uploads for gpu in gpus)
        rounds = 0
        while passes.members:
            passes.run(passes.members)
            rounds += 1
        passes.close()
        uploads = sum(gpu.uploads for gpu in gpus) - count_before
    assert [member.error for member in members] == [None] * 4
    assert made == {number: generate(plain, ids) for number, ids in enumerate(prompts)}
    assert uploads <= (rounds + 1) * len(model.placement.units)  # once a pass, not once a text
