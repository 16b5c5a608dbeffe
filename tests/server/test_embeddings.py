"""Embeddings by a checkpoint's own recipe, compared with plain transformers on one text at a time."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from rabbitllm.server import server
from rabbitllm.server.embeddings import MAX_TOKENS, PoolingRecipe, groups, recipe_in
from tests.server.serving import NAME, PATIENCE, PATIENT, Running, running, until
from tests.support.builders import COMMON, build_checkpoint, make_tokenizer
from tests.support.rounding import assert_as_near
from tests.support.tiny_models import split

TEXTS = ["the rain", "and then there was a longer one in the rain", "x"]


GENERATES = "Qwen3ForCausalLM"


def write_recipe(folder: Path, *chosen: str, modules_after: tuple[str, ...] = ("Normalize",)) -> None:
    """The files of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *modules_after]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{name}" if index else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    names = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    settings: dict[str, Any] = {f"pooling_mode_{name}": name in chosen for name in names}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **settings}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Qwen3-Embedding is published: the base model's tensors without a head, and a class that has a tied one."""
    folder = base_model(tmp_path_factory.mktemp("serve") / "qwen3", tied=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [GENERATES]}))
    return folder


def base_model(folder: Path, *, tied: bool) -> Path:
    """A checkpoint of a class without a head, as sentence-transformers publishes them."""
    build_checkpoint(folder, "qwen3", tied=tied, dtype=torch.float32)
    transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
    write_recipe(folder, "lasttoken")
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_a_base_model_serves_embeddings_and_refuses_text(tmp_path: Path, tied: bool) -> None:
    """Its config names a class without a head, which is the class that is loaded."""
    folder = base_model(tmp_path / "qwen3", tied=tied)
    plain = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    split_folder = split(folder)
    with running(split_folder, recipe=recipe_in(split_folder)) as served:
        assert type(served.model).__name__ == "Qwen3Model"
        inputs = served.model.tokenizer(TEXTS[0], return_tensors="pt")
        with torch.inference_mode():
            expected = torch.nn.functional.normalize(plain(**inputs).last_hidden_state[0, -1], dim=0).tolist()
        answer = served.post("/v1/embeddings", {"input": TEXTS[0]}).json()
        assert answer["data"][0]["embedding"] == expected
        for route, body in (
            ("/v1/completions", {"prompt": "the rain"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the rain"}]}),
        ):
            refused = served.post(route, body)
            assert refused.status_code == 400
            assert "Qwen3Model" in refused.json()["error"]["message"]
        with served.http as client:
            assert client.get("/health").json()["status"] == "ok"
            assert client.get("/metrics").status_code == 200


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[Running]:
    split_folder = split(checkpoint)
    recipe = recipe_in(split_folder)  # copied into the split directory
    assert recipe == PoolingRecipe("last", True)
    with running(split_folder, recipe=recipe) as server:
        yield server


@pytest.fixture(scope="module")
def states(checkpoint: Path, served: Running) -> list[torch.Tensor]:
    """Hidden states of each text, of shape (tokens, width)."""
    plain = transformers.AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [plain(**served.model.tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in TEXTS]


def test_vectors_are_those_of_the_model_alone(checkpoint: Path, served: Running, states: list[torch.Tensor]) -> None:
    client = served.openai()
    expected = [torch.nn.functional.normalize(state[-1], dim=0).tolist() for state in states]
    plain = transformers.AutoModel.from_pretrained(checkpoint, dtype=torch.float64).eval()
    with torch.inference_mode():
        encoded = [served.model.tokenizer(text, return_tensors="pt") for text in TEXTS]
        exact = torch.stack([plain(**inputs).last_hidden_state[0, -1] for inputs in encoded])
    exact = torch.nn.functional.normalize(exact, dim=-1)
    alone = [
        client.embeddings.create(model=NAME, input=text, encoding_format="float").data[0].embedding for text in TEXTS
    ]
    assert alone == expected
    answer = client.embeddings.create(model=NAME, input=TEXTS, encoding_format="float")
    together = [vector.embedding for vector in answer.data]
    assert_as_near(torch.tensor(together), torch.tensor(expected), exact)
    assert [vector.index for vector in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == sum(map(len, states))
    coded = client.embeddings.create(model=NAME, input=TEXTS)  # as base64, unless one says otherwise
    assert [vector.embedding for vector in coded.data] == together
    ids = [served.model.tokenizer(text)["input_ids"] for text in TEXTS]
    assert client.embeddings.create(model=NAME, input=ids, encoding_format="float").data[1].embedding == together[1]
    short = (
        client.embeddings.create(model=NAME, input=TEXTS[0], dimensions=8, encoding_format="float").data[0].embedding
    )
    assert np.linalg.norm(short) == pytest.approx(1, abs=1e-6)
    assert np.allclose(np.array(short) / short[0], np.array(expected[0][:8]) / expected[0][0], atol=1e-5)


def test_documents_are_ranked_by_their_cosine(served: Running, states: list[torch.Tensor]) -> None:
    units = [torch.nn.functional.normalize(state[-1], dim=0) for state in states]
    scores = [float(unit @ units[0]) for unit in (units[1], units[2], units[0])]
    order = sorted(range(3), key=lambda index: -scores[index])
    assert order[0] == 2  # the query itself
    texts = [TEXTS[1], TEXTS[2], TEXTS[0]]
    body: dict[str, Any] = {"model": NAME, "query": TEXTS[0], "documents": texts}
    answer = served.post("/v1/rerank", body).json()
    assert [result["index"] for result in answer["results"]] == order
    assert [result["relevance_score"] for result in answer["results"]] == pytest.approx(
        [scores[index] for index in order], abs=1e-5
    )
    assert answer["usage"]["total_tokens"] == sum(map(len, states)) + len(states[0])
    objects = {**body, "query": {"text": TEXTS[0]}, "documents": [{"text": text} for text in texts]}
    assert served.post("/v1/rerank", objects).json() == answer
    top = served.post("/v1/rerank", {**objects, "top_n": 1, "return_documents": True}).json()["results"]
    assert top == [{**answer["results"][0], "document": {"text": TEXTS[0]}}]
    for document in ({"text": "a", "title": "b"}, {"image": "a"}, {"text": 5}, 5):
        refused = served.post("/v1/rerank", {**body, "documents": ["a", document]})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "documents.1"


ENCODERS = {
    "bert": {},
    "gemma3_text": {"use_bidirectional_attention": True, "num_key_value_heads": 2, "head_dim": 16},
    "mpnet": {"max_position_embeddings": 66},
}


@pytest.mark.parametrize("family", ENCODERS)
def test_texts_of_an_encoder_are_not_padded(tmp_path: Path, family: str) -> None:
    """Each token would see the padding, in a model whose tokens see those after them."""
    settings = {**COMMON, "num_hidden_layers": 2, "num_key_value_heads": None, "pad_token_id": 1, **ENCODERS[family]}
    torch.manual_seed(0)
    plain = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(family, **settings)).eval()
    plain.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    write_recipe(tmp_path, "mean_tokens", modules_after=())
    split_folder = split(tmp_path)
    with running(split_folder, recipe=recipe_in(split_folder)) as served:
        texts = [*TEXTS, TEXTS[0][::-1]]
        data = served.post("/v1/embeddings", {"input": texts}).json()["data"]
        ids = [served.model.tokenizer(text, return_tensors="pt") for text in texts]
        with torch.inference_mode():
            expected = torch.stack([plain(row["input_ids"]).last_hidden_state[0].mean(dim=0) for row in ids])
        assert torch.allclose(torch.tensor([entry["embedding"] for entry in data]), expected, atol=1e-5)
        context = served.service.limits.context
        assert context is not None
        for tokens, status in ((context, 200), (context + 1, 400)):
            assert served.post("/v1/embeddings", {"input": [5] * tokens}).status_code == status


def test_values_that_are_no_numbers_are_refused(served: Running) -> None:
    hook = served.model.base_model.norm.register_forward_hook(lambda *given: given[-1] * math.nan)
    answers = [
        served.post("/v1/embeddings", {"input": TEXTS, "encoding_format": form}) for form in ("float", "base64")
    ] + [served.post("/v1/completions", {"prompt": "x y", "max_tokens": 0, "echo": True, "logprobs": 1})]
    hook.remove()
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "not_a_number")
    assert served.post("/v1/embeddings", {"input": TEXTS}).status_code == 200


def test_other_poolings(served: Running, states: list[torch.Tensor]) -> None:
    embedder = served.service.embedder
    assert embedder is not None
    ids = served.model.tokenizer(TEXTS[1])["input_ids"]
    for pooling, expected in (("cls", states[1][0]), ("mean", states[1].mean(dim=0))):
        embedder._recipe = PoolingRecipe(pooling, False)
        try:
            assert embedder.vectors([ids]) == [expected.tolist()]
        finally:
            embedder._recipe = PoolingRecipe("last", True)


def test_embeddings_are_computed_during_generations(served: Running) -> None:
    """Which go on meanwhile, and are what they are without."""
    body = {"prompt": "the rain", "max_tokens": 60, "temperature": 0}
    expected = served.post("/v1/completions", body).json()["choices"][0]["text"]
    vectors = served.post("/v1/embeddings", {"input": TEXTS}).json()["data"]
    texts: list[str] = []
    asking = [
        threading.Thread(target=lambda: texts.append(served.post("/v1/completions", body).json()["choices"][0]["text"]))
        for _ in range(3)
    ]
    for thread in asking:
        thread.start()
    assert served.post("/v1/embeddings", {"input": TEXTS}).json()["data"] == vectors
    for thread in asking:
        thread.join()
    assert texts == [expected] * 3


@contextlib.contextmanager
def held(served: Running, begins: Callable[[], object]) -> Iterator[threading.Event]:
    """A model whose passes say that they begin, and wait until they are let go."""
    goes_on = threading.Event()

    def wait(*_: Any) -> None:
        begins()
        goes_on.wait(PATIENCE)

    hook = served.model.base_model.norm.register_forward_pre_hook(wait)
    try:
        yield goes_on
    finally:
        goes_on.set()
        hook.remove()


SCORED = {"prompt": TEXTS[0], "echo": True, "logprobs": 1, "temperature": 0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": TEXTS[0]}),
        ("/v1/rerank", {"query": TEXTS[0], "documents": [TEXTS[2]]}),
        ("/v1/completions", {**SCORED, "max_tokens": 0}),
    ],
)
def test_only_a_begun_pass_is_computed_for_clients_that_left(served: Running, path: str, body: dict[str, Any]) -> None:
    """Until its end the request uses the model, which nothing may unload, and those behind it begin no passes."""
    passes, entry = list[int](), served.models.entries[0]
    with held(served, lambda: passes.append(1)) as goes_on:
        clients = []
        for users in (1, 2, 3):
            clients.append(http.client.HTTPConnection("127.0.0.1", served.port))
            clients[-1].request("POST", path, json.dumps(body))
            until(lambda users=users: entry.users == users and passes)
        for client in clients:
            client.close()
            time.sleep(0.2)  # the next one would begin its pass
        until(lambda: entry.users <= 1)
        assert entry.users == 1
        goes_on.set()
        assert served.post(path, body).status_code == 200
    assert len(passes) == 2
    until(lambda: entry.users == 0)


def test_shutdown_lets_requests_finish_that_no_batch_computes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the grace period, too; the second one needs the batch after its log probabilities."""
    monkeypatch.setattr(server, "FLUSH_SECONDS", 1.0)
    split_folder = split(checkpoint)
    with running(split_folder, recipe=recipe_in(split_folder), grace=PATIENCE) as served:
        begun, answers = threading.Semaphore(0), list[Any]()
        asking = [
            threading.Thread(target=lambda path=path, body=body: answers.append(served.post(path, body)))
            for path, body in (("/v1/embeddings", {"input": "x"}), ("/v1/completions", {**SCORED, "max_tokens": 2}))
        ]
        with held(served, begun.release):
            for thread in asking:
                thread.start()
            begun.acquire()
            until(lambda: served.models.entries[0].users == 2)
            served.server.end()
            time.sleep(2)  # longer than clients have to read answers
            with served.http as client:
                assert client.get("/health").json()["status"] == "shutting down"
        for thread in asking:
            thread.join()
        assert [answer.status_code for answer in answers] == [200, 200]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, None),
        ({"input": []}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [99_999]}, "input"),
        ({"input": "the " * 400}, "input"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_invalid_inputs_are_refused(served: Running, body: dict[str, Any], param: str | None) -> None:
    answer = served.post("/v1/embeddings", body)
    if param is None:  # this tokenizer begins every text with a token of its own
        assert answer.status_code == 200
    else:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@PATIENT
@given(st.lists(st.integers(1, 6000), max_size=40), st.booleans())
def test_groups_hold_each_input_once(lengths: list[int], pads: bool) -> None:
    passes = groups(lengths, pads=pads)
    assert pads or all(len({lengths[index] for index in group}) == 1 for group in passes)
    assert sorted(index for group in passes for index in group) == [*range(len(lengths))]
    assert all(len(group) == 1 or max(lengths[index] for index in group) * len(group) <= MAX_TOKENS for group in passes)


def test_recipes(tmp_path: Path) -> None:
    assert recipe_in(tmp_path) is None
    write_recipe(tmp_path, "mean_tokens", modules_after=())
    assert recipe_in(tmp_path) == PoolingRecipe("mean", False)
    write_recipe(tmp_path, "cls_token")
    assert recipe_in(tmp_path) == PoolingRecipe("cls", True)
    for chosen, modules in ((("max_tokens",), ()), (("cls_token", "mean_tokens"), ()), (("cls_token",), ("Dense",))):
        write_recipe(tmp_path, *chosen, modules_after=modules)
        assert recipe_in(tmp_path) is None
    (tmp_path / "modules.json").write_text("[1]")
    assert recipe_in(tmp_path) is None
    (tmp_path / "modules.json").write_text("{")
    assert recipe_in(tmp_path) is None


def test_damaged_files_of_a_recipe_are_none(tmp_path: Path) -> None:
    deep = "[" * 100_000
    for modules, pooling in ((deep, "{}"), (None, deep), (None, "[1]"), (None, "null")):
        write_recipe(tmp_path, "mean_tokens")
        assert recipe_in(tmp_path) is not None
        if modules is not None:
            (tmp_path / "modules.json").write_text(modules)
        (tmp_path / "1_Pooling" / "config.json").write_text(pooling)
        assert recipe_in(tmp_path) is None
