"""Tokens a second and dollars of large models on machines that are not at hand, computed from rates and sizes.

    python -m benchmarks scale [--price NAME=DOLLARS ...] [--results FILE]

Several machines either stream independently ("alone"), or share the layers, with micro-batches that go around
("spread"). `scale/pace.py` has the model, `scale/facts.py` rates, prices and their sources;
tests/benchmarks/scale_checks.py compares it with measured figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.lib import command_line, pictures, report
from benchmarks.lib.report import Table
from benchmarks.scale.facts import EPYC, HOSTS, XEON, Figure, Host
from benchmarks.scale.pace import (
    ANSWER,
    PROMPT,
    Outcome,
    batches,
    dollars,
    groups,
    of_many,
)
from benchmarks.scale.shape import COMPRESSIONS, DENSE, MIXTURE, MODELS, drawn_for, fits_disk, shape_of

NAMES = {DENSE: "72B dense", MIXTURE: "80B-A3B"}
COUNTS = (1, 10, 100, 1000)
NOTHING = "-"


@functools.cache
def alone(host: Host, model: str, compression: str | None) -> tuple[Outcome, ...]:
    """One machine, with 1, 2, 4 … sequences."""
    return tuple(batches(host, drawn_for(model, compression)))


@functools.cache
def spread(host: Host, model: str, compression: str | None) -> tuple[Outcome, ...]:
    """Machines that share the layers, with micro-batches of 1, 2, 4 … sequences."""
    return tuple(groups(host, drawn_for(model, compression)))


WAYS: Mapping[str, Callable[[Host, str, str | None], tuple[Outcome, ...]]] = {"alone": alone, "spread": spread}


def best_of(way: str, host: Host, model: str, count: int) -> tuple[str | None, Outcome] | None:
    """The compression and batch with the most tokens a second on so many machines; None without any."""
    choices = [(c, outcome) for c in COMPRESSIONS for outcome in WAYS[way](host, model, c) if outcome.hosts <= count]
    return max(choices, key=lambda pair: of_many(pair[1], count), default=None)


def figure(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


Row = tuple[Host, str, str | None]


def rows(hosts: Sequence[Host]) -> list[Row]:
    """Every machine with every model at every compression."""
    return list(itertools.product(hosts, MODELS, COMPRESSIONS))


def _named(host: Host, model: str, compression: str | None) -> str:
    return f"{host.name}, {NAMES[model]}, {compression or 'bf16'}"


def one_machine(hosts: Sequence[Host]) -> Table:
    """Batch 1, and the best batch."""
    headings = [
        "machine, model",
        "layer files GB",
        "tokens/s of 1",
        "limit of 1",
        "best batch",
        "tokens/s",
        "limit",
        "$/million",
    ]
    lines = []
    for host, model, compression in rows(hosts):
        outcomes = alone(host, model, compression)
        line = [_named(host, model, compression)]
        line.append(f"{shape_of(model, compression).output_bytes / 1e9:.1f}")
        best = max(outcomes, key=lambda outcome: outcome.tokens_a_second, default=None)
        if best is None:
            why = "keys, values" if fits_disk(shape_of(model, compression), host) else "not on its disk"
            line += [NOTHING, why, NOTHING, NOTHING, NOTHING, NOTHING]
        else:
            line += [figure(outcomes[0].tokens_a_second), outcomes[0].bound]
            line += [str(best.sequences), figure(best.tokens_a_second), best.bound, _money(host, best)]
        lines.append(line)
    return Table(headings, lines)


def _money(host: Host, outcome: Outcome) -> str:
    return f"{dollars(host, outcome):.2f}" if host.hourly.value else "free"


def many_machines(hosts: Sequence[Host]) -> Table:
    """Tokens a second of 1 to 1,000 machines, each alone and with the layers spread, at the best compression."""
    headings = ["machine, model"]
    headings += [*(f"{count:,}" for count in COUNTS), "$/million", "machines in a group", "limit"]
    lines = []
    for host, model, way in itertools.product(hosts, MODELS, WAYS):
        best_by_count = {count: best_of(way, host, model, count) for count in COUNTS}
        last = best_by_count[COUNTS[-1]]
        assert last is not None
        line = [f"{host.name}, {NAMES[model]}, {way}, {last[0] or 'bf16'}"]
        line += [figure(of_many(best[1], count)) if best else NOTHING for count, best in best_by_count.items()]
        lines.append([*line, _money(host, last[1]), str(last[1].hosts), last[1].bound])
    return Table(headings, lines)


def facts(hosts: Sequence[Host]) -> Table:
    """Every rate with its source."""
    lines = []
    for host in hosts:
        for name, rate in host.figures().items():
            if rate.source != "not asked for":
                source = f"assumed: {rate.source}" if rate.is_assumed else rate.source
                lines.append([f"{host.name}: {_WORDS[name]}", _in_units(name, rate), source])
    return Table(["figure", "value", "from"], lines)


_WORDS: Mapping[str, str] = {
    "room": "for weights, keys and values, of each GPU",
    "memory": "memory of products",
    "flops": "operations",
    "link": "to a GPU",
    "host": "RAM beside the GPUs",
    "disk": "disk",
    "disk_room": "room on the disk",
    "network": "to another machine",
    "latency": "of a message",
    "hourly": "price",
    "layer": "of a layer beside its weights",
    "routed_layer": "of one with experts",
    "codes": "memory of products from codes",
}
_BYTES, _TIMES = ("room", "host", "disk_room"), ("latency", "layer", "routed_layer")


def _in_units(name: str, rate: Figure) -> str:
    if name == "hourly":
        return f"${rate.value:.2f} an hour"
    if name == "flops":
        return f"{rate.value / 1e12:.3g} TFLOPS"
    if name in _TIMES:
        return f"{rate.value * 1e3:.3g} ms"
    return f"{rate.value / 1e9:.4g} GB" + ("" if name in _BYTES else "/s")


HEADINGS: Mapping[str, Callable[[Sequence[Host]], Table]] = {
    "One machine": one_machine,
    "1 to 1,000 machines": many_machines,
    "Rates": lambda hosts: facts((*hosts, EPYC, XEON)),
}


def tables(hosts: Sequence[Host] = HOSTS) -> dict[str, Table]:
    """All tables, by heading."""
    return {heading: make(hosts) for heading, make in HEADINGS.items()}


def notes(hosts: Sequence[Host] = HOSTS) -> list[str]:
    """A sentence on each result."""
    said = []
    for host, model in itertools.product(hosts, MODELS):
        single, group = (best_of(way, host, model, 100) for way in WAYS)
        if single is not None and group is not None:
            times = of_many(group[1], 100) / of_many(single[1], 100)
            waited = f"{group[1].waited:.0%} of the time on its way between machines"
            said.append(f"{host.name}, {NAMES[model]}: 100 make {times:.1f} times as much spread as alone, {waited}.")
        if single is not None and host.weekly_hours < 168:
            weekly = single[1].tokens_a_second * host.weekly_hours * 3600 / 1e6
            said.append(f"{host.name}, {NAMES[model]}: {weekly:.2f} million tokens in a week of one person.")
    return said


def with_prices(hosts: Sequence[Host], prices: Sequence[str]) -> tuple[Host, ...]:
    """Machines at other prices, given as NAME=DOLLARS.

    Raises:
        SystemExit: no such machine, or no number.
    """
    by_name = {host.name: host for host in hosts}
    for word in prices:
        name, _, price = word.partition("=")
        if name not in by_name or not price.replace(".", "", 1).isdigit():
            raise SystemExit(f"--price {word}: expected NAME=DOLLARS with a name of {', '.join(by_name)}.")
        by_name[name] = dataclasses.replace(by_name[name], hourly=Figure(float(price), "given"))
    return tuple(by_name.values())


MACHINES = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 300, 500, 700, 1000)


def picture(hosts: Sequence[Host] = HOSTS) -> pictures.Picture:
    """Tokens a second over machines, and dollars over the batch."""
    drawn: dict[str, tuple[str, list[tuple[str, Mapping[int, float], bool]]]] = {}
    for model in MODELS:
        lines: list[tuple[str, Mapping[int, float], bool]] = []
        for host, way in itertools.product(hosts, WAYS):
            best_by_count = {count: best_of(way, host, model, count) for count in MACHINES}
            points = {count: of_many(best[1], count) for count, best in best_by_count.items() if best is not None}
            lines.append((host.name, points, way == "spread"))
        drawn[f"{NAMES[model]}: tokens a second"] = ("machines", lines)
    for model in MODELS:
        lines = []
        for host in hosts:
            outcomes = alone(host, model, "4bit") if host.hourly.value else ()
            lines.append((host.name, {outcome.sequences: dollars(host, outcome) for outcome in outcomes}, False))
        drawn[f"{NAMES[model]} at 4bit, one machine: $ a million tokens"] = ("batch", lines)
    title = f"Computed, not measured: {PROMPT} tokens asked, {ANSWER} made; dashed: layers spread over machines"
    return pictures.panels(title, drawn)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=command_line.RESULTS / "scale-model", help="without suffix")
    parser.add_argument("--price", nargs="+", default=[], metavar="NAME=DOLLARS", help="an hour of a machine")
    options = command_line.parsed(parser, arguments)
    hosts = with_prices(HOSTS, options.price)
    (first, table), *more = tables(hosts).items()
    title, drawn = f"Computed, not measured. {first}", picture(hosts)
    report.write(options.results, title, table, notes(hosts), picture=drawn, more=dict(more))
    return 0
