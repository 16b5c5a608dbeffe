"""What proposes the tokens of a draft, one sequence at a time: the text so far, a model, or the model's own heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from transformers import DynamicCache

from rabbitllm.generation._mtp import HeadTrack
from rabbitllm.generation._rewind import Rewindable, takes_trees
from rabbitllm.generation.kv_cache import Beside
from rabbitllm.generation.transformers_api import Processors

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList

    from rabbitllm.engine.streamed_model import StreamedModel
    from rabbitllm.generation._width import Width

Draft: TypeAlias = "StreamedModel | Literal['ngram', 'mtp', 'self']"
"""A model; "ngram", the text so far; "mtp", the model's own heads; or "self", the model itself with copies of its
streamed layers at fewer bits."""
NGRAM: Literal["ngram"] = "ngram"
MTP: Literal["mtp"] = "mtp"
SELF: Literal["self"] = "self"
KINDS: tuple[Literal["ngram", "mtp", "self"], ...] = (NGRAM, MTP, SELF)
"""Drafts that have a name."""
NGRAM_LENGTH = 2
"""The most last tokens that are looked for in the text before them."""
MODEL_TOKENS = 20
"""The most tokens that a model proposes, unless its generation config has `num_assistant_tokens`."""
HEAD_TOKENS = 8
"""The same of a head that is used again for each token; several propose one token each."""
BRANCHES = 8
"""The most tokens that may follow one of a tree."""
_SHARPER = 0.7
"""The temperature of a tree's probabilities if the model takes what is most probable, of which they say too little."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow.

    Attributes:
        tokens: ids, int64 of shape (1, count).
        tree: of a tree the parent of each token, an index before it, -1 for the text; None if each follows the last.
    """

    tokens: torch.Tensor
    tree: Sequence[int] | None = None

    @property
    def count(self) -> int:
        return self.tokens.shape[1]

    @property
    def depth(self) -> int:
        """The most of its tokens that can be right."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return max(depths, default=0)

    @property
    def parents(self) -> Sequence[int]:
        """The parent of each token."""
        return range(-1, self.count - 1) if self.tree is None else self.tree


class Proposals:
    """A source of proposals for one sequence; by default it keeps nothing of it.

    Attributes:
        reads_along: whether it uses the model's own cache, so that it has read all that the model has.
    """

    reads_along = False

    def propose(self, ids: torch.Tensor, most: int) -> Proposal:
        """Propose up to `most` tokens after `ids`, int64 of shape (1, tokens). It may be none."""
        raise NotImplementedError

    def settle(self, tokens: int, path: Sequence[int]) -> None:
        """Drop all that is kept of tokens after the first `tokens`, which end with the proposed tokens of `path`."""

    def close(self, continues: bool) -> None:
        """End. What is kept stays for a later answer that goes on with the same KV cache if the answer `continues`."""

    @property
    def tokens(self) -> int:
        """Number of tokens of which it keeps something."""
        return 0

    @property
    def beside(self) -> Beside | None:
        """What it keeps of the sequence; to be copied between two passes."""
        return None


class FromText(Proposals):
    """Proposes the tokens that followed the last ones when they occurred first."""

    def propose(self, ids: torch.Tensor, most: int) -> Proposal:
        """Propose up to `most` tokens after `ids`, (1, tokens)."""
        text = ids[0]
        for length in range(min(NGRAM_LENGTH, len(text) - 1), 0, -1):
            places = (text[:-1].unfold(0, length, 1) == text[-length:]).all(dim=1).nonzero()
            if len(places):
                begin = int(places[0]) + length
                return Proposal(ids[:, begin : begin + most])
        return Proposal(ids[:, :0])


class FromModel(Proposals):
    """Proposes the tokens that a model generates, or a tree of those that are most probable.

    A tree grows by what is most probable from its root on (SpecExec, arXiv:2406.02532): a step computes what may follow
    its most probable token that was not computed yet, as far as that pays.

    Args:
        draft: the model.
        processors: change its scores as those of the model that checks them.
        config: how tokens are chosen, and which end a text.
        width: says how far a proposal goes. If the draft's generation config has `assistant_confidence_threshold`, the
            probability of the last token decides instead.
        branches: whether proposals are trees; only for a draft for which `takes_trees` holds.
        track: the draft and its cache.
        of: the model that checks the proposals, and its cache, beside which the draft's stays; None if it does not.
    """

    _usual = MODEL_TOKENS

    def __init__(
        self,
        draft: StreamedModel,
        processors: LogitsProcessorList,
        config: GenerationConfig,
        width: Width,
        branches: bool,
        track: Rewindable | HeadTrack,
        of: Rewindable | None = None,
    ) -> None:
        self._draft = draft
        self._track: Any = track
        self._of = of
        self._width = width
        self._branches = branches
        self._computed: list[int] = []
        self._device = draft.device
        self._processors = Processors(processors)
        self._samples = config.do_sample and not branches
        self._temperature = 1.0 if config.do_sample else _SHARPER
        ends = config.eos_token_id
        self._ends = {ends} if isinstance(ends, int) else {*(ends or ())}
        own = draft.generation_config
        self._most = own.num_assistant_tokens or self._usual
        threshold = own.assistant_confidence_threshold
        self._goes_on = width.goes_on if threshold is None else float(threshold).__le__
        self._deepens = width.deepens if threshold is None else lambda right, depth: right >= threshold

    def propose(self, ids: torch.Tensor, most: int) -> Proposal:
        """Propose up to `most` tokens after `ids`, (1, tokens)."""
        count = min(most, self._most)
        if count < 1:
            return Proposal(ids[:, :0])
        device, ids = ids.device, ids.to(self._device)
        grow = self._tree if self._branches and self._track.tokens else self._chain
        proposal = grow(ids, self._begin(ids), count)
        return replace(proposal, tokens=proposal.tokens.to(device))

    def _begin(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute what the cache lacks of the known tokens; return the logits of the last one, (1, vocabulary)."""
        logits: torch.Tensor = self._track.logits(ids, 1)
        self._track.mark()
        return logits

    def _chain(self, ids: torch.Tensor, logits: torch.Tensor, count: int) -> Proposal:
        known, device = ids.shape[1], self._device
        # a token is drawn with the random numbers with which the model will draw it, so most are the same
        with torch.random.fork_rng([] if device.type == "cpu" else [device], enabled=self._samples):
            while True:
                probabilities = self._processors(ids, logits).softmax(dim=-1)
                most = probabilities.argmax(dim=-1, keepdim=True)
                token = torch.multinomial(probabilities, 1) if self._samples else most
                ids = torch.cat((ids, token), dim=1)
                is_sure = self._goes_on(float(probabilities[0, token[0, 0]]))
                if ids.shape[1] - known == count or not is_sure or int(token) in self._ends:
                    return Proposal(ids[:, known:])
                logits = self._track.logits(ids, 1)

    def _tree(self, ids: torch.Tensor, logits: torch.Tensor, most: int) -> Proposal:
        nodes: list[_TreeToken] = []  # without the root, the most probable first: each after its parent
        computed: list[_TreeToken] = []
        last = _TreeToken(1.0, -1, None)
        while True:
            path = torch.cat((ids, ids.new_tensor([last.tokens()])), dim=1)
            scores = self._processors(path, logits)[0] / self._temperature
            best = scores.softmax(dim=-1).topk(min(BRANCHES, logits.shape[-1]))
            for probability, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                if probability:  # processors exclude tokens
                    nodes.append(_TreeToken(last.probability * probability, token, last))
            nodes.sort(key=lambda node: -node.probability)
            nodes = nodes[: self._width.worth([node.probability for node in nodes])]
            inner = (node for node in nodes if node.depth < most and node.token not in self._ends)
            following = next((node for node in inner if node not in computed), None)
            if following is None or len(computed) == self._most:
                break
            last = following
            if not self._deepens(last.probability, last.depth):
                break
            computed.append(last)
            rows = torch.cat((ids, ids.new_tensor([[node.token for node in computed]])), dim=1)
            logits = self._track.logits(rows, 1, _places([node.parent for node in computed], computed))
        self._computed = _places(computed, nodes)
        parents = _places([node.parent for node in nodes], nodes)
        return Proposal(ids.new_tensor([[node.token for node in nodes]]), tree=parents)

    def settle(self, tokens: int, path: Sequence[int]) -> None:
        """Drop all that is kept of tokens after the first `tokens`, which end with the proposed tokens of `path`."""
        if not self._computed:
            self._track.settle(tokens)
            return
        rows = [self._computed.index(index) for index in path if index in self._computed]
        self._track.settle(tokens - len(path) + len(rows), rows, len(self._computed))
        self._computed = []

    def close(self, continues: bool) -> None:
        """Keep the cache beside the model's if the answer `continues`."""
        if continues and self._of is not None and isinstance(self._of.cache, DynamicCache):
            self._of.cache.beside = self.beside

    @property
    def tokens(self) -> int:
        """Number of tokens in its cache."""
        return int(self._track.tokens)

    @property
    def beside(self) -> Beside | None:
        """Its cache; to be copied between two passes."""
        beside: Beside = self._track.beside
        return beside


class _TreeToken:
    """A token of a tree.

    Attributes:
        probability: of the path from the text to it.
        token: its id; the root has none.
        parent: the token before it.
        depth: number of tokens of the path.
    """

    __slots__ = ("depth", "parent", "probability", "token")

    def __init__(self, probability: float, token: int, parent: _TreeToken | None) -> None:
        self.probability = probability
        self.token = token
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1

    def tokens(self) -> list[int]:
        """The path from the text to it."""
        return [] if self.parent is None else [*self.parent.tokens(), self.token]


def _places(nodes: Sequence[_TreeToken | None], among: Sequence[_TreeToken]) -> list[int]:
    """The index of each node among others; -1 if it is none of them."""
    places = {id(node): index for index, node in enumerate(among)}
    return [places.get(id(node), -1) for node in nodes]


class FromItself(FromModel):
    """Proposes the tokens that a streamed model generates with the copies of its streamed layers, in its own cache.

    All that it computes is dropped before the pass that checks the tokens: that has all bits. For the arguments see
    `FromModel`; `track` is the one of that pass.
    """

    reads_along = True

    def propose(self, ids: torch.Tensor, most: int) -> Proposal:
        """Propose up to `most` tokens after `ids`, (1, tokens), of which the cache has all but the last few."""
        if most < 1:
            return Proposal(ids[:, :0])
        begin = self._track.tokens
        try:
            with self._draft.streamer.drafting():
                return super().propose(ids, most)
        finally:
            self._track.settle(begin)

    def _begin(self, ids: torch.Tensor) -> torch.Tensor:
        """The same, but the cache goes back to what it is now."""
        self._track.mark()
        logits: torch.Tensor = self._track.logits(ids, 1)
        return logits

    def settle(self, tokens: int, path: Sequence[int]) -> None:
        """Nothing is kept."""

    @property
    def beside(self) -> None:
        """Nothing is kept."""


class FromHead(FromModel):
    """Proposes the tokens that the model's own heads predict: `draft` is the model itself, `track` is of its heads."""

    _usual = HEAD_TOKENS

    def propose(self, ids: torch.Tensor, most: int) -> Proposal:
        """Propose up to `most` tokens after `ids`, (1, tokens); none before the model's first pass."""
        heads = self._draft.heads
        assert heads is not None
        most = most if heads.count == 1 else min(most, heads.count)
        return super().propose(ids, most if self._track.is_ready(ids) else 0)

    def close(self, continues: bool) -> None:
        """Take no more hidden states."""
        self._track.close()
        super().close(continues)


def _earlier(of: Rewindable) -> Beside | None:
    """What an earlier draft has left beside a model's KV cache."""
    return vars(of.cache).pop("beside", None) if isinstance(of.cache, DynamicCache) else None


def proposals_of(
    draft: Draft,
    model: StreamedModel,
    track: Rewindable,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    width: Width,
    *,
    trees: bool = True,
) -> Proposals:
    """Return the proposals of a draft for one answer; for the arguments see `FromModel`.

    Args:
        draft: the draft, after `prepare_draft`.
        model, track: the model that checks them, and its cache.
        processors, config, width: see `FromModel`.
        trees: whether they may be trees.
    """
    if draft == NGRAM:
        return FromText()
    if draft == MTP:
        heads = HeadTrack(model, track.cache)
        heads.resume(_earlier(track), track.tokens)
        return FromHead(model, processors, config, width, False, heads, track)
    trees = trees and takes_trees(model)
    if draft == SELF:
        return FromItself(model, processors, config, width, trees, track)
    own = Rewindable.after(_earlier(track), draft, track.tokens)
    return FromModel(draft, processors, config, width, trees and takes_trees(draft), own, track)
