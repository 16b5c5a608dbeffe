"""Log-likelihoods and embeddings of any number of token sequences, in one pass over the weights."""

from __future__ import annotations

from rabbitllm.generation.scoring._tasks import Room, Scored, ScoredText
from rabbitllm.generation.scoring.score import score

__all__ = ["Room", "Scored", "ScoredText", "score"]
