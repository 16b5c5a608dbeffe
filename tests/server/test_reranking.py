"""Scores of documents by cross-encoders, compared with plain transformers on one pair at a time."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rabbitllm.base.openmp import torchs_team
from rabbitllm.generation.request import Limits
from rabbitllm.server._reranking import RankingRecipe, ranking_recipe
from rabbitllm.server._service import batch_of
from rabbitllm.server.embeddings import PoolingRecipe
from tests.server.serving import NAME, Running, running
from tests.support.builders import COMMON, build_checkpoint, make_tokenizer
from tests.support.tiny_models import load, split

QUERY = "the rain"
DOCUMENTS = ["and then there was a longer one in the rain", "x", "the rain", "then the rain was there", "y"]
BODY: dict[str, Any] = {"model": NAME, "query": QUERY, "documents": DOCUMENTS}
YES, NO = 70, 81
TASK = "Find it."
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' %}<Instruct>: {{ message['content'] }}\n"
    "{% elif message['role'] == 'query' %}<Query>: {{ message['content'] }}\n"
    "{% elif message['role'] == 'document' %}<Document>: {{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}answer:{% endif %}"
)


def write_recipe(folder: Path, tokens: dict[str, int | None], settings: dict[str, Any], *, begins: bool) -> None:
    """The files of sentence-transformers, as rerankers of the kind of Qwen3-Reranker come with them."""
    kinds = (("", "base.modules.transformer.Transformer"), ("1_LogitScore", "cross_encoder.modules.LogitScore"))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]
    (folder / "1_LogitScore").mkdir(exist_ok=True)
    template = {"processing_kwargs": {"chat_template": {"add_generation_prompt": begins}}} if begins else {}
    for name, value in {
        "modules.json": modules,
        "1_LogitScore/config.json": tokens,
        "config_sentence_transformers.json": settings,
        "sentence_bert_config.json": template,
    }.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def scores_of(served: Running, body: dict[str, Any] = BODY) -> list[float]:
    """Scores in the order of the documents."""
    results = served.post("/v1/rerank", body).json()["results"]
    assert [result["relevance_score"] for result in results] == sorted(
        (result["relevance_score"] for result in results), reverse=True
    )
    return [result["relevance_score"] for result in sorted(results, key=lambda result: result["index"])]


@pytest.fixture
def causal(tmp_path: Path) -> Path:
    return build_checkpoint(tmp_path / "qwen3", "qwen3", dtype=torch.float32)


@pytest.mark.parametrize(
    ("tokens", "settings", "begins", "text", "read"),
    [
        (
            {"true_token_id": YES, "false_token_id": NO},
            {"prompts": {"query": TASK}, "default_prompt_name": "query"},
            True,
            f"<Instruct>: {TASK}\n<Query>: {QUERY}\n<Document>: %s\nanswer:",
            lambda logits: torch.softmax(logits[[NO, YES]], 0)[1],
        ),
        (
            {"true_token_id": YES, "false_token_id": None},
            {"activation_fn": "torch.nn.modules.linear.Identity"},
            False,
            f"<Query>: {QUERY}\n<Document>: %s\n",
            lambda logits: logits[YES],
        ),
    ],
    ids=["yes or no", "yes alone"],
)
def test_a_causal_model_says_yes_or_no(
    causal: Path,
    tokens: dict[str, int | None],
    settings: dict[str, Any],
    begins: bool,
    text: str,
    read: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    write_recipe(causal, tokens, settings, begins=begins)
    plain = transformers.AutoModelForCausalLM.from_pretrained(causal, dtype=torch.float32).eval()
    tokenizer = make_tokenizer()
    expected = []
    for document in DOCUMENTS:
        ids = tokenizer(text % document, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            expected.append(float(read(plain(ids).logits[0, -1])))
    with running(split(causal), ranking=ranking_recipe) as served:
        assert scores_of(served) == pytest.approx(expected, abs=1e-5)
        answer = served.post("/v1/completions", {"prompt": QUERY, "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3
        first = {**BODY, "top_n": 1}
        usage = served.post("/v1/rerank", first).json()["usage"]
        assert {served.post(path, first).text for path in ("/v2/rerank", "/rerank")} == {
            served.post("/v1/rerank", first).text
        }
        assert usage["total_tokens"] == sum(
            len(tokenizer(text % document, add_special_tokens=False)["input_ids"]) for document in DOCUMENTS
        )


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, Any]], Path]:
    def build(family: str, settings: dict[str, Any]) -> Path:
        folder = tmp_path_factory.mktemp(family)
        config = transformers.AutoConfig.for_model(family, **{**COMMON, "num_labels": 1, "pad_token_id": 0, **settings})
        torch.manual_seed(0)
        transformers.AutoModelForSequenceClassification.from_config(config).eval().save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
        return folder

    return build


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("bert", {}),
        ("xlm-roberta", {"max_position_embeddings": 130, "sentence_transformers": {"activation_fn": "torch.Identity"}}),
        ("qwen3", {"num_key_value_heads": 2}),
        ("qwen3", {"num_key_value_heads": 2, "pad_token_id": None}),
    ],
)
def test_a_classifier_reads_a_pair(
    classifiers: Callable[[str, dict[str, Any]], Path], family: str, settings: dict[str, Any]
) -> None:
    folder = classifiers(family, settings)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        logits = [float(plain(**tokenizer(QUERY, text, return_tensors="pt")).logits) for text in DOCUMENTS]
    is_logit = "sentence_transformers" in settings
    expected = logits if is_logit else torch.tensor(logits).sigmoid().tolist()
    with running(split(folder), ranking=ranking_recipe) as served:
        assert scores_of(served) == pytest.approx(expected, abs=1e-5)
        refused = served.post("/v1/completions", {"prompt": QUERY})
        assert (refused.status_code, "does not generate text" in refused.text) == (400, True)


def test_a_document_without_tokens_is_refused_by_its_place(causal: Path) -> None:
    write_recipe(causal, {"true_token_id": YES, "false_token_id": NO}, {}, begins=False)
    (causal / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    with running(split(causal), ranking=ranking_recipe) as served:
        refused = served.post("/v1/rerank", {**BODY, "query": "", "documents": ["a", ""]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents.1")


def test_what_is_too_long_is_refused_by_its_place(causal: Path) -> None:
    write_recipe(causal, {"true_token_id": YES, "false_token_id": NO}, {}, begins=False)
    with running(split(causal), ranking=ranking_recipe) as served:
        context = served.service.limits.context
        assert context is not None
        refused = served.post("/v1/rerank", {**BODY, "documents": ["a", "a" * (context + 1)]}).json()["error"]
        assert (refused["param"], refused["code"]) == ("documents.1", "context_length_exceeded")


def test_a_model_that_ranks_nothing_says_what_is_expected(causal: Path) -> None:
    with running(split(causal), ranking=ranking_recipe) as served:
        refused = served.post("/v1/rerank", BODY)
        assert refused.status_code == 404
        assert "it is a Qwen3ForCausalLM" in refused.json()["error"]["message"]
        assert "LogitScore. A Qwen3-Reranker needs the files" in refused.json()["error"]["message"]


def test_recipes(causal: Path, classifiers: Callable[[str, dict[str, Any]], Path]) -> None:
    model = load(split(causal))
    yes: dict[str, int | None] = {"true_token_id": YES, "false_token_id": None}
    write_recipe(causal, yes, {}, begins=True)
    assert ranking_recipe(causal, model) == RankingRecipe((YES,), begins=True)
    for tokens, settings in (
        ({"true_token_id": "yes"}, {}),
        ({"true_token_id": 1 << 20}, {}),
        ({}, {}),
        (yes, {"activation_fn": "torch.nn.modules.activation.Tanh"}),
    ):
        write_recipe(causal, tokens, settings, begins=True)
        assert ranking_recipe(causal, model) is None
    folder = classifiers("bert", {"num_labels": 3})
    assert ranking_recipe(folder, load(split(folder))) is None


@pytest.mark.skipif(torchs_team() is None, reason="torch has no libgomp here")
def test_threads_that_wait_for_work_have_no_team(causal: Path) -> None:
    """libgomp counts the threads of all: if they are more than processors, those of a pass would not spin."""
    write_recipe(causal, {"true_token_id": YES, "false_token_id": NO}, {}, begins=True)
    long = "then the rain was there " * 14
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/rerank", {**BODY, "documents": [long] * 8}),
        ("/v1/embeddings", {"model": NAME, "input": [long] * 8}),
        ("/v1/completions", {"prompt": long, "max_tokens": 2, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": long, "max_tokens": 2}),
    ]
    torch.set_num_threads(2)
    with running(split(causal), ranking=ranking_recipe, recipe=PoolingRecipe("last", True)) as served:
        for path, body in bodies:
            during = list[int]()
            hook = served.model.model.norm.register_forward_hook(lambda *_: during.append(_threads_of_teams()))  # noqa: B023
            assert served.post(path, body).status_code == 200
            hook.remove()
            limit = time.monotonic() + 600
            while _threads_of_teams() >= max(during) and time.monotonic() < limit:
                time.sleep(0.01)
            assert _threads_of_teams() < max(during), path


@pytest.mark.skipif(torchs_team() is None, reason="torch has no libgomp here")
def test_the_thread_that_loaded_embeddings_has_no_team(classifiers: Callable[[str, dict[str, Any]], Path]) -> None:
    model = load(split(classifiers("bert", {})))
    torch.set_num_threads(2)
    torch.randn(4, 200_000).exp()
    before, limit = _threads_of_teams(), time.monotonic() + 600
    batch_of(model, Limits())
    while _threads_of_teams() >= before and time.monotonic() < limit:
        time.sleep(0.01)
    assert _threads_of_teams() < before


def _threads_of_teams() -> int:
    """Threads of this process that are not Python's."""
    return len(os.listdir("/proc/self/task")) - len(threading.enumerate())
