"""Llama 4's experts by routed expert: what transformers computes with all of them, with the same bits.

Llama 4 is not served by transformers' registry of expert kernels. Its own forward (`Llama4TextMoe`, modeling_llama4.py)
multiplies every token by every expert; for those that it is not routed to, the token is scaled by zero, and nothing
comes of it. Here only experts with a token are multiplied with, each by all tokens as there, since how many rows a
product has decides how it is rounded.

Knows no files and no cache: it indexes `gate_up_proj` and `down_proj`, by a number or by a tensor of numbers, and
touches nothing else of them.
"""

from __future__ import annotations

from typing import Any

import torch


def routed_forward(moe: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward of a `Llama4TextMoe`.

    Finite hidden states and weights give the bits of transformers' own forward on a CPU. (One that is infinite becomes
    NaN there in every expert; here in those that were asked.)

    Args:
        moe: the module, whose `experts` have `gate_up_proj` (experts, hidden, 2 x intermediate) and `down_proj`
            (experts, intermediate, hidden).
        hidden_states: (..., hidden).

    Returns:
        The output (tokens, hidden), and the router's logits (tokens, experts).
    """
    tokens = hidden_states.reshape(-1, moe.hidden_dim)
    scores, logits = moe.router(tokens)
    out: torch.Tensor = moe.shared_expert(tokens)
    out.add_(_routed(moe, tokens, scores))
    return out, logits


def _routed(moe: Any, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """What the routed experts make of each token, summed.

    Two terms beside zeros have the same sum in any order. More are summed as transformers does it, with all the zeros.
    """
    summed = torch.zeros_like(tokens)
    terms = tokens.new_zeros(scores.shape[1], *tokens.shape) if moe.top_k > 2 else None
    hit = torch.nonzero((scores != 0).any(0)).flatten()
    at_once = min(torch.get_num_threads(), len(hit))
    for some in torch.split(hit, at_once) if at_once else ():
        inputs = tokens * scores.t()[some].unsqueeze(-1)
        for expert, made in zip(some.tolist(), _multiplied(moe.experts, some, inputs), strict=True):
            if terms is not None:
                terms[expert] = made
            else:
                summed += made
    return summed if terms is None else terms.sum(dim=0)


def _multiplied(experts: Any, some: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Each expert's product with its own inputs, both (experts, tokens, hidden).

    Of a batch with fewer matrices than there are threads, torch spreads each over several of them, and then rounds its
    sums differently than in the batch of all experts. So the last expert is multiplied with as often as is lacking.
    """
    lacking = min(torch.get_num_threads(), experts.num_experts) - len(some)
    if len(some) == 1:  # no copy of its weights
        expert = int(some)
        gate_up = experts.gate_up_proj[expert].expand(1 + lacking, -1, -1)
        down = experts.down_proj[expert].expand(1 + lacking, -1, -1)
    else:
        padded = torch.cat([some, some[-1:].expand(lacking)])
        gate_up, down = experts.gate_up_proj[padded], experts.down_proj[padded]
    padded_inputs = torch.cat([inputs, inputs[-1:].expand(lacking, -1, -1)])
    gate, up = torch.bmm(padded_inputs, gate_up).chunk(2, dim=-1)
    return torch.bmm(up * experts.act_fn(gate), down)[: len(some)]
