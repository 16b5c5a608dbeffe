"""Answers prompts in a process whose memory is bounded from outside once it says that it is idle; prints the result.

python -m tests.batch_jobs.capped_child SPLIT-FOLDER OUT CACHE-MEMORY PROMPTS TOKENS NEW-TOKENS
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM

import rabbitllm
from rabbitllm.batch_jobs import answers
from rabbitllm.quant import bfloat_products


def main() -> None:
    """See above."""
    torch.set_num_threads(2)
    bfloat_products.max_rows()
    assert AutoModelForCausalLM
    assert answers
    folder, out, cache_memory = sys.argv[1:4]
    prompts, tokens, new_tokens = map(int, sys.argv[4:])
    records = [{"tokens": [3 + (11 * prompt + 7 * i) % 200 for i in range(tokens)]} for prompt in range(prompts)]
    print("idle", flush=True)
    sys.stdin.readline()
    report = rabbitllm.batch(
        folder,
        records,
        out,
        max_new_tokens=new_tokens,
        cache_memory=None if cache_memory == "any" else cache_memory,
        device="cpu",
        overwrite=True,
    )
    print(json.dumps([report.new_tokens, report.errors]), flush=True)


if __name__ == "__main__":
    main()
