"""Qwen3-Coder-Next on a machine that is not at hand (Kaggle's two T4): placed by the engine, timed by published rates.

What is computed, and by what: the layer files and the peak of the disk by the splitter's plan, from the published
config and tensor names; where everything goes by the engine's placement; what a token copies and reads by the same code
as `rabbitllm plan`. Seconds are those bytes over rates that others published: nothing hides behind anything else, and
Python and the launching of kernels cost nothing. What these cost on this machine's processor is measured, with a model
of as many layers whose matrices are next to nothing.

    python -m benchmarks.plan_coder_next [--results FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import command_line, qwen3_next
from benchmarks.models import MODELS
from benchmarks.published import Model, checkpoint
from benchmarks.report import Table, describe_machine
from rabbitllm.base.options import RunOptions
from rabbitllm.checkpoints.checkpoint import SourceIdentity
from rabbitllm.checkpoints.naming import assign_layers
from rabbitllm.engine.devices import CpuDevice, Device
from rabbitllm.engine.experts import expert_costs
from rabbitllm.engine.load_plan import LoadPlan, make_load_plan, unit_costs
from rabbitllm.engine.placement import Budget, place
from rabbitllm.estimate.cost_model import PROMPT_TOKENS, Experts, RoutedWork, UnitWork, experts_of, routed_work, work_of
from rabbitllm.formats.tensor_spec import TensorSpec
from rabbitllm.splitter.disk_budget import DiskBudget, ShardTransfer, disk_use
from rabbitllm.splitter.plan import PlannedFiles, PlannedShard, SplitPlan, make_plan

GIB = 1 << 30
VRAM_BYTES = int(15 * GIB * 0.9) - 15 * GIB // 16
"""Of a T4's 15 GiB, as Kaggle's notebooks report them, what the engine takes where it is given no limit."""
HOST_BYTES = 24 * GIB
"""Of some 31 GiB of RAM, to pin."""
MEMORY_RATE = 240e9
"""Of a T4's GDDR6, bytes a second: three quarters of its 320 (NVIDIA's data sheet)."""
LINK_RATE = 12e9
"""PCIe 3.0 x16, pinned: what was measured with a V100 (https://github.com/ZaidQureshi/bam/issues/54)."""
DISK_RATES = (0.5e9, 1e9)
"""Bytes a second; what a Kaggle disk gives is not published."""
LAYERS = 48
FOUND = {0.0: 0.0, 93 / 512: 0.435, 186 / 512: 0.620, 279 / 512: 0.720, 372 / 512: 0.789, 1.0: 1.0}
"""Share of the experts that is kept -> of those of a token that are found: a model of 512 experts, 10 a token, over 300
tokens, the least recently used one let go (https://github.com/kekzl/imp/pull/2061)."""
LITTLE = {"experts": 64, "hidden_size": 64, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Tiers:
    """A machine: its name, bytes of each GPU's memory, and of page-locked RAM."""

    name: str
    gpus: Sequence[int]
    host: int


MACHINES = (
    Tiers("2 x T4, 24 GiB of RAM locked", (VRAM_BYTES, VRAM_BYTES), HOST_BYTES),
    Tiers("2 x T4, 8 GiB locked", (VRAM_BYTES, VRAM_BYTES), 8 * GIB),
    Tiers("2 x T4, nothing locked", (VRAM_BYTES, VRAM_BYTES), 0),
    Tiers("1 x T4, 24 GiB locked", (VRAM_BYTES,), HOST_BYTES),
    Tiers("1 x T4, nothing locked", (VRAM_BYTES,), 0),
)


class PaperGpu(CpuDevice):
    """A GPU of which only the name and the kind are known; nothing can be done with it."""

    shares_host_memory = False

    def __init__(self, index: int) -> None:
        super().__init__()
        self.name = f"cuda:{index}"


@dataclass(frozen=True)
class Row:
    """One machine; bytes and seconds, a token but for `first_bytes`.

    Attributes:
        tiers: the machine.
        on_gpus, in_host: of the experts, the shares that are kept there.
        gpu_bytes: the most that weights and buffers take of one GPU.
        copied, read: of the experts, if all were used alike.
        dense: that all tokens multiply with, on the GPUs.
        first_bytes: what a prompt's experts are read from the disk.
        seconds: what is said of it, by name.
    """

    tiers: Tiers
    on_gpus: float
    in_host: float
    gpu_bytes: int
    copied: int
    read: int
    dense: int
    first_bytes: int
    seconds: Mapping[str, float]


def split_plan(model: Model, compression: str | None) -> SplitPlan:
    """Of the published checkpoint, from the names and shapes of its tensors."""
    made = checkpoint(model, 1)
    shards = []
    for shard in made.shards:
        specs = tuple(
            TensorSpec(p.tensor.name, "BF16", p.tensor.shape, shard.name, p.offset, p.tensor.nbytes)
            for p in shard.tensors
        )
        shards.append(PlannedShard(shard.name, shard.size, "published", specs, staged=True))
    names = [tensor.name for shard in shards for tensor in shard.tensors]
    source = SourceIdentity("hub", model.repository, None, {})
    return make_plan(source, tuple(shards), assign_layers(names, "qwen3_next"), compression)


def drawn_on(model: Model, plan: SplitPlan, machines: Sequence[Tiers]) -> list[LoadPlan]:
    """The model on each machine."""
    made = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "config.json").write_text(json.dumps(model.config))
        gpus: list[Device] = [PaperGpu(0)]
        options = RunOptions(dtype="float16", max_memory={"cuda:0": 0, "cpu": 0}, show_progress=False)
        drawn = make_load_plan(PlannedFiles(plan, home), options, home, gpus)
        costs = unit_costs(drawn.model, drawn.sources, drawn.experts)
        experts = expert_costs(drawn.experts)
        for tiers in machines:
            budgets = [Budget(f"cuda:{at}", nbytes, False) for at, nbytes in enumerate(tiers.gpus)]
            placement = place(costs, budgets, host_bytes=tiers.host, experts=experts)
            made.append(dataclasses.replace(drawn, placement=placement))
    return made


def row_of(tiers: Tiers, drawn: LoadPlan) -> Row:
    """What a token takes there."""
    routed, units = routed_work(drawn), work_of(drawn)
    experts = experts_of(routed)
    dense = sum(product.nbytes for unit in units for product in unit.products)
    stored = sum(own.stored_bytes for own in experts)
    copied = sum(own.copied_bytes for own in experts) + sum(unit.uploaded for unit in units)
    read = sum(own.read_bytes for own in experts) + sum(unit.streamed for unit in units)
    of_memory = dense / MEMORY_RATE + _experts_seconds(routed, drawn.model.config)
    total = sum(own.used_bytes for own in experts)
    here = sum(own.kept_bytes for own in experts) / stored
    in_host = sum(own.host_bytes for own in experts) / stored
    unkept, unfound = ((1 - found(share)) * total for share in (here, here + in_host))
    seconds = {"weights in VRAM": of_memory, "copies": copied / LINK_RATE}
    for rate in DISK_RATES:
        disk = f"{rate / 1e9:g} GB/s"
        seconds[f"alike, {disk}"] = of_memory + copied / LINK_RATE + read / rate
        seconds[f"published, {disk}"] = of_memory + unkept / LINK_RATE + unfound / rate
    return Row(
        tiers=tiers,
        on_gpus=here,
        in_host=in_host,
        gpu_bytes=max(_taken(drawn, units, experts, budget.device) for budget in drawn.placement.budgets),
        copied=copied,
        read=read,
        dense=dense,
        first_bytes=round(sum(one.touched_bytes(PROMPT_TOKENS) for one in routed)),
        seconds=seconds,
    )


def found(share: float) -> float:
    """Of a token's experts, those that are found if a share is kept, as published."""
    return float(np.interp(share, list(FOUND), list(FOUND.values())))


def _experts_seconds(routed: Sequence[RoutedWork], config: Any) -> float:
    """Experts are dequantized, then multiplied with: codes read, float16 written and read."""
    made = 2 * 3 * config.hidden_size * config.moe_intermediate_size
    return sum(one.used * (one.expert_bytes + 2 * made) for one in routed) / MEMORY_RATE


def _taken(drawn: LoadPlan, units: Sequence[UnitWork], experts: Sequence[Experts], device: str) -> int:
    pools = sum(pool.nbytes for pool in drawn.placement.pools if pool.device == device)
    return pools + sum(product.nbytes for unit in units if unit.device == device for product in unit.products)


def overhead_seconds(layers: int = LAYERS, tokens: int = 24) -> float:
    """A token of a model with as many layers and experts a token, whose matrices are next to nothing, on this CPU."""
    import transformers

    from rabbitllm import AutoModel

    settings = {**qwen3_next.QWEN3_CODER_NEXT, **qwen3_next.TINY, **LITTLE, "num_hidden_layers": layers}
    settings |= {
        "num_experts": settings.pop("experts"),
        "num_experts_per_tok": 10,
        "shared_expert_intermediate_size": 32,
    }
    settings |= {"bos_token_id": None, "eos_token_id": None}
    made: Any = transformers
    config = made.Qwen3NextConfig(**{name: value for name, value in settings.items() if name != "architectures"})
    with tempfile.TemporaryDirectory() as folder:
        made.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(f"{folder}/model")
        room = {"cpu": int(0.6 * sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors")))}
        model = AutoModel.from_pretrained(f"{folder}/model", device="cpu", max_memory=room, show_layer_progress=False)
        assert model.placement.pools
        clock = _Clock()
        prompt = torch.ones(1, PROMPT_TOKENS, dtype=torch.int64)
        mask = torch.ones_like(prompt)
        model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, do_sample=False, streamer=clock)
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(clock.times[2:]))


class _Clock:
    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Any) -> None:
        """The prompt, then each token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do."""


def table_of(rows: Sequence[Row]) -> Table:
    """A line a machine."""
    slow, fast = (f"{rate / 1e9:g} GB/s" for rate in DISK_RATES)
    headings = ["machine", "experts in VRAM", "in RAM", "GiB of a GPU", "MB copied", "MB read", "VRAM s", "copies s"]
    headings += [f"s/token, disk {slow}", f"{fast}", f"as published, {slow}", f"{fast}"]
    lines = []
    for row in rows:
        figures = [f"{row.on_gpus:.0%}", f"{row.in_host:.0%}", f"{row.gpu_bytes / GIB:.1f}"]
        figures += [f"{row.copied / 1e6:.0f}", f"{row.read / 1e6:.0f}"]
        figures += [f"{row.seconds[name]:.3f}" for name in ("weights in VRAM", "copies")]
        figures += [f"{row.seconds[f'{how}, {disk}']:.2f}" for how in ("alike", "published") for disk in (slow, fast)]
        lines.append([row.tiers.name, *figures])
    return Table(headings, lines)


def disk_of(plan: SplitPlan) -> dict[str, int]:
    """The peak of the split directory, by the way that shards arrive."""
    return {way.value: disk_use(plan, DiskBudget(Path()), way).created for way in ShardTransfer}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parent
    parser.add_argument("--results", type=Path, default=here / "results" / "plan-coder-next", help="without suffix")
    options = command_line.parsed(parser, arguments)
    name, machines, layers = ("tiny-moe", MACHINES[:1], 4) if options.smallest else ("coder-next", MACHINES, LAYERS)
    model = MODELS[name]
    plans = {name or "none": split_plan(model, name) for name in (None, "8bit", "4bit")}
    disks = {name: {"layer files": plan.output_bytes, **disk_of(plan)} for name, plan in plans.items()}
    rows = [row_of(*pair) for pair in zip(machines, drawn_on(model, plans["4bit"], machines), strict=True)]
    overhead, machine = overhead_seconds(layers), describe_machine(here)
    disk_table = Table(
        ["", *disks], [[what, *(f"{found[what] / 1e9:.1f}" for found in disks.values())] for what in disks["none"]]
    )
    table = table_of(rows)
    notes = [
        "Computed from published names, shapes and rates; nothing of this was measured on a T4 or on Kaggle.",
        f"Rates: {MEMORY_RATE / 1e9:g} GB/s of VRAM (three quarters of 320), {LINK_RATE / 1e9:g} GB/s of copies from "
        "page-locked RAM, one GPU after the other; the disk as it says.",
        "s/token: as if all experts were used alike; as published: with what a model of as many experts found of them "
        "(https://github.com/kekzl/imp/pull/2061). Each is the sum of VRAM, copies and disk, nothing behind another.",
        f"Without Python and launches. On this machine's CPU a model of {layers} such layers, 10 experts a token and "
        f"matrices of next to nothing takes {overhead:.2f} s a token (measured).",
        f"The first token of a prompt of {PROMPT_TOKENS} reads {rows[0].first_bytes / 1e9:.1f} GB of experts.",
    ]
    title = "Qwen3-Coder-Next at 4bit on machines that were not at hand: computed, not measured"
    listed = "\n".join(f"* {note}" for note in notes)
    print(f"{title}\n\n{table.text()}\n\nGB of disk\n{disk_table.text()}\n\n{listed}")
    text = f"# {title}\n\n{table.markdown()}\n\n## Disk, GB\n\n{disk_table.markdown()}\n\n{listed}\n"
    options.results.with_name(options.results.name + ".md").write_text(text)
    record = {"title": title, "machine": machine, "notes": notes, "disk": disks, "overhead_seconds": overhead}
    everything = {**record, "rows": [asdict(row) for row in rows]}
    options.results.with_name(options.results.name + ".json").write_text(json.dumps(everything, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
