"""A process of `scale.pipeline`: loads its part of a model in limited memory, then generates or works.

It prints lines of JSON: "ready" once its libraries are imported, and its figures after "go" on stdin.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.lib.worker import Clock, generate


def main() -> None:
    """Carry out the job that is the only argument."""
    job = json.loads(sys.argv[1])
    import torch
    import transformers.models.llama.modeling_llama  # counts as idle memory
    import transformers.models.llama.tokenization_llama
    from torch.distributed import ProcessGroupGloo  # noqa: F401

    from rabbitllm import AutoModel, Hosts
    from rabbitllm.engine.devices import CpuDevice, default_budget

    print(json.dumps({"ready": {"torch": torch.__version__, "transformers": transformers.__version__}}), flush=True)
    sys.stdin.readline()
    hosts = None
    if job["processes"] > 1:

        def say(address: str) -> None:
            print(json.dumps({"address": address}), flush=True)

        address = sys.stdin.readline().strip() if job["rank"] else "127.0.0.1:0"
        workers = 0 if job["rank"] else job["processes"] - 1
        hosts = Hosts(address, workers, job["rank"], patience=300, timeout=300, announce=say)
    # each process has a control group of its own
    limits: dict[int | str, int | str] | None = None if job["all"] else {"cpu": default_budget(CpuDevice())}
    start = time.perf_counter()
    model = AutoModel.from_pretrained(
        job["folder"], device="cpu", max_memory=limits, show_layer_progress=False, hosts=hosts
    )
    loaded: dict[str, Any] = {"load_seconds": time.perf_counter() - start}
    if job["rank"]:
        loaded["streamed"] = model.model.placement.streamed_bytes
        model.work()
    else:
        loaded["streamed"] = model.placement.streamed_bytes
        loaded |= generate(model, job["prompt"], job["tokens"], Clock())
        if model.hosts is not None:
            loaded["spans"] = [len(span) for span in model.hosts.spans]
            model.hosts.close()
    print(json.dumps(loaded), flush=True)


if __name__ == "__main__":
    main()
