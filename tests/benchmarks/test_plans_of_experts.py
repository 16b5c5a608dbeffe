"""The checkpoint whose experts are used alike, by which plans are measured."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.lib.checkpoint import EVEN_SCALES, even_prompt, make_even_checkpoint
from rabbitllm.engine.expert_finding import is_routed


@pytest.mark.long
def test_the_even_model_counts_up_and_uses_its_experts_alike(tmp_path: Path) -> None:
    (scale, settings), tokens = EVEN_SCALES["tiny"], 100
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
    alike = (tokens + 15) * settings["num_experts_per_tok"] / settings["num_experts"]
    assert len(used) == scale.num_hidden_layers
    for counter in used.values():
        assert max(counter.values()) < 2 * alike
        assert min(counter[expert] for expert in range(settings["num_experts"])) > alike / 3
