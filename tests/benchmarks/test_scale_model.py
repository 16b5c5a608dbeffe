"""The scale model: what it says of machines by hand, of what was measured, and that its results are written."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.scale import scale as scale_model
from benchmarks.scale.facts import EPYC, HOSTS, KAGGLE, RTX_4090, XEON, Figure, Host
from benchmarks.scale.pace import Outcome, cache_bytes, of_many, pass_over, spread, streaming
from benchmarks.scale.shape import COMPRESSIONS, DENSE, MIXTURE, MODELS, cache_of, drawn_for, shape_of
from rabbitllm.estimate.outline import published
from rabbitllm.generation.kv_cache import cost_by_cache
from tests.benchmarks.scale_checks import checks

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "benchmarks" / "results" / "scale-model.md").read_text(encoding="utf-8")
WHOLE = 1 << 50


def quick(name: str) -> Figure:
    return Figure(1e30, name)


def only(name: str, value: float) -> Host:
    """A machine of which one thing takes time."""
    nothing = {field: quick(field) for field in ("memory", "flops", "link", "disk", "network")}
    none = Figure(0.0, "a test")
    made = dataclasses.replace(RTX_4090, **nothing, latency=none, layer=none, routed_layer=none)
    return dataclasses.replace(made, **{name: Figure(value, "a test")})


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_each_limit_by_itself_is_bytes_over_a_rate(compression: str | None) -> None:
    drawn = drawn_for(DENSE, compression)
    parameters = next(model.parameters for model in published() if model.repository == DENSE)
    config = shape_of(DENSE, compression).config
    matrices = parameters - config["vocab_size"] * config["hidden_size"]  # of the embedding a row a token
    units = drawn.units(drawn.buffers, 1, 0)
    found = {
        name: pass_over(units, drawn.shape, only(name, 1e9), 8, 1, 100).seconds
        for name in ("disk", "link", "memory", "flops")
    }
    stored = drawn.shape.output_bytes * matrices / parameters
    assert found["disk"] == pytest.approx(stored / 1e9, rel=0.05)  # norms and what fits with the buffers stay
    assert found["link"] == pytest.approx(stored / 1e9, rel=0.05)
    keys = 8 * drawn.shape.cache.bytes_for(100)
    once = 2 * matrices if compression is None else stored + 4 * matrices
    assert found["memory"] == pytest.approx((once + keys) / 1e9, rel=0.02)
    assert found["flops"] == pytest.approx(8 * 2 * matrices / 1e9, rel=0.001)


def test_of_experts_those_that_the_rows_are_expected_to_ask_for() -> None:
    drawn = drawn_for(MIXTURE, None)
    config = drawn.shape.config
    one = 3 * 2 * config["hidden_size"] * config["moe_intermediate_size"]
    units = drawn.units(WHOLE, 1, 0)
    dense = sum(unit.made for unit in units)
    host = only("memory", 1e9)
    for rows in (1, 7, 1000):
        asked = 512 * (1 - (1 - 10 / 512) ** rows)
        states = rows * drawn.shape.cache.bytes_for(1)
        expected = (dense + 48 * asked * one + states) / 1e9
        assert pass_over(units, drawn.shape, host, rows, 1, 1).seconds == pytest.approx(expected, rel=1e-6)


def test_a_sequence_takes_what_its_cache_holds() -> None:
    """Of a model with both kinds of layers, compared with the cache that transformers makes."""
    config = {**shape_of(MIXTURE, None).config, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2}
    config |= {"hidden_size": 64, "vocab_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    settings = {name: value for name, value in config.items() if name != "architectures"}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3NextConfig(**settings), dtype=torch.bfloat16
    )
    with torch.inference_mode():
        cache = model(torch.ones(1, 64, dtype=torch.int64), use_cache=True).past_key_values
    assert cache_of(config) == cost_by_cache(cache)
    assert shape_of(DENSE, None).cache.every_token == 80 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("model", MODELS)
def test_a_quicker_machine_is_never_slower(model: str) -> None:
    drawn = drawn_for(model, "4bit")
    before = streaming(KAGGLE, drawn, 8)
    assert before is not None
    for name, figure in KAGGLE.figures().items():
        if name in ("disk", "link", "memory", "flops"):
            host = dataclasses.replace(KAGGLE, **{name: Figure(2 * figure.value, "a test")})
            after = streaming(host, drawn, 8)
            assert after is not None
            rounded = before.tokens_a_second * (1 - 1e-9)
            assert rounded <= after.tokens_a_second <= 2 * before.tokens_a_second


def test_keys_and_values_end_the_batch_and_the_disk_a_model() -> None:
    assert streaming(KAGGLE, drawn_for(DENSE, None), 1) is None  # 145 GB of layer files
    found = scale_model.alone(KAGGLE, DENSE, "4bit")
    assert streaming(KAGGLE, drawn_for(DENSE, "4bit"), 2 * found[-1].sequences) is None
    least = cache_bytes(shape_of(DENSE, "4bit"), found[-1].sequences) / 2 + drawn_for(DENSE, "4bit").buffers
    assert least <= KAGGLE.room.value < least + cache_bytes(shape_of(DENSE, "4bit"), found[-1].sequences) / 2


def test_spread_layers_stay_and_the_network_can_be_the_limit() -> None:
    drawn = drawn_for(DENSE, "4bit")
    found = spread(RTX_4090, drawn, 8)
    assert found is not None
    assert found.hosts * RTX_4090.room.value >= drawn.shape.output_bytes + found.hosts * cache_bytes(drawn.shape, 8)
    assert found.sequences == 8 * found.hosts
    slow = spread(dataclasses.replace(RTX_4090, network=Figure(1e4, "a test")), drawn, 8)
    assert slow is not None
    assert slow.bound == "network"
    assert slow.tokens_a_second < found.tokens_a_second
    rows = 8 * drawn.shape.hidden_bytes / 1e4 + RTX_4090.latency.value
    assert slow.step.seconds - found.step.seconds == pytest.approx(
        slow.hosts * (rows - 8 * drawn.shape.hidden_bytes / RTX_4090.network.value - RTX_4090.latency.value)
    )


def test_machines_in_groups() -> None:
    one = scale_model.alone(KAGGLE, DENSE, "4bit")[0]
    group = Outcome(3, 12, one.prompt, one.step, 30.0)
    assert [of_many(group, count) for count in (1, 2, 3, 8, 9)] == [0, 0, 30.0, 60.0, 90.0]


def test_other_prices() -> None:
    hosts = scale_model.with_prices(HOSTS, ["T4=0.25"])
    assert [host.hourly.value for host in hosts if host.name == "T4"] == [0.25]
    assert [host for host in hosts if host.name != "T4"] == [host for host in HOSTS if host.name != "T4"]
    for wrong in ("T5=1", "T4=cheap"):
        with pytest.raises(SystemExit, match="expected NAME=DOLLARS with a name of Kaggle"):
            scale_model.with_prices(HOSTS, [wrong])


def test_what_was_measured_is_near() -> None:
    found = checks()
    assert all(0.5 < one.ratio < 1.5 for one in found)
    by_read = [one for one in found if one.measured_read is not None and one.read > 1e9]
    assert by_read
    for one in by_read:
        assert one.read == pytest.approx(one.measured_read, rel=0.1)


@pytest.mark.long
def test_the_page_of_performance_has_rows_of_the_table_of_many_machines() -> None:
    page = (ROOT / "docs" / "PERFORMANCE.md").read_text(encoding="utf-8").splitlines()
    head, rule, *rows = scale_model.HEADINGS["1 to 1,000 machines"](HOSTS).markdown().strip().splitlines()
    begin = page.index(head)
    assert page[begin + 1] == rule
    shown = list(itertools.takewhile(lambda line: line.startswith("|"), page[begin + 2 :]))
    assert len(shown) >= 8
    assert set(shown) <= set(rows)


def test_every_figure_says_where_it_is_from() -> None:
    for host in (*HOSTS, EPYC, XEON):
        assert all(figure.source for figure in host.figures().values())
    table = scale_model.facts(HOSTS)
    assert {row[0].partition(":")[0] for row in table.rows} == {host.name for host in HOSTS}


@pytest.mark.parametrize("heading", scale_model.HEADINGS)
def test_the_page_has_the_tables(heading: str) -> None:
    assert scale_model.HEADINGS[heading](HOSTS).markdown() in PAGE


def test_the_page_has_what_they_come_to() -> None:
    assert [line for line in scale_model.notes() if f"* {line}" not in PAGE] == []


def test_the_picture() -> None:
    found = scale_model.picture()["panels"]
    assert len(found) == 4
    assert all(any(points for _, points, _ in panel["lines"]) for panel in found.values())
