"""Drafts in a server: the same answers in fewer passes, and their figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rabbitllm.auto_model import LoadRequest, prepare_with_draft
from rabbitllm.generation.request import Limits
from tests.server.serving import NAME, Running, running
from tests.server.test_metrics import samples
from tests.support.always_drafts import always_drafts  # noqa: F401  a fixture that applies by itself
from tests.support.mtp_heads import build_with_head, make_predictable
from tests.support.tiny_models import ALL, split

PROMPT = "the rain in the rain in the rain in"
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "extra_body": {"repetition_penalty": 1.05}},
    {"temperature": 0.01, "n": 3, "seed": 5},
    {"temperature": 1.2, "n": 2, "seed": 6},
    {"temperature": 0, "max_tokens": 7},
)


def asked(served: Running, **options: Any) -> tuple[list[tuple[str, Any, list[float]]], int]:
    """Text, end and probabilities of each answer, at once and as a stream, which are the same; and the usage."""
    body = {"model": NAME, "prompt": PROMPT, "max_tokens": 24, "logprobs": 2, **options}
    whole = served.openai().completions.create(**body)
    count = options.get("n", 1)
    answers = [(choice.text, choice.finish_reason, choice.logprobs.token_logprobs) for choice in whole.choices]  # type: ignore[union-attr]
    texts, ends, logprobs = [""] * count, [None] * count, [list[float]() for _ in range(count)]
    for part in served.openai().completions.create(**body, stream=True):
        for choice in part.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends[choice.index]  # type: ignore[call-overload]
            if choice.logprobs is not None:
                logprobs[choice.index] += choice.logprobs.token_logprobs or []  # type: ignore[arg-type]
    rounded = [(text, end, [round(value, 3) for value in values or ()]) for text, end, values in answers]
    assert rounded == [
        (text, end, [round(value, 3) for value in values])
        for text, end, values in zip(texts, ends, logprobs, strict=True)
    ]
    assert whole.usage is not None
    return rounded, whole.usage.completion_tokens


def test_the_same_answers_in_fewer_passes(split_folder: Path) -> None:
    answers, passes = [], []
    for draft in ("none", "auto"):
        with running(split_folder, limits=Limits(8, 32, draft=draft)) as served:  # type: ignore[arg-type]
            with served.http as client:
                before = client.get("/status").json()["drafts"]
            assert (before["name"], before["passes"]) == ("ngram" if draft == "auto" else "none", 0)
            text = asked(served, **OPTIONS[0])[0][0][0]
            stop = text[9:12]
            answers.append([asked(served, **options) for options in (*OPTIONS, {"temperature": 0, "stop": stop})])
            assert answers[-1][-1][0][0][:2] == (text[: text.index(stop)], "stop")
            figures = samples(served)
            passes.append(figures["rabbitllm_passes_total"])
            drafted, accepted = (figures[f"rabbitllm_{kind}_tokens_total"] for kind in ("drafted", "accepted"))
            assert 0 < accepted < drafted if draft == "auto" else drafted == 0
            with served.http as client:
                status = client.get("/status").json()
            assert (status["drafted_tokens"], status["accepted_tokens"]) == (drafted, accepted)
            brought = status["drafts"]
            assert sum(brought["right"]) == accepted
            assert brought["tokens"] == brought["passes"] + accepted
            if draft == "auto":
                assert brought["checked"][0] == figures['rabbitllm_checked_tokens_total{depth="1"}'] > 0
                assert 0 < figures["rabbitllm_draft_seconds_total"] == brought["seconds"] < brought["whole"]
            assert brought["name"] == ("ngram" if draft == "auto" else "none")
    assert answers[0] == answers[1]
    assert passes[1] < 0.95 * passes[0]


def test_heads_of_a_model_with_states(tmp_path: Path) -> None:
    """Whose requests are not packed: several at once, with a stop text, and from the prefix cache."""
    folder = split(make_predictable(build_with_head(tmp_path / "model", "qwen3_5"), "noisy"))
    answers, passes = [], []
    for draft in ("none", "mtp"):
        limits = Limits(8, 32, draft=draft)  # type: ignore[arg-type]
        with running(folder, limits=limits, budget=ALL, heads=True) as served:
            stop = asked(served, temperature=0, max_tokens=24)[0][0][0][9:12]
            options: tuple[dict[str, Any], ...] = ({"temperature": 0, "stop": stop}, *OPTIONS[2:])
            answers.append([asked(served, **{"max_tokens": 24, **each}) for each in options])
            figures = samples(served)
            passes.append(figures["rabbitllm_passes_total"])
            drafted, accepted = (figures[f"rabbitllm_{kind}_tokens_total"] for kind in ("drafted", "accepted"))
            assert 0 < accepted < drafted if draft == "mtp" else drafted == 0
    assert answers[0] == answers[1]
    assert passes[1] < 0.95 * passes[0]


def test_a_draft_model(split_folder: Path) -> None:
    """The model itself, all in memory: the same answers, in fewer passes; its KV caches are counted."""
    answers, passes, kept = [], [], []
    request = LoadRequest.of(str(split_folder), device="cpu", show_progress=False)
    draft = prepare_with_draft(request, request)[1]
    draft.generation_config.assistant_confidence_threshold = 0  # a random model is never sure
    for limits in (Limits(8, 32, draft="none"), Limits(8, 32, draft=draft)):
        with running(split_folder, limits=limits) as served:
            answers.append([asked(served, **options) for options in OPTIONS])
            figures = samples(served)
            passes.append(figures["rabbitllm_passes_total"])
            kept.append(figures["rabbitllm_accepted_tokens_total"])
    assert answers[0] == answers[1]
    assert passes[1] < 0.8 * passes[0]
    assert kept[0] == 0 < kept[1]
