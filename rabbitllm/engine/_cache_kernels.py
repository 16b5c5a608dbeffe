"""What the cache of experts decides for each layer of each token, as compiled code: some ten numpy calls take longer
than an expert's products."""

from __future__ import annotations

import numpy as np

from rabbitllm.base.compiling import compiled


@compiled
def use(uses, kept, tokens, experts, counts):  # type: ignore[no-untyped-def]
    """Weigh earlier uses less, and add those of experts; see `ExpertCache.use`."""
    for span in range(len(kept)):
        decay = kept[span] ** tokens
        gain = (1 - decay) / (1 - kept[span])
        for expert in range(uses.shape[1]):
            uses[span, expert] *= decay
        for i in range(len(experts)):
            uses[span, experts[i]] += gain * (counts[i] / tokens)


@compiled
def admit(uses, weights, owner, slot, begin, experts, busy, slots):  # type: ignore[no-untyped-def]
    """Give slots to experts, and write them; see `ExpertCache.admit`."""
    worth = np.zeros(uses.shape[1])
    for span in range(len(weights)):
        for expert in range(len(worth)):
            worth[expert] += uses[span, expert] * weights[span]
    of_slots = np.empty(len(owner))
    for i in range(len(owner)):
        of_slots[i] = worth[owner[i]] if owner[i] >= 0 else -1.0
    for number in busy:
        of_slots[number - begin] = np.inf
    victims, order = np.argsort(of_slots, kind="mergesort"), np.argsort(-worth[experts], kind="mergesort")
    for rank in range(min(len(order), len(victims))):
        expert, victim = experts[order[rank]], victims[rank]
        if worth[expert] < of_slots[victim]:
            break
        if owner[victim] >= 0:
            slot[owner[victim]] = -1
        owner[victim], slot[expert] = expert, begin + victim
        slots[order[rank]] = begin + victim
