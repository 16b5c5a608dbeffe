"""Lines through Ray Data's `map_batches`, and through the actors of `rabbitllm batch --ray`: when answers come, what a
lost worker costs.

    python -m benchmarks.ray_data

Needs `ray`, and `ray[data]` for the first way. No model: a worker sleeps over each line, writes down that it computed
it, and gives its answer. Four workers, eight lines at a time for each. Of each way one run in peace, and one in which
the first worker that has given an answer is killed (SIGKILL). One JSON object a run on stdout; seconds are from the
call on, workers' starts included, and until the first worker of the run is there and the last one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command_line
from rabbitllm import prepare
from rabbitllm.auto_model import LoadRequest
from rabbitllm.batch_jobs.items import BatchAnswer, Generate, Item, JobLimits
from rabbitllm.ray.answerer import WorkerInfo, WorkerJob
from rabbitllm.ray.lines import RayAnswers, WorkerPool

LINES, AT_A_TIME, WORKERS = 64, 8, 4
SECONDS_A_LINE = 0.25
Way = Callable[[Path, int], Iterator[int]]


def main() -> None:
    """Each way, in peace and with a worker killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=LINES, help="to answer (default: %(default)s)")
    options = command_line.parsed(parser, None, lines=2 * AT_A_TIME)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ways: dict[str, Way] = {"ray.data": by_ray_data, "actors": by_actors}
    try:
        import ray.data  # noqa: F401
    except ImportError as error:
        print(f"ray.data is left out: {error} (`pip install 'ray[data]'`)", file=sys.stderr)
        del ways["ray.data"]
    for kills in (True,) if options.smallest else (False, True):
        for name, way in ways.items():
            with contextlib.redirect_stdout(sys.stderr), cluster() as folder:
                found = run(way, folder / "computed", options.lines, kills=kills)
            print(json.dumps({"way": name, "killed": kills, **found}), flush=True)


@contextlib.contextmanager
def cluster() -> Iterator[Path]:
    """One of this machine, for one run: what a run leaves behind holds processors for a while. Its folder."""
    import ray

    folder = Path(tempfile.mkdtemp(prefix="rr-", dir="/tmp"))
    try:
        ray.init(
            address="local",
            num_cpus=2 * WORKERS,
            include_dashboard=False,
            object_store_memory=80 << 20,
            _temp_dir=str(folder),
            log_to_driver=False,
        )
        yield folder
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def run(way: Way, log: Path, lines: int, *, kills: bool) -> dict[str, Any]:
    """One run: when the first answers came, and how many lines were computed and answered."""
    log.write_text("")
    _beginnings(log).write_text("")
    called, begin, times, got = time.time(), time.perf_counter(), [], []
    for index in way(log, lines):
        times.append(round(time.perf_counter() - begin, 2))
        got.append(index)
        if kills and len(got) == 1:
            os.kill(int(log.read_text().split()[0]), signal.SIGKILL)
    begun = sorted(float(line) - called for line in _beginnings(log).read_text().split())
    return {
        "first_worker_s": round(begun[0], 2),
        "last_worker_s": round(begun[-1], 2),
        "answers": len(got),
        "lines_answered": len({*got}),
        "lines_computed": len(log.read_text().splitlines()),
        "first_s": times[0],
        "eighth_s": times[AT_A_TIME - 1],
        "last_s": times[-1],
    }


def _beginnings(log: Path) -> Path:
    """Where a worker that begins writes when."""
    return log.with_name("begun")


def begin_work(log: Path) -> None:
    """What stands for loading a model."""
    with _beginnings(log).open("a") as file:
        file.write(f"{time.time()}\n")


def compute(index: int, log: Path) -> None:
    """What stands for a model."""
    time.sleep(SECONDS_A_LINE)
    with log.open("a") as file:
        file.write(f"{os.getpid()} {index}\n")


class Mapped:
    """A worker of Ray Data, which hands out each row by itself."""

    def __init__(self, log: str) -> None:
        self.log = Path(log)
        begin_work(self.log)

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, list[int]]]:
        for index in batch["index"]:
            compute(int(index), self.log)
            yield {"index": [int(index)]}


def by_ray_data(log: Path, lines: int) -> Iterator[int]:
    """Blocks of `AT_A_TIME` rows, a pool of actors."""
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.from_items([{"index": n} for n in range(lines)], override_num_blocks=lines // AT_A_TIME)
    mapped = rows.map_batches(Mapped, batch_size=None, concurrency=WORKERS, num_cpus=1, fn_constructor_args=[str(log)])
    for row in mapped.iter_rows():
        yield row["index"]


class Sleeper:
    """A worker as `Answerer` is one."""

    def __init__(self, job: WorkerJob) -> None:
        self.log = Path(job.name)
        begin_work(self.log)

    def ready(self) -> WorkerInfo:
        return WorkerInfo("here", os.getpid(), None, None, "nothing")

    def answer(self, items: Sequence[Item]) -> Generator[list[BatchAnswer]]:
        for one in items:
            compute(one.index, self.log)
            yield [BatchAnswer(one.index, one.key, {})]


def by_actors(log: Path, lines: int) -> Iterator[int]:
    """Chunks of as many lines."""
    job = WorkerJob(LoadRequest(prepare.ModelSpec("none"), None), str(log), JobLimits())
    workers = RayAnswers(WorkerPool(WORKERS, 1, 0, WORKERS), job, Sleeper)
    chunks = [range(at, at + AT_A_TIME) for at in range(0, lines, AT_A_TIME)]
    for group in workers.answered(chunks, lambda index: Item(index, index, Generate("", 1))):
        yield from (one.index for one in group)


if __name__ == "__main__":
    main()
