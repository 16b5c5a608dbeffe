"""Drafts: a small model, the model's own heads or the text so far propose tokens; the model checks them in a pass.

A streamed model reads its weights once for each pass, so an answer takes as many passes fewer as proposals are right.
The answer is the model's own: each token is chosen as without a draft, by the same random numbers, so tokens are the
same except for rounding. One loop serves all models, those with states included (`_rewind.py`).
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers import DynamicCache, StoppingCriteriaList, StopStringCriteria

from rabbitllm.base.terminal import size
from rabbitllm.engine.skeleton import read_tokenizer
from rabbitllm.errors import OptionError
from rabbitllm.generation._proposals import KINDS as KINDS
from rabbitllm.generation._proposals import MTP as MTP
from rabbitllm.generation._proposals import NGRAM as NGRAM
from rabbitllm.generation._proposals import SELF as SELF
from rabbitllm.generation._proposals import Draft as Draft
from rabbitllm.generation._proposals import Proposal as Proposal
from rabbitllm.generation._proposals import proposals_of
from rabbitllm.generation._rewind import MAX_CARRIED, Rewindable
from rabbitllm.generation._width import Width, costs_of
from rabbitllm.generation.grammar import GrammarState
from rabbitllm.generation.kv_cache import CACHE_ARGUMENT, cache_argument, can_go_back, layers_of, why_not_back
from rabbitllm.generation.request import check_generates, tokenizer_of
from rabbitllm.generation.transformers_api import CheckedProcessors, has_dynamic_cache
from rabbitllm.telemetry.passes import Drafts

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase

    from rabbitllm.engine.placement import Placement
    from rabbitllm.engine.streamed_model import StreamedModel

SAME_TOKENS = 0.9
"""The least share of the smaller vocabulary that both have under the same ids; others are only never right."""
PER_TOKEN = ("attention_mask", "position_ids")
"""Arguments of a pass that have a value for each token."""
_LOAD_HEADS = "Load it with --draft mtp, or use another draft."
_LEAVE_OUT = "Leave the draft model out, or use a smaller model of the same family."


class Drafting:
    """The steps of `generate` with a draft, for its argument `custom_generate`.

    It learns how many tokens to draft (`_width.py`), so keep one for a model and its draft. Answers, greedy or of a
    seed, do not depend on that number, which depends on times: tokens are chosen as without a draft, with the same
    random numbers. In 16 bits they may all the same, since passes of other numbers of rows round differently.

    Args:
        draft: what proposes tokens, after `prepare_draft`; None for those alone that a grammar forces.

    Attributes:
        brought: what the draft has brought so far.
    """

    def __init__(self, draft: Draft | None) -> None:
        self._draft = draft
        self._streamer: Any = None
        self._grammar: GrammarState | None = None
        self._width: Width | None = None
        self.brought = Drafts()

    def streaming_to(self, streamer: Any, grammar: GrammarState | None = None) -> Drafting:
        """The same draft and what was learnt of it, for an answer whose tokens go to another streamer.

        Args:
            streamer: gets the tokens; `generate` gives its own streamer the prompt only.
            grammar: the state of the answer's grammar.
        """
        drafting = copy.copy(self)
        drafting._streamer, drafting._grammar, drafting.brought = streamer, grammar, Drafts()
        return drafting

    def prepare(self, model: StreamedModel) -> None:
        """Assume the costs of a model until they are measured."""
        self._width = self._width or Width(costs_of(model, self._draft or NGRAM))

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
            NotANumberError: see `CheckedProcessors`.
        """
        cache: Any = model_kwargs.get(cache_argument(model))
        _check_form(model, input_ids, cache, generation_config)
        given = {name: model_kwargs[name] for name in PER_TOKEN if model_kwargs.get(name) is not None}
        has_length = any(hasattr(layer, "get_seq_length") for layer in layers_of(cache))
        track = Rewindable(model, cache, cache.get_seq_length() if has_length else 0, **given)
        self.prepare(model)
        assert self._width is not None
        width = self._width
        draft = self._draft or NGRAM
        proposals = proposals_of(draft, model, track, logits_processor, generation_config, width)
        checked = CheckedProcessors(logits_processor)
        ids, nothing = input_ids, Proposal(input_ids[:, :0])
        is_prompt, is_over, seen = True, False, proposals.tokens
        try:
            while not is_over:
                known = ids.shape[1]
                forced = self._forced(ids, generation_config.max_length - known)
                if forced and self._grammar is not None and self._grammar.ends(forced):
                    ids = self._ended(ids, forced, stopping_criteria)
                    is_over = True
                    break
                # a prompt would be the first rows of the next pass, too, and windows would grow to its length; copies
                # would compute it, which the model's own pass leaves to them
                if is_prompt:
                    waits = proposals.reads_along or not track.keeps_every_token
                else:
                    waits = known - track.tokens > MAX_CARRIED
                most = 0 if waits else generation_config.max_length - known - 1
                lacks = 0 if proposals.reads_along else known - seen
                begin, proposal, rows = time.perf_counter(), nothing, ids
                forced = forced[: max(most, 0)]
                wanted = 0
                if forced:
                    proposal = Proposal(ids.new_tensor([forced]))
                elif self._draft is not None and (
                    wanted := width.choose(most, lacks, 1 if is_prompt else known - track.tokens)
                ):
                    proposal = self._valid(ids, proposals.propose(ids, wanted))
                drafted = time.perf_counter()
                if proposal.count:
                    rows = torch.cat((ids, proposal.tokens), dim=1)
                    track.mark()
                # a pass with fewer logits than rows is a prompt for the profiler
                computed = proposal.count + 1 if is_prompt else rows.shape[1] - track.tokens
                parents = proposal.parents
                logits = track.logits(rows, computed, parents)[-proposal.count - 1 :]
                path: list[int] = []
                end = 0.0
                while True:
                    node = path[-1] if path else -1
                    scores = checked(ids, logits[node + 1 : node + 2])
                    followers = [index for index, parent in enumerate(parents) if parent == node]
                    token, index = _chosen(scores, proposal, followers, generation_config.do_sample)
                    end = end or time.perf_counter()  # not before a GPU has computed the token
                    ids = torch.cat((ids, token), dim=1)
                    is_over = bool(stopping_criteria(ids, None).all())
                    if self._streamer is not None:
                        self._streamer.put(token.flatten().cpu())
                    if is_over or index is None:
                        break
                    path.append(index)
                track.settle(ids.shape[1] - 1, path, proposal.count)
                proposals.settle(ids.shape[1] - 1, () if forced else path)
                right = len(path) + (index is not None)
                width.costs.learn_pass(computed, None if is_prompt else end - drafted, proposal.count > 0)
                seen, is_prompt = ids.shape[1] - 1 if wanted else seen, False
                if forced and self._grammar is not None:
                    self._grammar.saved += right
                if forced or self._draft is None:
                    continue
                width.learn(
                    wanted,
                    proposal.depth,
                    right,
                    tokens=proposal.count,
                    rows=computed,
                    draft_seconds=drafted - begin,
                    lacks=lacks,
                )
                hits = (1,) * right + (0,) * (index is None and right < proposal.depth)
                answered = ids.shape[1] - known
                whole = time.perf_counter() - begin
                name = draft if isinstance(draft, str) else "a draft model"
                brought = Drafts(1, answered, (1,) * len(hits), hits, drafted - begin, whole, name)
                self.brought = self.brought.plus(brought)
                model.profiler.add_drafts(brought)
        finally:
            track.release()
            proposals.close(is_over)
        if self._streamer is not None:
            self._streamer.end()
        return ids

    def _forced(self, ids: torch.Tensor, room: int) -> list[int]:
        """The tokens that must follow, as far as the answer may go on."""
        return [] if self._grammar is None else self._grammar.forced(ids[0].tolist())[:room]

    def _ended(self, ids: torch.Tensor, forced: list[int], stopping_criteria: StoppingCriteriaList) -> torch.Tensor:
        """The sequence with its last tokens, which need no pass."""
        for token in forced:
            ids = torch.cat((ids, ids.new_tensor([[token]])), dim=1)
            if self._streamer is not None:
                self._streamer.put(ids[0, -1:].cpu())
            if self._grammar is not None:
                self._grammar.saved += 1
            if bool(stopping_criteria(ids, None).all()):
                break
        return ids

    def _valid(self, ids: torch.Tensor, proposal: Proposal) -> Proposal:
        """A proposal of the text so far as far as the grammar allows it; models propose nothing else."""
        if self._grammar is None or self._draft != NGRAM:
            return proposal
        tokens = proposal.tokens[0].tolist()
        return Proposal(proposal.tokens[:, : self._grammar.valid(ids[0].tolist(), tokens)])


def _takes(model: StreamedModel, cache: Any) -> bool:
    """Whether a cache can go back; a model's own must begin empty, since the number of its tokens is unknown."""
    return isinstance(cache, DynamicCache) if has_dynamic_cache(model) else cache is None


def _check_form(model: StreamedModel, ids: torch.Tensor, cache: Any, config: GenerationConfig) -> None:
    """Refuse what drafts cannot be used with.

    Raises:
        OptionError: beams, several sequences, another cache, or outputs other than tokens are requested.
    """
    found = [
        f"num_beams={config.num_beams}" if (config.num_beams or 1) > 1 else "",
        f"{len(ids)} sequences" if len(ids) > 1 else "",
        "" if _takes(model, cache) else f"a {type(cache).__name__} as the KV cache",
        "return_dict_in_generate" if config.return_dict_in_generate else "",
    ]
    if any(found):
        raise OptionError(
            f"Drafts need one sequence, a DynamicCache, and tokens as the result; found {next(filter(None, found))}.",
            "Leave out that option, or the draft.",
        )


def _chosen(
    scores: torch.Tensor, proposal: Proposal, followers: Sequence[int], samples: bool
) -> tuple[torch.Tensor, int | None]:
    """Choose a token, and tell which of the proposed ones it is.

    Args:
        scores: of the model, after all processors, (1, vocabulary).
        proposal: the proposal.
        followers: indexes of its tokens that may follow.
        samples: whether tokens are sampled, not chosen greedily.

    Returns:
        The token's id, (1, 1), and its index in the proposal.
    """
    # the random numbers are those of `generate`
    token = torch.multinomial(scores.softmax(dim=-1), 1) if samples else scores.argmax(dim=-1, keepdim=True)
    return token, next((index for index in followers if int(proposal.tokens[0, index]) == int(token)), None)


class _WithDraft:
    """What `use_draft` adds to the class of a model."""

    drafting: Drafting

    def generate(self, inputs: Any = None, generation_config: Any = None, **options: Any) -> Any:
        """As in transformers, with a draft where it can be used."""
        generation_config = _without_stop_strings(self, generation_config, options)
        if _serves(self, inputs, generation_config, options):
            processors = options.get("logits_processor") or ()
            grammar = next((each for each in processors if isinstance(each, GrammarState)), None)
            options["custom_generate"] = self.drafting.streaming_to(options.get("streamer"), grammar)
        parent: Any = super()
        return parent.generate(inputs, generation_config=generation_config, **options)


def _without_stop_strings(
    model: Any, config: GenerationConfig | None, options: dict[str, Any]
) -> GenerationConfig | None:
    """The config of a call, whose stop strings become a criterion of its options; with steps of their own, `generate`
    forgets the tokenizer that they need."""
    stops = _setting(model, config, options, "stop_strings")
    if not stops or options.get("tokenizer") is None:
        return config
    criterion = StopStringCriteria(options["tokenizer"], stops)
    options["stopping_criteria"] = StoppingCriteriaList([*(options.get("stopping_criteria") or ()), criterion])
    options["stop_strings"] = None
    if config is not None:
        config = copy.deepcopy(config)
        config.stop_strings = None
    return config


def _setting(model: Any, config: GenerationConfig | None, options: Mapping[str, Any], name: str) -> Any:
    """An option of a call of `generate`: the call's own, None too, comes before its config's and the model's."""
    if name in options:
        return options[name]
    both = (getattr(config, name, None), getattr(model.generation_config, name, None))
    return next((setting for setting in both if setting is not None), None)


_ALONE: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_return_sequences"), (None, 1)),
    **dict.fromkeys(("return_dict_in_generate", "use_mtp"), (None, False)),
    **dict.fromkeys(("cache_implementation", "prefill_chunk_size", "prompt_lookup_num_tokens"), (None,)),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "guidance_scale", "assistant_early_exit"), (None,)),
    "stop_strings": (None,),  # others need a tokenizer
    "use_cache": (None, True),
}
"""Options of `generate` -> values with which drafts can be used."""
_INPUTS = frozenset({"input_ids", "attention_mask", "position_ids", "streamer", "tokenizer"})
_INPUTS_OR_CACHE = _INPUTS | {"logits_processor", "stopping_criteria", CACHE_ARGUMENT, "cache", "cache_params"}


def _serves(model: Any, inputs: Any, config: GenerationConfig | None, options: Mapping[str, Any]) -> bool:
    """Whether a call of `generate` is for one sequence of text, decoded in the usual way."""
    ids = options.get("input_ids") if inputs is None else inputs
    known = {name for name, setting in options.items() if setting is not None} - _INPUTS_OR_CACHE
    caches = [options[name] for name in (CACHE_ARGUMENT, "cache", "cache_params") if options.get(name) is not None]
    return (
        isinstance(ids, torch.Tensor)
        and ids.dim() == 2
        and len(ids) == 1
        and not ids.is_floating_point()
        and all(hasattr(model.generation_config, name) for name in known)
        and all(_takes(model, cache) for cache in caches)
        and all(_setting(model, config, options, name) in allowed for name, allowed in _ALONE.items())
    )


def use_draft(model: StreamedModel, draft: Draft) -> None:
    """Let `model.generate` use a draft, after `prepare_draft`; calls that it cannot serve go on without."""
    drafted: Any = model
    kind = type(model)
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    drafted.__class__ = type(kind.__name__, (_WithDraft, kind), body)
    object.__setattr__(drafted, "drafting", Drafting(draft))  # a draft model is no part of the model
    drafted.drafting.prepare(model)


def chosen_draft(model: StreamedModel, draft: Draft | Literal["auto"]) -> Draft | None:
    """A draft of a model, prepared. "auto" needs no other model, and is none where no pass moves weights.

    Raises:
        OptionError: see `prepare_draft`; never with "auto".
    """
    if draft == "auto":
        if not (model.placement.moved_bytes and model.can_generate() and can_go_back(model)):
            return None
        draft = NGRAM if model.heads is None else MTP
    prepare_draft(model, draft)
    return draft


def prepare_draft(model: StreamedModel, draft: Draft) -> None:
    """Check that a draft suits a model, and fit a draft model to the model's vocabulary.

    Models of one family often have the same tokens, but embeddings of different lengths.

    Raises:
        OptionError: its vocabulary is another one, its weights are not all in memory, one of the models cannot drop
            tokens, or the model was loaded without copies for "self".
    """
    for causal in (model,) if isinstance(draft, str) else (model, draft):
        check_goes_back(causal)
    if draft == SELF and not model.streamer.copies:
        raise OptionError(
            "The model was loaded without copies of its streamed layers, so it cannot be its own draft.",
            "Load it with draft='self'.",
        )
    if draft == MTP and model.heads is None:
        raise OptionError("The model was loaded without its heads for multi-token prediction.", _LOAD_HEADS)
    if isinstance(draft, str):
        return
    check_vocabularies(tokenizer_of(model), tokenizer_of(draft))
    check_in_memory(draft.placement)
    ours, theirs = model.config.get_text_config(decoder=True), draft.config.get_text_config(decoder=True)
    if theirs.vocab_size != ours.vocab_size:
        known = functools.partial(_known_tokens, theirs.vocab_size)
        draft.get_input_embeddings().register_forward_pre_hook(known, prepend=True)
        draft.register_forward_hook(functools.partial(_fit_logits, ours.vocab_size))
        theirs.vocab_size = ours.vocab_size


def check_goes_back(model: Any) -> None:
    """Refuse a model, loaded or not, that cannot be used with a draft, or as one.

    Raises:
        OptionError: it generates no text, or its cache cannot go back.
    """
    check_generates(model)
    if why := why_not_back(model):
        raise OptionError(f"A {type(model).__name__} cannot be used with a draft: {why}.", _LEAVE_OUT)


def check_in_memory(placement: Placement) -> None:
    """Refuse a draft model that would be streamed.

    Raises:
        OptionError: each pass would move some of its weights.
    """
    if moved := placement.moved_bytes:
        raise OptionError(
            f"The draft model does not fit in memory: each pass would move {size(moved)} of its weights.", _LEAVE_OUT
        )


def _known_tokens(vocabulary: int, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward hook of embeddings: a token that they lack is read as their last, so proposals after it are guesses."""
    return (inputs[0].clamp(max=vocabulary - 1), *inputs[1:])


def _fit_logits(vocabulary: int, module: nn.Module, inputs: Any, output: Any) -> Any:
    """A forward hook that cuts logits to a number of tokens, or fills them up with tokens that are never chosen."""
    missing = vocabulary - output.logits.shape[-1]
    least = torch.finfo(output.logits.dtype).min  # -inf would make NaN of a difference of two such logits
    output.logits = nn.functional.pad(output.logits, (0, missing), value=least)
    return output


def check_folders(model: Path, draft: Path) -> None:
    """Refuse a draft model of another vocabulary, if both folders have a tokenizer to see it by.

    Raises:
        OptionError: see `check_vocabularies`.
    """
    if all((folder / "tokenizer.json").is_file() for folder in (model, draft)):
        ours, theirs = read_tokenizer(model), read_tokenizer(draft)
        if ours is not None and theirs is not None:
            check_vocabularies(ours, theirs)


def check_vocabularies(model: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Refuse a draft model whose ids mean other tokens.

    Raises:
        OptionError: too few tokens of the smaller vocabulary have the same ids in both.
    """
    ours, theirs = model.get_vocab(), draft.get_vocab()
    same = sum(ours.get(token) == id for token, id in theirs.items())
    share = same / max(min(len(ours), len(theirs)), 1)
    if share < SAME_TOKENS:
        raise OptionError(
            f"The draft model has another vocabulary: {share:.0%} of its tokens have the model's ids; expected "
            f"{SAME_TOKENS:.0%}.",
            _LEAVE_OUT,
        )
