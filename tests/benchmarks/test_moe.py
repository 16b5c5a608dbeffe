"""The benchmark of a mixture of experts: what routing is like, that the texts are known by heart, and its figures."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.experts import experts as moe
from benchmarks.experts import report as moe_report
from benchmarks.experts import routing
from benchmarks.experts.checkpoint import HABITS, SCALES, TEXTS, MoeWeights, make_moe_checkpoint, model_of, passage
from benchmarks.experts.report import MoeRun
from benchmarks.lib import published
from benchmarks.lib.generation import CappedCase, prepare_files
from benchmarks.lib.process import can_limit_memory
from benchmarks.lib.published import ELEMENT_BYTES
from tests.support.expert_use import PUBLISHED, PUBLISHED_OVERLAP, Routed, joined, of_tokens, trace, use_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe_checkpoint(tmp_path_factory.mktemp("moe"), "tiny")


def test_how_experts_are_used_is_measured() -> None:
    ids = np.array([[0, 1], [1, 2], [0, 1]], np.uint16)[:, None]
    use = use_of(of_tokens(ids, 8), [1 / 8, 2 / 8, 1.0])
    assert use.touched == 3 / 8
    assert use.hottest_share == 3 / 6
    assert use.overlap == 0.5
    assert use.reuse == pytest.approx({1 / 8: 1 / 6, 2 / 8: 1 / 6, 1.0: 3 / 6})


def test_routing_is_like_what_was_published() -> None:
    published = PUBLISHED
    text = routing.meanings(routing.FLAT, 0, published.tokens, 0)
    use = use_of(trace(routing.FLAT, [text], 2, 512, 10)[0], list(published.reuse))
    assert use.reuse == pytest.approx(published.reuse, abs=0.06)
    assert use.overlap == pytest.approx(PUBLISHED_OVERLAP, abs=0.06)
    assert use.hottest_share == pytest.approx(published.hottest_share, abs=0.08)


def test_skewed_texts_use_fewer_experts() -> None:
    uses = []
    for habits in HABITS.values():
        texts = [routing.meanings(habits, topic, 100, 0) for topic in (0, 1)]
        uses.append(use_of(joined(trace(habits, texts, 2, 128, 8)), [0.25]))
    assert uses[1].hottest_share > 1.2 * uses[0].hottest_share
    assert uses[1].reuse[0.25] > 1.1 * uses[0].reuse[0.25]


@pytest.mark.long
def test_generation_goes_on_with_the_text_and_routing_is_noted(checkpoint: Path) -> None:
    scale = SCALES["tiny"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    routed = Routed(model)
    for habits in HABITS:
        text = passage("tiny", habits, 1, 0, 10)
        made = model.generate(torch.tensor([text[:6]]), max_new_tokens=4, do_sample=False)
        assert made[0].tolist() == text
    trace = routed.trace()
    assert [len(one) for one in trace.passes()] == [6, *[1] * 3] * 2
    assert (trace.layers, trace.experts) == (scale.num_hidden_layers, scale.num_experts)
    assert all(len(set(ids.tolist())) == scale.num_experts_per_tok for ids in trace.ids.reshape(-1, trace.ids.shape[2]))
    touched = [len(np.unique(trace.ids[:, layer])) for layer in range(trace.layers)]
    assert min(touched) > scale.num_experts_per_tok


def test_a_hub_sends_what_is_written(checkpoint: Path) -> None:
    """In pieces of any size, which begin and end within a header and within tensors."""
    weights = MoeWeights("tiny")
    for shard in published.checkpoint(model_of("tiny"), 1).shards[:2]:
        places = sorted({0, 5, *range(100, shard.size, 999_983), shard.size})
        pieces = [b"".join(weights.of_file(shard, *place)) for place in itertools.pairwise(places)]
        assert b"".join(pieces) == (checkpoint / shard.name).read_bytes()


@pytest.mark.long
def test_a_whole_model_is_split_from_a_hub(checkpoint: Path, tmp_path: Path) -> None:
    """Into the layer files of its checkpoint, which the disk never holds."""
    runner = moe.RUNNERS["rabbitllm-2-4bit"]
    moe.split_whole("tiny", runner, tmp_path / "whole", tmp_path)
    prepare_files(runner, checkpoint, tmp_path / "local", tmp_path, "local")
    files = [[*sorted((tmp_path / name).rglob("*.safetensors"))] for name in ("whole", "local")]
    assert len(files[0]) > SCALES["tiny"].num_hidden_layers
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(*files, strict=True))
    assert [*tmp_path.glob("hub-home")] == []


def test_an_expert_is_as_large_as_is_said(checkpoint: Path) -> None:
    scale = SCALES["tiny"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    experts = model.model.layers[0].mlp.experts
    assert sum(p[0].numel() for p in experts.parameters()) * ELEMENT_BYTES == scale.expert_bytes


def test_passages_follow_one_another_in_their_text() -> None:
    each, tokens = SCALES["tiny"].text_tokens, 10
    first, second = (passage("tiny", "flat", 3, piece, tokens) for piece in (0, 1))
    assert first[0] == 3 * each
    assert first + second == list(range(first[0], first[0] + 2 * tokens))
    other = passage("tiny", "skewed", 3, 0, tokens)
    assert other[0] == first[0] + TEXTS // len(HABITS) * each


def test_what_was_read_is_compared_with_what_was_missed() -> None:
    case = CappedCase("rabbitllm-2", 25, "flat")
    run = MoeRun(case.name, 0, hits=2, missed=2, slots=2, step_bytes=[110, 110], missed_bytes=200)
    assert run.hit_rate == 0.5
    assert moe_report.of_missed([run], case) == [1.1]


def test_stages_of_a_step_are_told_where_something_is_read() -> None:
    case = CappedCase("rabbitllm-2", 25, "flat")
    steps: list[float] = [0.01, 0.01]
    resident, streamed = (
        MoeRun(case.name, 0, step_seconds=steps, stage_seconds=stages, wall_seconds=0.018)
        for stages in ({}, {"read": 0.004, "compute": 0.006})
    )
    told = "rabbitllm-2, flat, 25 %, ms a step (9.0 in the pass), threads added up: compute 3.0, read 2.0."
    assert told in moe_report.notes_on([streamed], [case])
    assert not [note for note in moe_report.notes_on([resident], [case]) if "ms a step" in note]


def test_rows_of_others_get_the_first_texts_only() -> None:
    rows = [case.name for case in moe.cases_of(list(moe.RUNNERS), [25], list(HABITS))]
    assert "transformers-disk, flat, 25 %" in rows
    assert "transformers-disk, skewed, 25 %" not in rows
    assert "transformers-disk, flat, no cap" not in rows
    assert {f"rabbitllm-2, {habits}, 25 %" for habits in HABITS} | {"rabbitllm-2, flat, no cap"} <= set(rows)


def test_llama_cpp_runs_with_the_texts_of_this_project() -> None:
    rows = ["rabbitllm-2-4bit", *moe.OF_SHAPES]
    cases = moe.cases_of(rows, [25], ["flat"])
    names = [case.name for case in cases]
    assert "llama.cpp, flat, no cap" in names
    assert "llama.cpp, flat, 25 %" not in names  # it would rewrite its weights into memory that it does not have
    assert "llama.cpp-no-repack, flat, 25 %" in names
    workload = moe.Workload(Path(), 1000, Path(), "tiny", 4, {})
    ours, theirs = (workload.requests(case) for case in cases[:2])
    assert ours == theirs
    assert {moe_report.our_case_for(case, cases).runner for case in cases} == {"rabbitllm-2-4bit"}


def test_requests_of_several_texts_warm_up_are_timed_and_are_counted() -> None:
    workload = moe.Workload(Path(), 1000, Path(), "tiny", 4, {}, sequences=6)
    requests, warm_up = workload.requests(CappedCase("rabbitllm-2-4bit", 50, "flat"))
    assert ([len(request) for request in requests], warm_up) == ([6, 6, 6], 1)
    assert workload.counted(CappedCase("rabbitllm-2-4bit", 50, "flat")) == 1
    passages = [tuple(passage) for request in requests for passage in request]
    assert len(set(passages[:6])) == 6
    assert {len(passage) for passage in passages} == {moe.PROMPT_TOKENS["tiny"] + 4}


def test_a_limit_has_the_rates_of_its_run() -> None:
    runs = [
        MoeRun("a", turn, step_seconds=[1.0, 1.0], missed_bytes=100, disk_speed=rate, memory_speed=1e3)
        for turn, rate in enumerate((5, 10, 90))
    ]
    limit = moe_report.Limit.of([*runs, MoeRun("b", 0, error="died", disk_speed=1.0)], touched=4000)
    assert limit is not None
    assert limit.disk.median == 10
    assert [limit.seconds(run) for run in runs] == [10.0, 5.0, 4.0]
    without_cap = MoeRun("a", 0, step_seconds=[1.0, 1.0], step_bytes=[60, 80], disk_speed=10.0, memory_speed=1e3)
    assert limit.seconds(without_cap) == 7.0
    assert moe_report.Limit.of([], 1) is None


@pytest.mark.long
@pytest.mark.skipif(not can_limit_memory(), reason="no control group with a memory limit can be made")
def test_this_project_under_a_cap_at_tiny_scale(tmp_path: Path) -> None:
    rows = ["rabbitllm-2", "rabbitllm-2-4bit"]
    given = ["--scale", "tiny", "--turns", "1", "--tokens", "4", "--shares", "50", "--habits", "flat"]
    assert moe.main([*given, "--work-dir", str(tmp_path), "--results", str(tmp_path / "r"), "--only", *rows]) == 0
    text = (tmp_path / "r.md").read_text()
    assert all(
        f"| {row} | 1/1 |" in text for row in (f"{rows[0]}, flat, no cap", *(f"{row}, flat, 50 %" for row in rows))
    )
    assert "ms a step" not in text  # so small a model fits: where nothing is read no clock is in a token's way
    assert (tmp_path / "r.svg").read_text().startswith("<?xml")
    assert not (tmp_path / "moe-run-tiny").exists()


@pytest.mark.long
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.skipif(not can_limit_memory(), reason="no control group with a memory limit can be made")
def test_published_codes_under_a_cap_at_tiny_scale(sequences: int, tmp_path: Path) -> None:
    given = ["--shapes", "gpt-oss-20b", "--scale", "tiny", "--turns", "1", "--tokens", "4", "--shares", "50"]
    given += ["--sequences", str(sequences)]
    given += ["--only", "rabbitllm-2"]  # llama.cpp would be compiled, which takes many minutes
    assert moe.main([*given, "--habits", "flat", "--work-dir", str(tmp_path), "--results", str(tmp_path / "r")]) == 0
    text = (tmp_path / "r.md").read_text()
    assert "gpt-oss-20b's shapes at 4bit" in text
    assert (f", {sequences} texts together" in text) == (sequences > 1)
    assert all(f"| rabbitllm-2, {row} | 1/1 |" in text for row in ("flat, no cap", "flat, 50 %"))
    assert "flat, 50 %, x limit" in text
