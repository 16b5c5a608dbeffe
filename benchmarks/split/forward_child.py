"""A few forward passes of a split model on the CPU, in a process of its own; one JSON object on stdout.

    python -m benchmarks.split.forward_child '{"folder": "..."}'

`{"ready": true}` once everything is imported; then a line on stdin lets it go on. Bytes read are those that the kernel
fetched from the disk for this process.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = (1,)
FURTHER_PASSES = 2


def read_from_disk() -> int:
    """Bytes, since this process began."""
    with open("/proc/self/io") as lines:
        return int(next(line.split()[1] for line in lines if line.startswith("read_bytes:")))


def run(folder: Path) -> dict[str, Any]:
    """Load, and pass one token through all layers."""
    import torch

    from rabbitllm.base.options import RunOptions
    from rabbitllm.engine.load import load_model

    begun, read = time.perf_counter(), read_from_disk()
    model = load_model(folder, RunOptions(device="cpu", show_progress=False))
    loaded, read_by_load = time.perf_counter(), read_from_disk()
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    ended, read_by_pass = time.perf_counter(), read_from_disk()
    further = []
    for _ in range(FURTHER_PASSES):
        start = time.perf_counter()
        with torch.no_grad():
            same = torch.equal(model(input_ids=ids, use_cache=False).logits, logits)
        further.append(time.perf_counter() - start)
    return {
        "load_seconds": loaded - begun,
        "load_read": read_by_load - read,
        "token_seconds": ended - loaded,
        "token_read": read_by_pass - read_by_load,
        "further_seconds": further,
        "further_read": read_from_disk() - read_by_pass,
        "repeats": same,
        "way": _in_words(model.streamer.lanes[model.placement.home].way),
        "streamed": model.placement.streamed_bytes,
        "finite": bool(torch.isfinite(logits).all()),
        "shape": list(logits.shape),
        "threads": torch.get_num_threads(),
    }


def _in_words(way: Any) -> str:
    return "past the page cache" if way.direct else "dropped behind" if way.drop else "through the page cache"


def main() -> None:
    """Import, wait, work."""
    import transformers  # noqa: F401

    import rabbitllm.engine.load
    import rabbitllm.quant.schemes

    rabbitllm.quant.schemes.check_compression("4bit")  # imports bitsandbytes
    print(json.dumps({"ready": True}), flush=True)
    if sys.stdin.readline():
        print(json.dumps(run(Path(json.loads(sys.argv[1])["folder"]))), flush=True)


if __name__ == "__main__":
    main()
