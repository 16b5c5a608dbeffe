"""How well documents answer a query: by models that read both together (cross-encoders), by their checkpoint's recipe.

    *ForSequenceClassification    query and document as a pair           its one score
    *ForCausalLM                  both in the model's chat template      the logit of "yes" less that of "no"

The files are those of sentence-transformers: `modules.json` lists `LogitScore` after the transformer, and
`1_LogitScore/config.json` has its tokens. A score is between 0 and 1 (sigmoid), unless a checkpoint asks for logits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rabbitllm.base.building import BUILDING
from rabbitllm.engine.streamed_model import refuse_overflow
from rabbitllm.generation.request import ModelLimits
from rabbitllm.generation.scoring.micro_batches import TextLayout
from rabbitllm.generation.scoring.score import layout_of, next_logits
from rabbitllm.generation.template import ChatTemplate
from rabbitllm.server.api_error import bad_options, prompt_errors
from rabbitllm.server.embeddings import check_ids, groups, in_passes, modules_in, read_or_empty
from rabbitllm.server.schemas import RerankBody
from rabbitllm.telemetry.passes import PassInput

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

CLASSIFIER = "ForSequenceClassification"
SETTINGS = "config_sentence_transformers.json"
NO_SCORES = (
    f"This model ranks no documents: it is a %s without the files of an embedding model. Expected a *{CLASSIFIER} with "
    "one label, or a modules.json with a supported pooling or LogitScore. A Qwen3-Reranker needs the files of "
    "sentence-transformers and the chat template that newer revisions of its repository have."
)
_ROLES = ("query", "document")
_NAMES = ("input_ids", "token_type_ids")
_LOGIT, _CHANCE = "Identity", "Sigmoid"


@dataclass(frozen=True, slots=True)
class RankingRecipe:
    """How a score is read off a model.

    Attributes:
        tokens: the token that says yes, and the one that says no, if there is one; none for the score of a classifier.
        system: text of the system message; empty for none.
        begins: whether the chat template begins an answer.
        is_logit: whether scores stay logits.
    """

    tokens: tuple[int, ...] = ()
    system: str = ""
    begins: bool = False
    is_logit: bool = False


def ranking_recipe(folder: Path, model: StreamedModel) -> RankingRecipe | None:
    """The recipe of a model; None if it ranks nothing, or in a way that is not supported.

    Args:
        folder: one that may have the files of sentence-transformers.
        model: the model.
    """
    settings, modules = read_or_empty(folder / SETTINGS), modules_in(folder)
    name = getattr(model.config, "sbert_ce_default_activation_function", None)
    name = _in(vars(model.config), "sentence_transformers").get("activation_fn", name)
    function = str(name or settings.get("activation_fn") or _CHANCE).rpartition(".")[2]
    if function not in (_LOGIT, _CHANCE):
        return None
    if type(model).__name__.endswith(CLASSIFIER):
        is_one = model.config.num_labels == 1 and len(modules) <= 1
        return RankingRecipe(is_logit=function == _LOGIT) if is_one else None
    if [kind for kind, _ in modules] != ["Transformer", "LogitScore"] or not model.can_generate():
        return None
    chosen = read_or_empty(folder / modules[1][1] / "config.json")
    named = chosen.get("true_token_id"), chosen.get("false_token_id")
    tokens: tuple[Any, ...] = named if named[1] is not None else named[:1]
    vocabulary = ModelLimits.of(model).vocabulary
    if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
        return None
    system = _in(settings, "prompts").get(str(settings.get("default_prompt_name")))
    template = _in(read_or_empty(folder / "sentence_bert_config.json"), "processing_kwargs", "chat_template")
    return RankingRecipe(tokens, str(system or ""), template.get("add_generation_prompt") is True, function == _LOGIT)


def _in(value: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """The object in an object; empty if there is none."""
    for name in names:
        inner = value.get(name)
        value = inner if isinstance(inner, dict) else {}
    return value


class Reranker:
    """Scores documents.

    Args:
        model: a model from `AutoModel.from_pretrained`.
        template: its chat template.
        recipe: see `ranking_recipe`.
    """

    def __init__(self, model: StreamedModel, template: ChatTemplate, recipe: RankingRecipe) -> None:
        self._model, self._template, self._recipe = model, template, recipe
        self._limits = ModelLimits.of(model)
        self._pads = bool(recipe.tokens) and layout_of(model, exact=False) is not TextLayout.EQUAL
        config = model.config.get_text_config()
        # transformers finds the token whose score a classifier gives by padding, or by ends, as many in each text
        self._is_alone = not recipe.tokens and (config.pad_token_id is None or config.is_encoder_decoder)
        self._lock = asyncio.Lock()

    def inputs(self, body: RerankBody) -> list[dict[str, list[int]]]:
        """What the model reads of each document, token ids and perhaps their types; used in the tokenizer's thread.

        Raises:
            APIError: the chat template refuses a document, or one is too long or has no tokens.
        """
        inputs = [self._input(body.query, document) for document in body.documents]
        for index, entry in enumerate(inputs):
            check_ids(entry["input_ids"], self._limits, f"documents.{index}", "A document with the query")
        return inputs

    def _input(self, query: str, document: str) -> dict[str, list[int]]:
        with bad_options("documents", "context_length_exceeded"):
            self._limits.check_letters(len(query) + len(document), "A query with its document")
        recipe, template = self._recipe, self._template
        if not recipe.tokens and not all(template.reads(role) for role in _ROLES):
            pair = template.tokenizer(query, document)
            return {name: list(pair[name]) for name in _NAMES if name in pair}
        messages = [{"role": "system", "content": recipe.system}] if recipe.system else []
        messages += [{"role": role, "content": text} for role, text in zip(_ROLES, (query, document), strict=True)]
        with prompt_errors():
            prompt = template.prompt(messages, begins=recipe.begins)
        return {"input_ids": list(prompt.ids)}

    async def scores(self, inputs: Sequence[Mapping[str, list[int]]]) -> list[float]:
        """A score for each input; cancellation when the client disconnects takes effect between two passes."""
        together = groups([len(entry["input_ids"]) for entry in inputs], pads=self._pads)
        async with self._lock:
            alone = [[index] for index in range(len(inputs))]
            return await in_passes(self._pass, inputs, alone if self._is_alone else together)

    def _pass(self, inputs: Sequence[Mapping[str, list[int]]]) -> list[float]:
        recipe, ids = self._recipe, [entry["input_ids"] for entry in inputs]
        if recipe.tokens:
            logits = next_logits(self._model, ids, recipe.tokens)
            scores = logits[:, 0] - logits[:, 1] if len(recipe.tokens) > 1 else logits[:, 0]
        else:
            named = {name: torch.tensor([entry[name] for entry in inputs]) for name in inputs[0]}
            with BUILDING.a_pass(), self._model.joint_pass(PassInput(len(ids), len(ids[0]), None, None)):
                # bypasses the model's own call, which would wait for this very pass
                output = nn.Module.__call__(self._model, **{n: t.to(self._model.device) for n, t in named.items()})
            refuse_overflow(output.logits, "scores")
            scores = output.logits[:, 0].float()
        return [float(score) for score in (scores if recipe.is_logit else scores.sigmoid()).tolist()]
