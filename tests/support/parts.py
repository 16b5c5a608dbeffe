"""Divides the files of tests into parts that take about as long as each other, for `make test-long PART=1/4`.

A file is never divided: its fixtures are made once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

SECONDS: Mapping[str, int] = {
    "benchmarks/test_capped.py": 21,
    "benchmarks/test_kaggle_72b.py": 140,
    "benchmarks/test_lazy_load.py": 28,
    "cli/test_batch.py": 169,
    "cli/test_convert.py": 157,
    "cli/test_plan.py": 125,
    "cli/test_serve.py": 53,
    "demo/test_train.py": 60,
    "ecosystem/test_copies_and_training.py": 27,
    "engine/test_checksums.py": 62,
    "engine/test_fake_gpu.py": 73,
    "engine/test_hybrid_caches.py": 1588,
    "engine/test_named_classes.py": 21,
    "engine/test_quantized_weight.py": 30,
    "engine/test_published.py": 30,
    "evaluation/test_every_family.py": 78,
    "examples/test_kaggle_70b.py": 116,
    "formats/test_safetensors_file.py": 35,
    "generation/scoring/test_every_family.py": 94,
    "generation/test_making_way.py": 63,
    "generation/test_packed_families.py": 57,
    "generation/test_session.py": 114,
    "pipeline/test_families.py": 85,
    "server/test_under_load.py": 222,
    "splitter/test_edited_source.py": 27,
    "splitter/test_failing_disk.py": 1057,
    "splitter/test_full_disk.py": 400,
    "splitter/test_hub_faults.py": 67,
    "splitter/test_meta_checkpoints.py": 234,
    "splitter/test_stateful.py": 317,
    "test_auto_model.py": 26,
    "test_few_descriptors.py": 51,
    "test_supported_models.py": 861,
}
"""File -> seconds in the long run, of those that take longest (AMD EPYC, 2 cores)."""
SECONDS_A_TEST = 0.4
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
        raise ValueError(f"part {part!r}: expected k/n with k from 1 to n, such as 1/4")
    tests = Counter(files)
    weights = {file: seconds.get(file, SECONDS_A_TEST * tests[file]) for file in tests}
    parts: list[list[str]] = [[] for _ in range(int(count))]
    loads = [0.0] * len(parts)
    for file in sorted(weights, key=lambda file: (-weights[file], file)):
        least = loads.index(min(loads))
        parts[least].append(file)
        loads[least] += weights[file]
    return frozenset(parts[int(number) - 1])


def relative(path: Path) -> str:
    """The name of a file of tests, as `SECONDS` has it; that of another file is its whole path."""
    folder = Path(__file__).parent.parent
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.as_posix()
