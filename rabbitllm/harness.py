"""A model for lm_eval's harness that computes all log-likelihoods of a task in one pass over the weights.

lm_eval's own `HFLM` makes a pass for every batch, in which a streamed model reads all of its weights. Here all requests
of a call go through `rabbitllm.generation.scoring`, layer by layer, and shared prefixes are computed once. The rest,
such as tokenization and generation, is inherited from `HFLM`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rabbitllm.errors import OptionError, missing_package
from rabbitllm.generation.scoring import Room, ScoredText, score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rabbitllm.engine.streamed_model import StreamedModel

try:
    from lm_eval.models.huggingface import HFLM
except ImportError:  # reported when the harness is used
    HFLM = object

_Answer = tuple[float, bool]


class OnePassLM(HFLM):  # type: ignore[misc]
    """An `HFLM` that scores in one pass.

    Args:
        model: a causal model as `AutoModel.from_pretrained` returns it; must not be used elsewhere meanwhile.
        tokenizer: the tokenizer; None for the model's.
        room: limits and options of scoring.
        **options: options of `HFLM`.

    Raises:
        MissingPackageError: lm_eval is not installed.
    """

    def __init__(
        self,
        model: StreamedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        room: Room | None = None,
        **options: Any,
    ) -> None:
        if HFLM is object:
            raise missing_package("This needs", "lm_eval", "ecosystem")
        super().__init__(pretrained=model, tokenizer=tokenizer or model.tokenizer, **options)
        self._room = room or Room()

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[_Answer]:
        """The log-likelihood of each continuation, and whether it is the greedy one, in the order of the requests.

        Args:
            requests: for each the key in lm_eval's cache or None, the tokens of the context, and of the continuation.
            disable_tqdm: show no progress bar.
            override_bs: batch size; ignored.

        Raises:
            RabbitLLMError: a request cannot be scored, or the weights cannot be read.
        """
        from tqdm import tqdm

        texts = [self._text(number, *tokens) for number, (_, *tokens) in enumerate(requests)]
        answers: dict[int, _Answer] = {}
        shown = tqdm(
            score(self.model, texts, self._room),
            total=len(texts),
            disable=disable_tqdm or self.rank != 0,
            desc="Running loglikelihood requests",
        )
        for result in shown:
            if result.error is not None:
                raise result.error
            assert result.logprob is not None
            answers[result.index] = answer = (result.logprob, bool(result.greedy))
            if (key := requests[result.index][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return [answers[number] for number in range(len(requests))]

    def _text(self, number: int, context: Sequence[int], continuation: Sequence[int]) -> ScoredText:
        """Cut a request as `HFLM` does: keep the last `max_length + 1` tokens.

        Raises:
            OptionError: the continuation alone is longer than `max_length`.
        """
        if len(continuation) > self.max_length:
            raise OptionError(
                f"A continuation has {len(continuation):,} tokens; the limit max_length is {self.max_length:,}.",
                "Raise max_length, up to the model's context.",
            )
        kept = (*context, *continuation)[-(self.max_length + 1) :]
        cut = len(kept) - len(continuation)
        return ScoredText(number, kept[:cut], kept[cut:])
