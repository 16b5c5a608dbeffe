"""A model for lm_eval's harness whose likelihoods are computed together: one pass over the weights for all of a task's.

lm_eval's own `HFLM` makes a pass for every batch, in which a streamed model reads all of its weights. Here everything
that it is asked for at a time goes through `rabbitllm.generation.scoring`, layer by layer, and shared prefixes of texts
are computed once. All else, as tokens and generation, is `HFLM`'s own. Knows no tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rabbitllm.errors import MissingPackageError, OptionError
from rabbitllm.generation.scoring import Room, ScoredText, score

try:
    from lm_eval.models.huggingface import HFLM
except ImportError:  # reported when the harness is used
    HFLM = object

_Answer = tuple[float, bool]


class OnePassLM(HFLM):  # type: ignore[misc]
    """What lm_eval asks.

    Args:
        model: a causal model as `AutoModel.from_pretrained` returns it; nothing else may use it meanwhile.
        tokenizer: None for the model's.
        room: what may be taken for texts between two layers, and whether they share products.
        **options: of `HFLM`.

    Raises:
        MissingPackageError: lm_eval is not installed.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, room: Room | None = None, **options: Any) -> None:
        if HFLM is object:
            raise MissingPackageError(
                "This needs the package lm_eval, which is not installed.",
                'Install it: pip install ".[ecosystem]" in a copy of the repository.',
            )
        super().__init__(pretrained=model, tokenizer=tokenizer or model.tokenizer, **options)
        self._room = room or Room()

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[_Answer]:
        """The likelihood of each continuation, and whether it is the greedy one, in the order of the requests.

        Args:
            requests: what a cache knows each by, or None; tokens of a context, and of what follows.
            disable_tqdm: show no progress.
            override_bs: of batches, of which there are none here.

        Raises:
            RabbitLLMError: a request that cannot be scored, or weights that cannot be read.
        """
        from tqdm import tqdm

        texts = [self._text(number, *tokens) for number, (_, *tokens) in enumerate(requests)]
        found: dict[int, _Answer] = {}
        shown = tqdm(
            score(self.model, texts, self._room),
            total=len(texts),
            disable=disable_tqdm or self.rank != 0,
            desc="Running loglikelihood requests",
        )
        for one in shown:
            if one.error is not None:
                raise one.error
            assert one.logprob is not None
            found[one.index] = answer = (one.logprob, bool(one.greedy))
            if (known_by := requests[one.index][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", known_by, answer)
        return [found[number] for number in range(len(requests))]

    def _text(self, number: int, context: Sequence[int], continuation: Sequence[int]) -> ScoredText:
        """Cut as `HFLM` does it: the beginning is dropped, and `max_length` tokens before the last one are kept."""
        if len(continuation) > self.max_length:
            raise OptionError(
                f"A continuation has {len(continuation):,} tokens; the harness may look at {self.max_length:,}.",
                "Give it a larger max_length, if the model's context has room for it.",
            )
        kept = (*context, *continuation)[-(self.max_length + 1) :]
        cut = len(kept) - len(continuation)
        return ScoredText(number, kept[:cut], kept[cut:])
