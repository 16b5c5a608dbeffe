"""Drafts in packed passes: tokens that may follow in a sequence are further rows of its next pass.

`generate` asks for one token at a time, and knows nothing of drafts. A pass computes logits after the sequence's token
and after each drafted one. As long as `generate` itself chooses the drafted tokens, its next calls are answered from
these logits, without a pass. At the first other token the KV cache is cut to the tokens that `generate` has given to
the model. So each token is chosen as without drafts, with the same processors and random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rabbitllm.generation._proposals import FromText
from rabbitllm.generation.kv_cache import CACHE_ARGUMENT, drop_last, record_past

if TYPE_CHECKING:
    from rabbitllm.generation._packed_batch import PackedSequence
    from rabbitllm.generation.request import BatchStats

FIRST_TOKENS = 4
"""Tokens of the first draft of a sequence."""
MOST_TOKENS = 10
"""The most tokens of a draft."""
LONGEST = 3
"""The most last tokens that must have occurred before."""
MOST_PASSES = 7
"""The most passes without a draft after drafts whose first token was wrong."""


class Lookahead:
    """The drafts of one running sequence.

    A draft has about twice as many tokens as were right in the last one. The more drafts in succession were wrong from
    the first token on, the more tokens must have occurred before, and the longer the sequence goes without.

    Args:
        stats: totals, of which it raises the drafted and the accepted tokens.

    Attributes:
        tokens: drafted for the next pass.
    """

    def __init__(self, stats: BatchStats) -> None:
        self.tokens: tuple[int, ...] = ()
        self._stats = stats
        self._proposals = FromText(LONGEST)
        self._most = FIRST_TOKENS
        self._rest = self._left = 0
        self._computed: tuple[int, ...] = ()  # drafted for the last pass
        self._accepted = 0
        self._output: Any = None  # of the last pass, while some of its logits may be used

    def propose(self, ids: Sequence[int], most: int) -> int:
        """Draft up to `most` tokens after `ids` for the next pass; returns their number."""
        if self._left:
            self._left -= 1
        elif most > 0:
            proposal = self._proposals.propose(torch.tensor([ids]), min(most, self._most))
            self.tokens = tuple(proposal.tokens[0].tolist())
        return len(self.tokens)

    # in a pass -------------------------------------------------------------------------------------------------------

    def widened(self, sequence: PackedSequence) -> PackedSequence:
        """The sequence's rows in a packed pass, with those of the draft."""
        if not self.tokens:
            return sequence
        record_past(sequence.cache)
        ids, positions, count = sequence.ids, sequence.positions, len(self.tokens)
        after = torch.arange(1, count + 1, device=positions.device, dtype=positions.dtype)
        return replace(
            sequence,
            ids=torch.cat((ids, torch.tensor([self.tokens], device=ids.device)), dim=1),
            positions=torch.cat((positions, positions[..., -1:] + after), dim=-1),
            logits=sequence.logits + count,
        )

    # in the sequence's coroutine -------------------------------------------------------------------------------------

    def first(self, output: Any, kwargs: Mapping[str, Any]) -> Any:
        """The output of a pass as it would be without a draft.

        Args:
            output: of the pass; None if the sequence was not packed, and so had no draft.
            kwargs: of the model's call.
        """
        self._computed, self.tokens = self.tokens, ()
        if not self._computed:
            return output
        if output is None:
            drop_last(kwargs[CACHE_ARGUMENT], 0)
            return None
        self._output, self._accepted = output, 0
        self._stats.drafted_tokens += len(self._computed)
        return self._row()

    def known(self, kwargs: Mapping[str, Any]) -> Any:
        """The output of a call of the model, if the last pass has computed it; else None, and the draft is over."""
        if self._output is None:
            return None
        if self._accepted < len(self._computed) and int(kwargs["input_ids"]) == self._computed[self._accepted]:
            self._accepted += 1
            self._stats.accepted_tokens += 1
            return self._row()
        self.end()
        return None

    def end(self) -> None:
        """Cut the KV cache to the tokens that `generate` has given to the model."""
        if self._output is None:
            return
        cache, self._output = self._output[CACHE_ARGUMENT], None
        drop_last(cache, len(self._computed) - self._accepted)
        self._most = min(2 * self._accepted + 1, MOST_TOKENS)
        self._left = self._rest = 0 if self._accepted else min(2 * self._rest + 1, MOST_PASSES)
        self._proposals.least = 1 if self._accepted else min(self._proposals.least + 1, LONGEST)

    def _row(self) -> Any:
        """The output after the token of the sequence and the accepted ones."""
        end = self._output.logits.shape[1] - len(self._computed) + self._accepted
        return type(self._output)(**{**self._output, "logits": self._output.logits[:, end - 1 : end]})
