"""The splitting part of `AutoModel.from_pretrained`, in a process that may be killed; events as JSON lines on stdout.

python -m benchmarks.split.child '{"repository": "...", "folder": "...", "mode": "stream", "max_disk": 48318382080}'
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rabbitllm import prepare
from rabbitllm.base import progress
from rabbitllm.base.options import ShardPolicy, SplitOptions

LIBRARIES = ("torch", "bitsandbytes.functional", "rabbitllm.quant.quantize_kernels")
TOLD = (progress.SplitStarted, progress.ShardDone, progress.SplitDone)


def say(event: progress.Event) -> None:
    """Print an event of those kinds at once: a kill may follow."""
    if isinstance(event, TOLD):
        print(json.dumps({type(event).__name__: asdict(event)}), flush=True)


def main() -> None:
    """Find the source, and start or continue its split, with the libraries of `AutoModel` imported."""
    for library in LIBRARIES:
        importlib.import_module(library)
    job = json.loads(sys.argv[1])
    options = SplitOptions(
        compression="4bit",
        shards=ShardPolicy.DELETE_USED,
        max_disk=job["max_disk"],
        shard_transfer=job["mode"],
        profiling=True,
    )
    source = prepare.find(prepare.ModelSpec(job["repository"], options.compression, Path(job["folder"])))
    with progress.listening(say):
        profiler = prepare.ensure_split(source, options)
    stages = {stage: asdict(total) for stage, total in profiler.stages.items()}
    print(json.dumps({"folder": str(source.split_folder), "stages": stages}), flush=True)


if __name__ == "__main__":
    main()
