"""Benchmarks of plans of experts: what they are made from is what they say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.even_experts import SCALES, even_prompt, make_even_checkpoint
from benchmarks.models import MODELS
from benchmarks.plan_coder_next import FOUND, PaperGpu, Tiers, disk_of, drawn_on, found, row_of, split_plan
from rabbitllm.engine.expert_finding import is_routed
from rabbitllm.splitter.disk_budget import ShardTransfer


@pytest.mark.long
def test_the_even_model_counts_up_and_uses_its_experts_alike(tmp_path: Path) -> None:
    scale, tokens = SCALES["tiny"], 100
    folder = make_even_checkpoint(tmp_path, "tiny")
    assert make_even_checkpoint(tmp_path, "tiny") == folder
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    used: dict[str, Counter[int]] = {}
    for name, module in model.named_modules():
        if is_routed(module):
            counter = used[name] = Counter[int]()
            module.register_forward_pre_hook(
                lambda module, args, counter=counter: counter.update(args[1].flatten().tolist())
            )
    prompt = torch.tensor([even_prompt("tiny", 16)])
    assert len(set(even_prompt("tiny", 16))) == 16
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False)
    assert made[0, 16:].tolist() == list(range(1, tokens + 1))
    alike = (tokens + 15) * scale.num_experts_per_tok / scale.num_experts
    assert len(used) == scale.num_hidden_layers
    for counter in used.values():
        assert max(counter.values()) < 2 * alike
        assert min(counter[expert] for expert in range(scale.num_experts)) > alike / 3


def test_on_paper_what_is_not_kept_is_copied_and_what_is_nowhere_is_read() -> None:
    model = MODELS["tiny-moe"]
    plan = split_plan(model, "4bit")
    disk = disk_of(plan)
    assert (
        plan.output_bytes
        <= disk[ShardTransfer.STREAM.value]
        < disk[ShardTransfer.FILE.value]
        <= disk[ShardTransfer.FILE_AHEAD.value]
    )
    room = 1_200_000
    machines = [Tiers(str(host), (room, room), host) for host in (0, 500_000, 1 << 30)]
    rows = [row_of(*pair) for pair in zip(machines, drawn_on(model, plan, machines), strict=True)]
    used = rows[0].copied / (1 - rows[0].on_gpus)
    for row in rows:
        assert 0 < row.on_gpus < 1
        assert row.gpu_bytes <= room
        assert row.copied == pytest.approx(used * (1 - row.on_gpus), abs=4)
        assert row.read == pytest.approx(used * (1 - row.on_gpus - row.in_host), abs=4)
        assert row.seconds["published, 1 GB/s"] <= row.seconds["alike, 1 GB/s"] <= row.seconds["alike, 0.5 GB/s"]
    assert [row.read > 0 for row in rows] == [True, True, False]
    assert rows[0].read > rows[1].read
    assert PaperGpu(1).name == "cuda:1"


def test_what_is_found_is_as_published_and_between() -> None:
    assert [found(share) for share in FOUND] == list(FOUND.values())
    assert FOUND[93 / 512] < found(0.25) < FOUND[186 / 512]
