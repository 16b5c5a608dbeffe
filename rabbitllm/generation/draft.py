"""Drafts: a small model or the text so far proposes tokens, and the model checks them in a pass (speculative decoding).

A streamed model reads its weights once for each pass, so an answer takes as many passes fewer as proposals are right.
The answer is the model's own: greedy decoding gives the same tokens except for rounding, sampling the same
distribution. The steps are transformers' assisted generation (Leviathan et al. 2023, arXiv:2211.17192), and its prompt
lookup, which proposes the tokens that followed the last two the last time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from rabbitllm.base.terminal import size
from rabbitllm.errors import OptionError
from rabbitllm.generation.kv_cache import can_drop_tokens
from rabbitllm.generation.request import check_generates, tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rabbitllm.engine.streamed_model import StreamedModel

SAME_TOKENS = 0.9
"""The least share of the smaller vocabulary that both have under the same ids; others are only never right."""
NGRAM: Literal["ngram"] = "ngram"
"""The draft from the text so far."""
NGRAM_TOKENS = 10
"""The most tokens that it proposes."""
_LEAVE_OUT = "Leave the draft model out, or use a smaller model of the same family."


@contextlib.contextmanager
def continuing(model: StreamedModel, tokens: int) -> Iterator[None]:
    """Let assisted generation continue a KV cache of so many tokens.

    transformers (5.23, 5.24) feeds the whole prompt to its first pass, as if the cache were empty.
    """
    ordinary = model.prepare_inputs_for_generation

    @functools.wraps(ordinary)  # `generate` reads the signature
    def prepared(ids: torch.Tensor, *args: Any, next_sequence_length: int | None = None, **kwargs: Any) -> Any:
        if kwargs.get("is_first_iteration") and next_sequence_length is None:
            next_sequence_length = ids.shape[1] - tokens
        return ordinary(ids, *args, next_sequence_length=next_sequence_length, **kwargs)

    model.prepare_inputs_for_generation = prepared
    try:
        yield
    finally:
        del model.prepare_inputs_for_generation


def draft_arguments(draft: StreamedModel | Literal["ngram"]) -> dict[str, Any]:
    """Arguments for `generate`."""
    return {"prompt_lookup_num_tokens": NGRAM_TOKENS} if draft == NGRAM else {"assistant_model": draft}


def prepare_draft(model: StreamedModel, draft: StreamedModel | Literal["ngram"]) -> None:
    """Check that a draft suits a model, and fit a draft model to the model's vocabulary.

    Models of one family often have the same tokens, but embeddings of different lengths.

    Raises:
        OptionError: its vocabulary is another one, its weights are not all in memory, or the KV cache of one of the
            models cannot drop tokens.
    """
    for causal in (model,) if draft == NGRAM else (model, draft):
        check_generates(causal)
        if not can_drop_tokens(causal):
            raise OptionError(
                f"A {type(causal).__name__} cannot be used with a draft: its KV cache cannot drop tokens.", _LEAVE_OUT
            )
    if draft == NGRAM:
        return
    share = _same_share(tokenizer_of(model), tokenizer_of(draft))
    if share < SAME_TOKENS:
        raise OptionError(
            f"The draft model has another vocabulary: {share:.0%} of its tokens have the model's ids; expected "
            f"{SAME_TOKENS:.0%}.",
            _LEAVE_OUT,
        )
    if moved := max(draft.placement.streamed_bytes, draft.placement.uploaded_bytes):
        raise OptionError(
            f"The draft model does not fit in memory: each pass would move {size(moved)} of its weights.", _LEAVE_OUT
        )
    ours, theirs = model.config.get_text_config(decoder=True), draft.config.get_text_config(decoder=True)
    if theirs.vocab_size != ours.vocab_size:
        known = functools.partial(_known_tokens, theirs.vocab_size)
        draft.get_input_embeddings().register_forward_pre_hook(known, prepend=True)
        draft.register_forward_hook(functools.partial(_fit_logits, ours.vocab_size))
        theirs.vocab_size = ours.vocab_size  # transformers compares them


def _known_tokens(vocabulary: int, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward hook of embeddings: a token that they lack is read as their last, so proposals after it are guesses."""
    return (inputs[0].clamp(max=vocabulary - 1), *inputs[1:])


def _fit_logits(vocabulary: int, module: nn.Module, inputs: Any, output: Any) -> Any:
    """A forward hook that cuts logits to a number of tokens, or fills them up with tokens that are never chosen."""
    missing = vocabulary - output.logits.shape[-1]
    least = torch.finfo(output.logits.dtype).min  # -inf would make NaN of a difference of two such logits
    output.logits = nn.functional.pad(output.logits, (0, missing), value=least)
    return output


def _same_share(model: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> float:
    """The share of the smaller vocabulary that both have under the same ids."""
    ours, theirs = model.get_vocab(), draft.get_vocab()
    same = sum(ours.get(token) == id for token, id in theirs.items())
    return float(same / max(min(len(ours), len(theirs)), 1))
