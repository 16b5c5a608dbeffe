"""LangChain's pipeline around a streamed model: the same answers, whole and as they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.builders import build_checkpoint
from tests.support.tiny_models import ALL, load, plain_model, split

pytest.importorskip("langchain_huggingface")
from langchain_core.prompts import PromptTemplate
from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline


def chain_of(model: Any, tokenizer: Any) -> Any:
    pipe = transformers.pipeline(
        "text-generation", model=model, tokenizer=tokenizer, max_new_tokens=8, do_sample=False, return_full_text=False
    )
    return HuggingFacePipeline(pipeline=pipe)


@pytest.fixture(params=[ALL, 0], ids=["resident", "streamed"])
def both(tmp_path: Path, request: pytest.FixtureRequest) -> list[Any]:
    source = build_checkpoint(tmp_path, "llama")
    model = load(split(source), request.param)
    return [chain_of(who, model.tokenizer) for who in (model, plain_model(source))]


def test_a_chain_of_a_prompt_and_the_model(both: list[Any]) -> None:
    prompt = PromptTemplate.from_template("the {thing} in")
    found, wanted = ((prompt | chain).invoke({"thing": "and"}) for chain in both)
    assert found == wanted
    assert len(found) > 4


def test_several_prompts_at_once(both: list[Any]) -> None:
    found, wanted = (chain.batch(["the", "on re", "and the in"]) for chain in both)
    assert found == wanted
    assert len(set(found)) == 3


def test_pieces_as_they_come(both: list[Any]) -> None:
    found, wanted = (list(chain.stream("the and")) for chain in both)
    assert "".join(found) == "".join(wanted)
    assert len(found) > 1


def test_a_chat(both: list[Any]) -> None:
    found, wanted = (ChatHuggingFace(llm=chain).invoke([("human", "the and?")]).content for chain in both)
    assert found == wanted
    assert len(found) > 4
