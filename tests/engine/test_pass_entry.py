"""What goes into a pass, as callers of a model's forward may give it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache

from rabbitllm.engine.pass_entry import entry_of
from rabbitllm.telemetry.passes import PassInput

IDS = torch.ones(3, 7, dtype=torch.long)
CONFIG = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, num_key_value_heads=1)


def filled(cache: Any) -> Any:
    states = torch.ones(3, 1, 5, 8)
    cache.update(states, states, 0)
    return cache


@pytest.mark.parametrize(
    ("args", "kwargs", "entry"),
    [
        ((IDS,), {}, PassInput(3, 7)),
        ((), {"input_ids": IDS}, PassInput(3, 7)),
        ((), {"input_ids": None, "inputs_embeds": torch.ones(3, 7, 8)}, PassInput(3, 7)),
        ((), {"input_ids": torch.ones(3, 90), "decoder_input_ids": IDS}, PassInput(3, 7)),
        ((), {"input_ids": IDS, "logits_to_keep": 2}, PassInput(3, 7, None, 2)),
        ((), {"input_ids": IDS, "logits_to_keep": 0}, PassInput(3, 7)),  # all of them
        ((), {"input_ids": IDS, "past_key_values": DynamicCache()}, PassInput(3, 7, 0)),
        ((), {"input_ids": IDS, "past_key_values": filled(DynamicCache())}, PassInput(3, 7, 5)),
        ((), {"input_ids": IDS, "past_key_values": filled(StaticCache(CONFIG, max_cache_len=9))}, PassInput(3, 7, 5)),
        ((), {"encoder_outputs": object()}, PassInput(1, 0)),
    ],
)
def test_entries(args: tuple[Any, ...], kwargs: dict[str, Any], entry: PassInput) -> None:
    assert entry_of(args, kwargs) == (entry, kwargs.get("past_key_values"))


def test_a_cache_that_tells_no_length() -> None:
    class Silent:
        def get_seq_length(self) -> int:
            raise ValueError

    cache = Silent()
    assert entry_of((), {"input_ids": IDS, "cache_params": cache}) == (PassInput(3, 7), cache)
