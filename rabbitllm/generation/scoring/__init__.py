"""Log-likelihoods and embeddings of any number of token sequences, in one pass over the weights."""

from __future__ import annotations

from rabbitllm.generation.scoring.score import score
from rabbitllm.generation.scoring.tasks import Room, Scored, ScoredText

__all__ = ["Room", "Scored", "ScoredText", "score"]
