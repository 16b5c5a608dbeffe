"""The text format of metrics, and that what is counted is what happened."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from rabbitllm.server._metrics import Counts, Family, Histogram, text_format
from tests.server.serving import LIMITS, Running, running

LINE = re.compile(r'([a-z_]+)(\{(?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)+\})? (\S+)')


def test_labels_and_help_are_escaped() -> None:
    families = [
        Family("a", "counter", "back\\slash\nline", [("", {"l": 'q"uote\\ and\nline'}, 2)]),
        Family("b", "gauge", "half", [("", {}, 0.5)]),
        Family("c", "counter", "much", [("", {}, float("inf"))]),
    ]
    assert text_format(families).splitlines() == [
        "# HELP a back\\\\slash\\nline",
        "# TYPE a counter",
        'a{l="q\\"uote\\\\ and\\nline"} 2',
        "# HELP b half",
        "# TYPE b gauge",
        "b 0.5",
        "# HELP c much",
        "# TYPE c counter",
        "c +Inf",
    ]


def test_histograms_are_cumulative() -> None:
    histogram = Histogram((1, 2.5))
    for value in (0.5, 1, 2, 3, 100):
        histogram.observe(value)
    histogram.observe(2, 3)
    lines = text_format([histogram.family("h", "x")]).splitlines()[2:]
    assert lines == ['h_bucket{le="1"} 2', 'h_bucket{le="2.5"} 6', 'h_bucket{le="+Inf"} 8', "h_sum 112.5", "h_count 8"]


def test_counts_by_label() -> None:
    counts = Counts("kind")
    counts.add("x")
    counts.add("x")
    counts.add("y", amount=3)
    assert text_format([counts.family("n", "of")]).splitlines()[2:] == ['n{kind="x"} 2', 'n{kind="y"} 3']


def samples(served: Running) -> dict[str, float]:
    with served.http as client:
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    values: dict[str, float] = {}
    described: set[str] = set()
    for line in answer.text.splitlines():
        if line.startswith("#"):
            described.add(line.split()[2])
            continue
        matched = LINE.fullmatch(line)
        assert matched is not None, line
        assert re.sub("_(bucket|sum|count)$", "", matched[1]) in described or matched[1] in described
        values[matched[1] + (matched[2] or "")] = float(matched[3])
    return values


def test_the_server_counts(served: Running) -> None:
    before = samples(served)
    served.post("/v1/completions", {"prompt": "the rain", "max_tokens": 5, "n": 2, "temperature": 0})
    served.post("/v1/completions", {"prompt": 7})
    after = samples(served)

    def more(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert more("rabbitllm_generated_tokens_total") == 10
    assert more("rabbitllm_time_to_first_token_seconds_count") == 2
    assert more("rabbitllm_time_between_tokens_seconds_count") == 8
    assert more("rabbitllm_request_seconds_count") == 2
    assert more('rabbitllm_http_requests_total{endpoint="/v1/completions",status="200"}') == 1
    assert more('rabbitllm_http_requests_total{endpoint="/v1/completions",status="400"}') == 1
    assert more('rabbitllm_generations_total{reason="length"}') == 2
    assert 2 <= more("rabbitllm_passes_total") <= 5  # drafts may save some
    assert more("rabbitllm_streamed_bytes_total") > 0
    assert after["rabbitllm_running"] == 0
    assert after["rabbitllm_http_requests_open"] == 1  # the one that asks


def test_prompts_on_disk_are_counted_and_survive_a_restart(tmp_path: Path, split_folder: Path) -> None:
    name = "rabbitllm_prompt_cache_{}".format
    limits = replace(LIMITS, prompt_bytes=1 << 20, prompt_folder=tmp_path)
    body = {"prompt": [5 + number % 90 for number in range(150)], "max_tokens": 4, "temperature": 0}
    texts = []
    for saved in (0, 128):
        with running(split_folder, limits=limits) as served:
            texts.append(served.post("/v1/completions", body).json()["choices"][0]["text"])
            values = samples(served)
            assert values[name("saved_tokens_total")] == values["rabbitllm_kept_tokens_total"] == saved
            assert values[name("hits_total")] == (saved > 0) == (values[name("read_bytes_total")] > 0)
            assert values[name("limit_bytes")] == 1 << 20
        stored = sum(path.stat().st_size for path in tmp_path.rglob("*.kv"))
        assert served.batch.stats.prompt_bytes == stored > 0
    assert texts[0] == texts[1]
