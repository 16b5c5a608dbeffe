"""Divides the files of tests into parts that take about as long as each other, for `make test-long PART=1/8`.

A file is never divided: its fixtures are made once.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

SECONDS: Mapping[str, int] = {
    "batch_jobs/test_under_a_cap.py": 66,
    "benchmarks/test_benchmarks.py": 154,
    "benchmarks/test_kaggle_72b.py": 351,
    "benchmarks/test_moe.py": 47,
    "benchmarks/test_serve.py": 38,
    "cli/test_batch.py": 130,
    "cli/test_convert.py": 106,
    "cli/test_doctor.py": 47,
    "cli/test_plan.py": 91,
    "cli/test_plan_at_size.py": 198,
    "cli/test_run.py": 25,
    "cli/test_serve.py": 34,
    "cli/test_worker.py": 64,
    "cli/test_wrong_types.py": 105,
    "engine/test_first_use.py": 50,
    "engine/test_every_architecture.py": 127,
    "engine/test_experts.py": 31,
    "engine/test_fake_gpu.py": 58,
    "engine/test_families.py": 133,
    "engine/test_hybrid_caches.py": 620,
    "engine/test_published.py": 31,
    "engine/test_reading.py": 37,
    "evaluation/test_every_family.py": 57,
    "examples/test_kaggle_70b.py": 82,
    "formats/test_safetensors_file.py": 39,
    "frozen/test_command_lines.py": 89,
    "frozen/test_families.py": 40,
    "frozen/test_hosts.py": 42,
    "frozen/test_imports.py": 58,
    "frozen/test_on_disk.py": 59,
    "generation/scoring/test_every_family.py": 69,
    "generation/test_preemption.py": 42,
    "generation/test_packed_batch.py": 60,
    "generation/test_memory.py": 39,
    "generation/test_session.py": 81,
    "generation/test_swapped_to_file.py": 23,
    "pipeline/test_families.py": 92,
    "prepare/test_damaged_checkpoints.py": 223,
    "prepare/test_make.py": 31,
    "prepare/test_two_at_once.py": 42,
    "quant/test_compression.py": 26,
    "quant/test_nested_scales.py": 41,
    "quant/test_products.py": 54,
    "ray/test_on_a_cluster.py": 171,
    "server/test_under_load.py": 200,
    "splitter/test_announced_need.py": 35,
    "splitter/test_edited_source.py": 34,
    "splitter/test_failing_disk.py": 220,
    "splitter/test_full_disk.py": 350,
    "splitter/test_hub_faults.py": 108,
    "splitter/test_kill.py": 500,
    "splitter/test_memory.py": 137,
    "splitter/test_meta_checkpoints.py": 227,
    "splitter/test_plan.py": 24,
    "splitter/test_power_cut.py": 230,
    "splitter/test_stateful.py": 418,
    "splitter/test_torch_checkpoints.py": 33,
    "test_auto_model.py": 33,
    "test_documented_commands.py": 769,
    "test_errors.py": 21,
    "test_few_descriptors.py": 54,
    "test_kills.py": 1300,
    "test_matrix.py": 45,
    "test_supported_models.py": 780,
    "test_train_demo.py": 34,
}
"""File -> seconds in the long run, of those that take longest (Xeon with AMX, 2 cores, other work on both)."""
SECONDS_A_TEST = 0.15
"""Of files that are not listed."""


def chosen(files: Iterable[str], part: str, seconds: Mapping[str, int] = SECONDS) -> frozenset[str]:
    """The files of one part.

    Args:
        files: the file of each test, relative to the folder of tests; as often as it has tests.
        part: "k/n": the k-th of n, from 1 on.
        seconds: what files take that take long.

    Raises:
        ValueError: `part` is malformed.
    """
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"part {part!r}: expected k/n with k from 1 to n, such as 1/8")
    tests = Counter(files)
    weights = {file: seconds.get(file, SECONDS_A_TEST * tests[file]) for file in tests}
    parts: list[list[str]] = [[] for _ in range(int(count))]
    loads = [0.0] * len(parts)
    for file in sorted(weights, key=lambda file: (-weights[file], file)):
        least = loads.index(min(loads))
        parts[least].append(file)
        loads[least] += weights[file]
    return frozenset(parts[int(number) - 1])


@functools.cache  # asked for each test
def relative(path: Path) -> str:
    """The name of a file of tests, as `SECONDS` has it; that of another file is its whole path."""
    folder = Path(__file__).parent.parent
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.as_posix()
