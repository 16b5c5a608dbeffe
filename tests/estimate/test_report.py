"""The generation estimate as text."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rabbitllm.engine.placement import TierContent
from rabbitllm.estimate.cost_model import DRAFTED, DraftedPass, DraftEstimate, Experts, GenerationEstimate, Speed
from rabbitllm.estimate.plan import Plan
from rabbitllm.estimate.report import generation_basis, moment, show, show_generations
from rabbitllm.estimate.split_estimate import CompressionEstimate, Rates

GB = 10**9
SPEEDS = (Speed("multiplying with bfloat16 on cpu", 28e9), Speed("reading past the page cache", 3.5e9))
LARGE = GenerationEstimate(
    None, None, (TierContent("cpu", "streamed", 80, 130 * GB),), 17 * GB, 130 * GB, True, 41.2, 97.0, SPEEDS
)
SMALL = GenerationEstimate("4bit", None, (TierContent("cpu", "resident", 80, GB),), GB, 0, False, 0.0171, 0.4, SPEEDS)
CACHED = dataclasses.replace(LARGE, compression="8bit", from_the_disk=False, token_seconds=None)


def plan_of(*generations: GenerationEstimate, devices: tuple[str, ...] = ("cpu",)) -> Plan:
    rates = Rates(None, None, {}, 2, "cpu")
    unset: dict[str, None] = dict.fromkeys(("commit", "compression", "max_disk", "anatomy", "choice"))
    return Plan(
        source="m",
        kind="local",
        label="m",
        **unset,  # type: ignore[arg-type]
        min_free_disk=0,
        disks=(),
        outlooks=(),
        memory_bytes=0,
        rates=rates,
        devices=devices,
        generations=generations,
    )


def text(plan: Plan, width: int = 80) -> list[str]:
    out = io.StringIO()
    show_generations(Console(file=out, width=80, highlight=False), plan)
    lines = out.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return lines


def test_a_line_for_each_compression() -> None:
    head, none, eight, four, legend, empty = text(plan_of(LARGE, CACHED, SMALL))
    assert " ".join(head.split()) == "generating on cpu in memory read/token first token a token"
    assert " ".join(none.split()) == "uncompressed 17.00 GB 130.00 GB, disk 1.6 min 41.2 s"
    assert " ".join(eight.split()) == "8bit 17.00 GB 130.00 GB, cached 1.6 min ?"
    assert " ".join(four.split()) == "4bit 1.00 GB nothing 400 ms 17 ms"
    assert "16" in legend
    assert empty == ""


def test_a_long_line_goes_on_indented_on_a_terminal() -> None:
    folder = Path("/home/hare/models/field/splitted_model.4bit")
    split = CompressionEstimate("4bit", folder, "finished", 10**9, finished_at="2026-01-02T03:04:05")
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    show(dataclasses.replace(plan_of(SMALL), outlooks=(split,)), console)
    assert "layer files: finished 2026-01-02 03:04 in\n  /home/hare" in console.file.getvalue()  # type: ignore[attr-defined]


def test_too_little_memory_is_shown_for_the_compressions_concerned() -> None:
    problem = "A pass takes at least 9.00 GB of memory; this process may take 1.00 GB."
    small = dataclasses.replace(LARGE, too_little_memory=problem)
    small_too = dataclasses.replace(CACHED, too_little_memory=problem)
    lines = text(plan_of(small, small_too, SMALL), width=200)  # a sentence is one line where there is no terminal
    assert lines[4] == f"uncompressed, 8bit cannot be loaded here: {problem}"


def test_several_devices_show_their_bytes() -> None:
    contents = (
        TierContent("cuda:0", "resident", 3, 2 * GB),
        TierContent("cuda:1", "packed", 3, GB),
        TierContent("cuda:1", "streamed", 1, 9),
    )
    lines = text(plan_of(dataclasses.replace(SMALL, placed=contents), devices=("cuda:0", "cuda:1")))
    assert lines[0] == "generating on cuda:0, cuda:1"
    assert lines[3].strip() == "2.00 GB on cuda:0, 1.00 GB on cuda:1"


def test_bytes_copied_to_a_gpu_are_shown() -> None:
    lines = text(plan_of(dataclasses.replace(LARGE, copied_bytes=9 * GB), SMALL, devices=("cuda:0",)))
    assert [line for line in lines if "copies" in line] == ["    each token copies 9.00 GB from host memory"]


def experts(**settings: Any) -> Experts:
    whole = Experts("cpu", "by routing", 24576, 480, 40 * GB, GB, 10 * GB, 0, 700_000_000, 0)
    return dataclasses.replace(whole, **settings)


def test_kept_experts_and_the_assumption_are_shown() -> None:
    routed = dataclasses.replace(LARGE, experts=(experts(),), found_token_seconds=0.5)
    lines = text(plan_of(routed))
    assert "    kept: 10.00 GB, of 40.00 GB of experts" in lines
    assert "    a token uses 1.00 GB of experts; 500 ms if all of these are kept" in lines
    assert len([line for line in lines if "uniform use" in line]) == 1
    none_kept = text(plan_of(dataclasses.replace(routed, experts=(experts(kept_bytes=0),))))
    assert "    a token uses 1.00 GB of experts" in none_kept


def test_experts_of_several_devices_are_counted_together() -> None:
    both = tuple(experts(device=f"cuda:{index}", host_bytes=5 * GB) for index in range(2))
    routed = dataclasses.replace(LARGE, placed=(), experts=both, found_token_seconds=0.5)
    lines = text(plan_of(routed, devices=("cuda:0", "cuda:1")))
    assert "    kept: 20.00 GB and 10.00 GB in pinned RAM, of 80.00 GB of experts" in lines
    assert "    10.00 GB on cuda:0, 10.00 GB on cuda:1" in lines


def test_resident_experts_need_no_line() -> None:
    stay = experts(tier="resident", kept_bytes=40 * GB, read_bytes=0)
    lines = text(plan_of(dataclasses.replace(SMALL, experts=(stay,), found_token_seconds=0.017)))
    assert not any("kept:" in line or "uniform" in line for line in lines)
    assert any("resident experts" in line for line in lines)


def test_an_obstacle_is_shown_once(tmp_path: Path) -> None:
    unknown = [GenerationEstimate(compression, "it is a hare") for compression in (None, "8bit", "4bit")]
    assert text(plan_of(*unknown)) == ["no speed estimate: it is a hare", ""]
    assert text(plan_of(unknown[0], SMALL))[0] == "no speed estimate of uncompressed: it is a hare"
    assert text(plan_of()) == []


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "?"), (0.0004, "0 ms"), (0.0171, "17 ms"), (0.9994, "999 ms"), (0.9996, "1.0 s"), (59.9, "59.9 s")]
    + [(60, "1.0 min"), (600, "10.0 min")],
)
def test_moments(seconds: float | None, said: str) -> None:
    assert moment(seconds) == said


def test_a_draft_has_two_lines_for_each_compression() -> None:
    passes = tuple(
        DraftedPass(n, t, 41.2 * f / t, f) for (t, n), f in zip(DRAFTED.items(), (1, 1.1, 1.2, 1.4), strict=True)
    )
    drafts = [
        DraftEstimate("mtp", None, 3 * GB, 0.1, passes),
        DraftEstimate("mtp"),
        DraftEstimate("mtp", "it has none."),
    ]
    generations = [dataclasses.replace(g, draft=d) for g, d in zip((LARGE, CACHED, SMALL), drafts, strict=True)]
    lines = [" ".join(line.split()) for line in text(plan_of(*generations))]
    assert lines[5:-1] == [
        "no estimate with this draft of 4bit: it has none.",
        "",
        "with the draft mtp, if half of the drafted tokens are right (assumed)",
        "memory 1.5 a pass 2 a pass 3 a pass 5 a pass",
        "uncompressed 3.00 GB 27.5 s 22.7 s 16.5 s 11.5 s",
        "pays above 1.00 1.10 1.20 1.40",
        "8bit none ? ? ? ?",
        "a pass: tokens that it brings, 1, 2, 4, 8 being drafted; pays above: so many",
    ]
    own = dataclasses.replace(LARGE, draft=DraftEstimate("self", None, 3 * GB, 0.1, passes))
    assert "    its first start adds 3.00 GB of copies to the split" in text(plan_of(own))
    refused = dataclasses.replace(SMALL, draft=drafts[0], too_little_memory="It does not fit.")
    assert not [line for line in text(plan_of(refused)) if "draft" in line]


def test_basis_names_each_rate_once() -> None:
    line = generation_basis(plan_of(LARGE, SMALL))
    assert line is not None
    assert line.count("bfloat16 on cpu 28.0 GB/s") == line.count("past the page cache 3.50 GB/s") == 1
    assert generation_basis(plan_of(GenerationEstimate(None, "no"))) is None
