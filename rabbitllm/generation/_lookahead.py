"""Drafts in shared passes: tokens that may or must follow in a sequence are further rows of its next pass.

`generate` asks for one token at a time, and knows nothing of drafts. A pass computes logits after the sequence's token
and after each drafted one. As long as `generate` itself chooses the drafted tokens, its next calls are answered from
these logits, without a pass. At the first other token the KV cache goes back to the tokens that `generate` has given to
the model; if it has states, to what it was before the pass, and the next pass computes these tokens again. So each
token is chosen as without drafts, with the same processors and random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rabbitllm.generation.kv_cache import Beside, CacheCost
from rabbitllm.telemetry.passes import Drafts

if TYPE_CHECKING:
    from rabbitllm.generation._packed_batch import PackedSequence
    from rabbitllm.generation._proposals import Proposals
    from rabbitllm.generation._rewind import Rewindable
    from rabbitllm.generation._width import Width
    from rabbitllm.generation.grammar import GrammarState
    from rabbitllm.generation.request import BatchStats


class Lookahead:
    """The drafts of one running sequence.

    Args:
        stats: totals, of which it raises the drafted and the accepted tokens.
        track: the model and the sequence's KV cache.
        ids: returns all tokens of the sequence.
        width: says how many tokens are drafted; None for none.
        begin: makes the source of proposals.
        cost: what the source keeps of a token.
        closed: called with `width` at the end.
        grammar: the state of the sequence's grammar: what it forces comes before what is drafted.

    Attributes:
        tokens: forced and drafted for the next pass.
        lacks: tokens that the KV cache lacks of those that `generate` has given to the model; the next pass has them.
        is_computing: whether it calls the model itself.
        seconds: that the last draft took.
    """

    def __init__(
        self,
        stats: BatchStats,
        track: Rewindable,
        ids: Callable[[], Sequence[int]],
        width: Width | None,
        begin: Callable[[], Proposals],
        cost: CacheCost,
        closed: Callable[[Width], object],
        grammar: GrammarState | None = None,
    ) -> None:
        self.tokens: tuple[int, ...] = ()
        self.lacks = 0
        self.is_computing = False
        self.seconds = 0.0
        self._stats = stats
        self._track, self._ids = track, ids
        self._width = width
        self._begin, self._proposals = begin, begin()
        self._cost = cost
        self._closed = closed
        self._grammar = grammar
        self._forced: list[int] = []  # for the next pass
        self._known = 0  # of `_computed`, how many were forced
        self._wanted: int | None = None  # for the next pass; None if it was not asked
        # tokens of the text that the source has not read, and that it has
        self._unread, self._seen = 0, self._proposals.tokens
        self._computed: tuple[int, ...] = ()  # drafted for the last pass
        self._accepted = 0
        self._output: Any = None  # of the last pass, while some of its logits may be used

    @property
    def steps(self) -> int:
        """Steps of the last draft."""
        return max(len(self.tokens) - len(self._forced), 1)

    @property
    def nbytes(self) -> int:
        """Bytes of what the source keeps; may be read from any thread."""
        return self._cost.bytes_for(self._proposals.tokens) if self._proposals.tokens else 0

    @property
    def beside(self) -> Beside | None:
        """What the source keeps of the sequence; to be copied between two passes."""
        return self._proposals.beside

    @property
    def takes_prompts(self) -> bool:
        """Whether the last pass of a prompt may have further rows: if the KV cache goes back at no cost."""
        return self._track.keeps_every_token

    def bytes_for(self, tokens: int) -> int:
        """Bytes that the source keeps of a sequence of this length."""
        return self._cost.bytes_for(tokens) if self._cost.every_token else 0

    def choose(self, ids: Sequence[int], most: int, rows: int, sequences: int, *, drafts: bool) -> int:
        """How many tokens, forced ones included, to draft for the next pass, at most `most`.

        Args:
            ids: the tokens of the sequence.
            rows, sequences: of the pass, without drafts.
            drafts: whether tokens that may be wrong pay.
        """
        self._forced = self._grammar.rows(ids)[:most] if self._grammar is not None else []
        if self._width is None or not drafts:
            return len(self._forced)
        self._unread = 0 if self._proposals.reads_along else len(ids) - self._seen
        self._wanted = self._width.choose(most - len(self._forced), self._unread, rows, sequences)
        return len(self._forced) + self._wanted

    def propose(self, ids: Sequence[int], most: int, reader: Lookahead | None = None, shared: int = 0) -> None:
        """Draft up to `most` tokens after `ids`, as `choose` has said.

        If `reader` has the same first `shared` tokens, with a copy of what its source has read of them.
        """
        beside = None if reader is None or reader.beside is None else reader.beside.copied(shared)
        if beside is not None:
            self._track.cache.beside, self._track.tokens = beside, shared  # a pass sets this again
            self._proposals = self._begin()
            self._unread -= self._proposals.tokens
        forced = self._forced
        self.tokens = tuple(forced)  # also if the source fails
        if most == len(forced):
            return
        self._seen, after = len(ids), [*ids, *forced]
        self._track.tokens = self._track.cache.get_seq_length()
        drafted = self._proposals.propose(torch.tensor([after]), most - len(forced)).tokens[0].tolist()
        if self._grammar is not None:
            drafted = drafted[: self._grammar.valid(after, drafted)]
        self.tokens = (*forced, *drafted)

    def forget(self) -> None:
        """Free what the source keeps; it begins anew with the next draft."""
        self._proposals.close(continues=False)
        self._proposals = self._begin()
        self._seen, self.tokens = 0, tuple(self._forced)

    @property
    def was_checked(self) -> bool:
        """Whether the pass that is over has checked a draft."""
        return len(self._computed) > self._known

    def learn(self, rows: int) -> Drafts:
        """Take in the pass of so many rows that is over; return what its draft brought."""
        self._proposals.settle(len(self._ids()) - 1, ())
        brought = Drafts()
        if self._wanted is not None and self._width is not None:
            drafted, right = len(self._computed) - self._known, max(self._accepted - self._known, 0)
            self._width.learn(self._wanted, drafted, right, rows=rows, draft_seconds=self.seconds, lacks=self._unread)
            hits = (1,) * right + (0,) * (right < drafted)
            brought = Drafts(1, right + 1, (1,) * len(hits), hits, self.seconds, self.seconds)
        self._wanted, self._computed, self._known, self.seconds = None, (), 0, 0.0
        return brought

    def close(self) -> None:
        """End, as the sequence does, or until it goes on; what the source keeps stays beside the KV cache."""
        self._proposals.close(continues=True)
        if self._width is not None:
            self._closed(self._width)

    # in a pass -------------------------------------------------------------------------------------------------------

    def widened(self, sequence: PackedSequence) -> PackedSequence:
        """The sequence's rows in a packed pass, with those of the draft."""
        if not self.tokens:
            return sequence
        self._mark()
        ids, positions, count = sequence.ids, sequence.positions, len(self.tokens)
        after = torch.arange(1, count + 1, device=positions.device, dtype=positions.dtype)
        return replace(
            sequence,
            ids=torch.cat((ids, torch.tensor([self.tokens], device=ids.device)), dim=1),
            positions=torch.cat((positions, positions[..., -1:] + after), dim=-1),
            logits=sequence.logits + count,
        )

    # in the sequence's coroutine -------------------------------------------------------------------------------------

    def first(self, output: Any) -> Any:
        """The output of a pass as it would be without a draft.

        Args:
            output: of the pass; None if the sequence was not packed, and has to compute it.
        """
        self._computed, self.tokens, self._accepted = self.tokens, (), 0
        self._known, self._forced = len(self._forced), []
        if output is None and (self._computed or self.lacks):
            output = self._compute()
        if not self._computed:
            return output
        self._track.tokens = self._track.cache.get_seq_length()
        self._output = output
        self._stats.drafted_tokens += len(self._computed) - self._known
        return self._row()

    def _mark(self) -> None:
        self._track.tokens = self._track.cache.get_seq_length()
        if self.tokens or self._computed:
            self._track.mark()

    def _compute(self) -> Any:
        """Compute the tokens that the KV cache lacks, with those of the draft."""
        self._mark()
        ids = torch.tensor([[*self._ids(), *self._computed]], device=self._track.device)
        self.is_computing, self.lacks = True, 0
        try:
            return self._track.output(ids, len(self._computed) + 1)
        finally:
            self.is_computing = False

    def known(self, kwargs: Mapping[str, Any]) -> Any:
        """The output of a call of the model, if the last pass has computed it; else None, and the draft is over."""
        if self._output is None:
            return None
        if self._accepted < len(self._computed) and int(kwargs["input_ids"]) == self._computed[self._accepted]:
            self._accepted += 1
            if self._accepted > self._known:
                self._stats.accepted_tokens += 1
            elif self._grammar is not None:
                self._grammar.saved += 1
            return self._row()
        self.end()
        return None

    def end(self) -> None:
        """Let the KV cache go back to the tokens that `generate` has given to the model, or before them."""
        if self._output is None:
            return
        self._output = None
        given = self._track.tokens - len(self._computed) + self._accepted
        self._track.settle(given)
        self.lacks = given - self._track.tokens

    def _row(self) -> Any:
        """The output after the token of the sequence and the accepted ones."""
        end = self._output.logits.shape[1] - len(self._computed) + self._accepted
        return type(self._output)(**{**self._output, "logits": self._output.logits[:, end - 1 : end]})
