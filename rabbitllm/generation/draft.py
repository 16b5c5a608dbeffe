"""Drafts: a small model or the text so far proposes tokens, and the model checks them in a pass (speculative decoding).

A streamed model reads its weights once for each pass, so an answer takes as many passes fewer as proposals are right.
The answer is the model's own: greedy decoding gives the same tokens except for rounding, sampling the same distribution
(Leviathan et al. 2023, arXiv:2211.17192). One loop serves all models, those with states included (`_rewind.py`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers import DynamicCache

from rabbitllm.base.terminal import size
from rabbitllm.errors import OptionError
from rabbitllm.generation._proposals import Draft as Draft
from rabbitllm.generation._proposals import Proposal, proposals_of
from rabbitllm.generation._rewind import Rewindable
from rabbitllm.generation.kv_cache import cache_argument, can_go_back
from rabbitllm.generation.request import check_generates, tokenizer_of

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList

    from rabbitllm.engine.streamed_model import StreamedModel

SAME_TOKENS = 0.9
"""The least share of the smaller vocabulary that both have under the same ids; others are only never right."""
NGRAM: Literal["ngram"] = "ngram"
"""The draft from the text so far."""
SELF: Literal["self"] = "self"
"""The draft by the model itself, with copies of its streamed layers at fewer bits."""
MAX_CARRIED = 16
"""The most tokens that states lack after wrong drafts; then a pass without a draft computes them."""
PER_TOKEN = ("attention_mask", "position_ids")
"""Arguments of a pass that have a value for each token."""
_LEAVE_OUT = "Leave the draft model out, or use a smaller model of the same family."


class Drafting:
    """The steps of `generate` with a draft, for its argument `custom_generate`.

    Args:
        draft: see `_proposals.Draft`; after `prepare_draft`.
        streamer: gets the tokens; `generate` gives its own streamer the prompt only.
    """

    def __init__(self, draft: Draft, streamer: Any = None) -> None:
        self._draft = draft
        self._streamer = streamer

    def __call__(
        self,
        model: StreamedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """Generate; `generate` gives the arguments.

        Returns:
            Prompt and answer, int64 of shape (1, tokens).

        Raises:
            OptionError: beams, several sequences, or outputs other than tokens are wanted.
        """
        cache: Any = model_kwargs.get(cache_argument(model))
        _check_form(input_ids, cache, generation_config)
        given = {name: model_kwargs[name] for name in PER_TOKEN if model_kwargs.get(name) is not None}
        has_length = any(hasattr(layer, "get_seq_length") for layer in cache.layers)
        track = Rewindable(model, cache, cache.get_seq_length() if has_length else 0, **given)
        proposals = proposals_of(self._draft, model, track, logits_processor, generation_config)
        ids, is_prompt, is_over = input_ids, True, False
        try:
            while not is_over:
                known = ids.shape[1]
                # a prompt would be the first rows of the next pass, too, and windows would grow to its length
                waits = not track.keeps_every_token if is_prompt else known - track.tokens > MAX_CARRIED
                proposal = proposals.propose(ids, 0 if waits else generation_config.max_length - known - 1)
                rows = torch.cat((ids, proposal.tokens), dim=1)
                if proposal.count:
                    track.mark()
                # a pass with fewer logits than rows is a prompt for the profiler
                count = proposal.count + 1 if is_prompt else rows.shape[1] - track.tokens
                logits = track.logits(rows, count)[-proposal.count - 1 :]
                for index in range(proposal.count + 1):
                    scores = logits_processor(ids, logits[index : index + 1])
                    token, is_right = _chosen(scores, proposal, index, generation_config.do_sample)
                    ids = torch.cat((ids, token), dim=1)
                    is_over = bool(stopping_criteria(ids, None).all())
                    if self._streamer is not None:
                        self._streamer.put(token.flatten().cpu())
                    if is_over or not is_right:
                        break
                track.settle(ids.shape[1] - 1)
                proposals.settle(ids.shape[1] - 1)
                is_prompt = False
        finally:
            track.release()
        if self._streamer is not None:
            self._streamer.end()
        return ids


def _check_form(ids: torch.Tensor, cache: Any, config: GenerationConfig) -> None:
    """Refuse what drafts cannot be used with.

    Raises:
        OptionError: beams, several sequences, another cache, or outputs other than tokens are requested.
    """
    found = [
        f"num_beams={config.num_beams}" if (config.num_beams or 1) > 1 else "",
        f"{len(ids)} sequences" if len(ids) > 1 else "",
        "" if isinstance(cache, DynamicCache) else f"a {type(cache).__name__} as the KV cache",
        "return_dict_in_generate" if config.return_dict_in_generate else "",
    ]
    if any(found):
        raise OptionError(
            f"Drafts need one sequence, a DynamicCache, and tokens as the result; found {next(filter(None, found))}.",
            "Leave out that option, or the draft.",
        )


def _chosen(scores: torch.Tensor, proposal: Proposal, index: int, samples: bool) -> tuple[torch.Tensor, bool]:
    """Choose a token, and tell whether it is the proposed one.

    Args:
        scores: of the model, after all processors, (1, vocabulary).
        proposal: the proposal; it may end before `index`.
        index: index of the token in the proposal.
        samples: whether tokens are sampled, not chosen greedily.

    Returns:
        The token's id, (1, 1).
    """
    guess = proposal.tokens[:, index : index + 1]
    if not samples:
        token = scores.argmax(dim=-1, keepdim=True)
    elif proposal.probabilities is None or not guess.numel():
        token = torch.multinomial(scores.softmax(dim=-1), 1)  # the random numbers are those of `generate`
    else:
        ours, theirs = scores.softmax(dim=-1), proposal.probabilities[index : index + 1]
        if torch.rand((), device=scores.device) * theirs[0, guess[0, 0]] < ours[0, guess[0, 0]]:
            return guess, True
        rest = (ours - theirs).clamp(min=0)
        return torch.multinomial(rest if rest.any() else ours, 1), False
    return token, bool((token == guess).any())


def prepare_draft(model: StreamedModel, draft: Draft) -> None:
    """Check that a draft suits a model, and fit a draft model to the model's vocabulary.

    Models of one family often have the same tokens, but embeddings of different lengths.

    Raises:
        OptionError: its vocabulary is another one, its weights are not all in memory, one of the models cannot drop
            tokens, or the model was loaded without copies for "self".
    """
    for causal in (model,) if isinstance(draft, str) else (model, draft):
        check_generates(causal)
        if not can_go_back(causal):
            raise OptionError(
                f"A {type(causal).__name__} cannot be used with a draft: it is not known to compute several tokens as "
                "one after the other, or to drop them.",
                _LEAVE_OUT,
            )
    if draft == SELF and not model.streamer.copies:
        raise OptionError(
            "The model was loaded without copies of its streamed layers, so it cannot be its own draft.",
            "Load it with draft='self'.",
        )
    if isinstance(draft, str):
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
        theirs.vocab_size = ours.vocab_size


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
