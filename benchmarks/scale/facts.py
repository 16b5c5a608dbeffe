"""Rates and prices of machines, published or assumed, each with its source.

Only figures with "measured" in their source were measured here. A price is a provider's on a date; `--price` replaces
it.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Figure:
    """A number with its source; `is_assumed` for a guess."""

    value: float
    source: str
    is_assumed: bool = False


@dataclass(frozen=True)
class Host:
    """One machine; bytes, seconds, bytes a second.

    Attributes:
        name: in tables.
        gpus: their number; 0 for computing on the processor.
        room: bytes for weights and KV cache on each GPU, or in memory without a GPU.
        memory: read rate of the memory that products use.
        flops: 16-bit operations a second, dense.
        link: rate to one GPU; None without a GPU.
        host: bytes for weights in the host's memory of a machine with GPUs.
        disk: read rate.
        disk_room: bytes for layer files.
        network: rate to another machine.
        latency: of a message to another machine.
        hourly: dollars.
        weekly_hours: of availability.
        codes: read rate of quantized weights in products that use their codes; None where each use dequantizes them.
        layer: seconds of a decoder layer besides those for its weights.
        routed_layer: the same with experts.
        reads_in_turn: whether reading hides nothing, as a copy out of the page cache.
    """

    name: str
    gpus: int
    room: Figure
    memory: Figure
    flops: Figure
    link: Figure | None
    host: Figure
    disk: Figure
    disk_room: Figure
    network: Figure
    latency: Figure
    hourly: Figure
    layer: Figure
    routed_layer: Figure
    weekly_hours: float = 168.0
    codes: Figure | None = None
    reads_in_turn: bool = False

    def figures(self) -> dict[str, Figure]:
        """All figures of the machine, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Figure)}


REACHED_MEMORY, REACHED_FLOPS = 0.75, 0.5
"""Shares of a data sheet's memory rate and operations that products are assumed to reach."""
_T4_SHEET = "PNY's product brief of the T4, https://manualmachine.com/pny/tcst4mpb/8129101-user-manual"
_T4_FLOPS = "65 TFLOPS in FP16, https://sysrqmts.com/en/gpus/nvidia/tesla/t4"
_4090_SHEET = "https://waredb.com/processor/nvidia-geforce-rtx-4090"
_H200_SHEET = "https://geektopia.es/es/technology/2023/11/13/noticias/nvidia-anuncia-la-aceleradora-h200"
_H200_FLOPS = "989 TFLOPS, half of the 1,979 that NVIDIA states with sparsity"
_LAUNCHES = "some 25 kernels at 20 microseconds of Python and launching"
_ROUTED = "8 ms a layer on an Intel Xeon (plan_coder_next in benchmarks/NOTES.md), halved"


def _reached(value: float, share: float, source: str) -> Figure:
    return Figure(share * value, f"{share:g} of {source}")


def _assumed(value: float, source: str) -> Figure:
    return Figure(value, source, is_assumed=True)


_LAYER, _ROUTED_LAYER = _assumed(0.5e-3, _LAUNCHES), _assumed(4e-3, _ROUTED)
_T4_MEMORY = _reached(320e9, REACHED_MEMORY, f"320 GB/s, {_T4_SHEET}")
_T4_COMPUTE = _reached(65e12, REACHED_FLOPS, _T4_FLOPS)
_T4_LINK = Figure(12e9, "PCIe 3.0 x16, measured with a V100: https://github.com/ZaidQureshi/bam/issues/54")
_T4_ROOM = Figure(int(15 * GIB * 0.9) - 15 * GIB // 16, "of 15 GiB, the engine's default")

KAGGLE = Host(
    "Kaggle, 2 x T4",
    gpus=2,
    room=_T4_ROOM,
    memory=_T4_MEMORY,
    flops=_T4_COMPUTE,
    link=_T4_LINK,
    host=Figure(24 * GIB, "of some 31 GiB of RAM that users report"),
    disk=_assumed(0.5e9, "none is published"),
    disk_room=Figure(57 * GIB, "the least that users report, docs/guides/kaggle-and-colab.md"),
    network=_assumed(0.125e9, "1 Gbit/s; notebooks cannot be called from outside, so this needs a relay"),
    latency=_assumed(50e-3, "over a relay"),
    hourly=Figure(0.0, "free, for some 30 hours a week and person"),
    layer=_LAYER,
    routed_layer=_ROUTED_LAYER,
    weekly_hours=30.0,
)
T4 = Host(
    "T4",
    gpus=1,
    room=_T4_ROOM,
    memory=_T4_MEMORY,
    flops=_T4_COMPUTE,
    link=_T4_LINK,
    host=_assumed(12 * GIB, "of the 16 GiB of a small machine with one T4"),
    disk=_assumed(1e9, "a local NVMe of such a machine"),
    disk_room=_assumed(125e9, "a local NVMe of such a machine"),
    network=_assumed(1.25e9, "10 Gbit/s"),
    latency=_assumed(0.5e-3, "within a data centre"),
    hourly=_assumed(0.50, "between spot, 0.07 (https://gputracker.dev, March 2026), and the large clouds' list prices"),
    layer=_LAYER,
    routed_layer=_ROUTED_LAYER,
)
RTX_4090 = Host(
    "RTX 4090",
    gpus=1,
    room=_assumed(21 * GIB, "of 24 GiB, the share that the engine takes of a T4"),
    memory=_reached(1008e9, REACHED_MEMORY, f"1,008 GB/s, {_4090_SHEET}"),
    flops=_reached(165.15e12, REACHED_FLOPS, f"165 TFLOPS in BF16, {_4090_SHEET}"),
    link=_assumed(24e9, "PCIe 4.0 x16: twice the measured 3.0"),
    host=_assumed(48 * GIB, "of 64 GiB"),
    disk=_assumed(3.5e9, "an NVMe like that of docs/PERFORMANCE.md"),
    disk_room=_assumed(500e9, "an NVMe of a rented machine"),
    network=_assumed(0.125e9, "1 Gbit/s between rented machines"),
    latency=_assumed(5e-3, "between rented machines"),
    hourly=Figure(0.34, "RunPod on demand, March 2026: https://deploybase.ai/articles/rtx-4090-cloud"),
    layer=_LAYER,
    routed_layer=_ROUTED_LAYER,
)
H200 = Host(
    "H200",
    gpus=1,
    room=_assumed(120e9, "of 141 GB, the share that the engine takes of a T4"),
    memory=_reached(4800e9, REACHED_MEMORY, f"4.8 TB/s, {_H200_SHEET}"),
    flops=_reached(989e12, REACHED_FLOPS, _H200_FLOPS),
    link=_assumed(48e9, "PCIe 5.0 x16: four times the measured 3.0"),
    host=_assumed(180e9, "an eighth of a machine with eight"),
    disk=_assumed(5e9, "an NVMe shared by eight"),
    disk_room=_assumed(2e12, "an NVMe shared by eight"),
    network=_assumed(40e9, "400 Gbit/s less a fifth"),
    latency=_assumed(0.05e-3, "InfiniBand and a library"),
    hourly=Figure(3.50, "the specialised clouds' lowest, May 2026: https://www.mercatus-ai.com/blog/cloud-gpu-pricing"),
    layer=_LAYER,
    routed_layer=_ROUTED_LAYER,
)
HOSTS = (KAGGLE, T4, RTX_4090, H200)

_HERE = "measured, docs/PERFORMANCE.md"
_NOTHING = Figure(0.0, "not asked for")
EPYC = Host(
    "2 cores of an AMD EPYC",
    gpus=0,
    room=Figure(24e9, _HERE),
    memory=Figure(23e9, f"torch's products in bfloat16, {_HERE}"),
    flops=_assumed(0.4e12, "two cores at 3 GHz with AVX512-BF16, half of it reached"),
    link=None,
    host=_NOTHING,
    disk=Figure(3.5e9, _HERE),
    disk_room=Figure(60e9, _HERE),
    network=_NOTHING,
    latency=_NOTHING,
    hourly=_NOTHING,
    layer=Figure(3.5e-3 / 13, f"3.5 ms of a token with 13 layers, {_HERE}"),
    routed_layer=_NOTHING,
    codes=Figure(38e9, f"4bit from its codes, {_HERE}"),
)
"""The committed results of CPU benchmarks are from it."""
XEON = Host(
    "4 cores of an Intel Xeon",
    gpus=0,
    room=Figure(24e9, _HERE),
    memory=Figure(18e9, "multiplying with bfloat16, results/predict-experts-full"),
    flops=Figure(42e9, f"512 rows with 5632 x 2048 in bfloat16: 278 ms, {_HERE}"),
    link=None,
    host=_NOTHING,
    disk=Figure(1.7e9, "experts to be read, results/predict-experts-full"),
    disk_room=Figure(60e9, _HERE),
    network=_NOTHING,
    latency=_NOTHING,
    hourly=_NOTHING,
    layer=Figure(3.5e-3 / 13, f"as on the EPYC, {_HERE}"),
    routed_layer=Figure(1.0e-3, "assumed: four of the other kind", is_assumed=True),
)
"""Mixtures of experts and the server were measured on it."""
