"""Does one job with one implementation, in the environment of that implementation. Imports nothing of this repository.

    python -P worker.py '{"task": "split", "package": "airllm", ...}'

The protocol: `{"ready": {package: version}}` on stdout once the libraries are imported; then a line on stdin starts the
job; then one JSON object with its outcome, or `{"error": "..."}`. What the libraries print goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import itertools
import json
import os
import runpy
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

DISTRIBUTIONS = (
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "bitsandbytes",
    "huggingface_hub",
    "numpy",
    "llama-cpp-python",
)
_SPLITTERS = ("rabbitllm", "airllm")


def import_libraries(package: str) -> dict[str, str]:
    """Import what any of the implementations imports sooner or later, so that all are idle alike; return versions.

    At the smallest size, whose figures mean nothing, only those that every model needs.
    """
    is_smallest = "RABBITLLM_BENCHMARK_SMALLEST" in os.environ
    others = ("transformers.modeling_utils",) if is_smallest else ("accelerate", "bitsandbytes")
    for library in ("torch", "transformers", *others):
        with contextlib.suppress(ImportError):
            importlib.import_module(library)
    module = importlib.import_module(package)
    if package in _SPLITTERS:  # a package may import its own modules only when they are used
        _ = (module.AutoModel, module.split_and_save_layers)
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in dict.fromkeys((package, *DISTRIBUTIONS)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {package: getattr(module, "__version__", "?")} | versions


def split(job: dict[str, Any]) -> dict[str, Any]:
    """Split a checkpoint into layer files: the time of that call alone, what all cores took, and where they are."""
    package = importlib.import_module(job["package"])
    start, begun = time.perf_counter(), time.process_time()
    folder = package.split_and_save_layers(job["checkpoint"], **job["options"])
    seconds, core_seconds = time.perf_counter() - start, time.process_time() - begun
    return {"seconds": seconds, "core_seconds": core_seconds, "folder": str(folder)}


READING_TURNS = 5


def bytes_read() -> int:
    """By this process from the disk so far (proc(5), io); mapped files and reads past the page cache included."""
    with open("/proc/self/io") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


class Clock:
    """Notes when each token comes and what was read from the disk until then, as a streamer of `generate`.

    Args:
        between: called after each token, its time not counted.
    """

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        self.times: list[float] = []
        self.resumed: list[float] = []
        self.read: list[int] = []
        self._between = between

    def put(self, tokens: Any) -> None:
        """The prompt first, then each token."""
        self.times.append(time.perf_counter())
        self.read.append(bytes_read())
        self._between()
        self.resumed.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to do: the text is not shown."""

    def steps(self) -> list[float]:
        """Seconds of each token after the first."""
        return [ended - resumed for resumed, ended in zip(self.resumed[1:], self.times[2:], strict=False)]

    def step_bytes(self) -> list[int]:
        """Read from the disk in each of those steps."""
        return [later - earlier for earlier, later in itertools.pairwise(self.read[1:])]


def generate(model: Any, ids: list[int], length: int, clock: Clock, device: str = "cpu") -> dict[str, Any]:
    """Generate greedily: time to the first token, and of the steps after it.

    Raises:
        RuntimeError: another number of tokens came.
    """
    import torch

    prompt = torch.tensor([ids], device=device)
    begun = time.perf_counter()
    output = model.generate(  # by name: one peer's takes nothing else
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=length, do_sample=False, streamer=clock
    )
    tokens = output[0, prompt.shape[1] :].tolist()
    if len(tokens) != length or len(clock.times) != length + 1:
        raise RuntimeError(f"{length} tokens were asked for; {len(tokens)} came, in {len(clock.times) - 1} steps")
    return {
        "first_token_seconds": clock.times[1] - begun,
        "step_seconds": clock.steps(),
        "step_bytes": clock.step_bytes(),
        "token_seconds": statistics.median(clock.steps()),
        "tokens": tokens,
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Load a model and generate; see `generation.StepsRun`."""
    start = time.perf_counter()
    model = LOADERS[job["loader"]](job)
    loaded = {"load_seconds": time.perf_counter() - start, "placed": _placed(model)}
    return generate(model, job["prompt"], job["tokens"], Clock()) | loaded | _limits(model)


class Routed:
    """What the routers of a model of Qwen3-Next's kind choose, noted pass by pass (a router's third output)."""

    def __init__(self, model: Any) -> None:
        self.routers = [module for name, module in model.named_modules() if name.endswith(".mlp.gate")]
        self.chosen: list[Any] = []
        for router in self.routers:
            router.register_forward_hook(self._note)

    def _note(self, router: Any, given: Any, made: Any) -> None:
        self.chosen.append(made[2].cpu().numpy().astype("uint16"))

    def save(self, path: str) -> None:
        """As `expert_trace.Trace` has it."""
        import numpy as np

        layers = len(self.routers)
        passes = [np.stack(self.chosen[at : at + layers], axis=1) for at in range(0, len(self.chosen), layers)]
        ends = np.cumsum([len(one) for one in passes])
        np.savez_compressed(path, ids=np.concatenate(passes), ends=ends, experts=self.routers[0].num_experts)


def requests(job: dict[str, Any]) -> dict[str, Any]:
    """Load a model of experts and generate greedily for one prompt after another; see `moe.MoeRun`.

    What is timed and counted are the steps after the first token, of all requests but the first `warm_up`.
    """
    start = time.perf_counter()
    model = LOADERS[job["loader"]](job)
    loaded = time.perf_counter() - start
    routed, made = Routed(model), []
    for number, given in enumerate(job["prompts"]):
        if number == job["warm_up"] and hasattr(model, "profiler"):
            model.profiler.clear()
        made.append(generate(model, given, job["tokens"], Clock()))
    routed.save(job["trace"])
    counted = made[job["warm_up"] :]
    steps = [seconds for one in counted for seconds in one["step_seconds"]]
    return _experts(model) | {
        "load_seconds": loaded,
        "first_token_seconds": statistics.median(one["first_token_seconds"] for one in counted),
        "step_seconds": steps,
        "step_bytes": [nbytes for one in counted for nbytes in one["step_bytes"]],
        "token_seconds": statistics.fmean(steps),
        "tokens": [one["tokens"] for one in made],
        "threads": counted[0]["threads"],
        "placed": _placed(model),
    }


def _experts(model: Any) -> dict[str, Any]:
    """This project's: what its profiler says of the steps after the first token, and where their time went."""
    sums = getattr(getattr(model, "profiler", None), "sums", {}).get("further")
    if sums is None:
        return {}
    kept, read = (sums.stages.get(f"experts on the {where}") for where in ("device", "disk"))
    return {
        "hits": kept.count if kept else 0,
        "missed": read.count if read else 0,
        "missed_bytes": read.nbytes if read else 0,
        "read_bytes": sums.stages["read"].nbytes if "read" in sums.stages else 0,
        "slots": sum(pool.slots for pool in model.placement.pools),
        "stage_seconds": {stage: total.seconds for stage, total in sums.stages.items() if total.seconds},
        "wall_seconds": sums.wall,
    }


def _load_layered(job: dict[str, Any]) -> Any:
    """RabbitLLM 1.1, AirLLM and this project: layer files, streamed or resident."""
    package = importlib.import_module(job["package"])
    return package.AutoModel.from_pretrained(job["checkpoint"], device="cpu", **job["options"])


def _load_in_memory(job: dict[str, Any]) -> Any:
    """transformers, all of the model in RAM (it maps the files)."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(job["checkpoint"], dtype="auto")


def _load_offloaded(job: dict[str, Any]) -> Any:
    """transformers with every decoder layer offloaded to disk by accelerate; embedding, norm and head in RAM."""
    from transformers import AutoConfig, AutoModelForCausalLM

    layers = AutoConfig.from_pretrained(job["checkpoint"]).num_hidden_layers
    rest = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    device_map = rest | {f"model.layers.{i}": "disk" for i in range(layers)}
    return AutoModelForCausalLM.from_pretrained(
        job["checkpoint"], dtype="auto", device_map=device_map, offload_folder=job["offload_folder"]
    )


def _load_ollm(job: dict[str, Any]) -> Any:
    """oLLM, every decoder layer from disk; it wants a Llama by one of the names it knows."""
    from ollm import Inference  # type: ignore[import-not-found,unused-ignore]

    inference = Inference("llama3-8B-chat", device="cpu", logging=False)
    inference.load_model(job["checkpoint"])
    return inference.model


LOADERS = {
    "layered": _load_layered,
    "in memory": _load_in_memory,
    "offloaded": _load_offloaded,
    "ollm": _load_ollm,
}


def _limits(model: Any) -> dict[str, Any]:
    """This project's: what a pass reads, and how long that takes by the same means when nothing computes."""
    executors = getattr(getattr(model, "streamer", None), "executors", None)
    if not executors:
        return {}
    (executor,) = executors.values()
    units = list(executor.follower)
    if not units:
        return {"read_bytes": 0, "read_seconds": 0.0}
    times = []
    for _ in range(READING_TURNS):
        begun = time.perf_counter()
        for unit, following in zip(units, units[1:] + units[:1], strict=True):
            loaded = executor.loader.take(unit)
            executor.loader.request(following)
            executor.loader.give_back(loaded)
        times.append(time.perf_counter() - begun)
    return {"read_bytes": model.placement.streamed_bytes, "read_seconds": statistics.median(times)}


def _placed(model: Any) -> str:
    """Where the weights are, as far as the model tells."""
    placement = getattr(model, "placement", None)
    if placement is not None:
        return f"{placement.streamed_bytes / 1e6:.0f} MB streamed"
    devices = list(getattr(model, "hf_device_map", {}).values())
    return f"{devices.count('disk')} modules on disk" if "disk" in devices else ""


def predict(job: dict[str, Any]) -> dict[str, Any]:
    """What this project foretells of one compression, before there is a split, and how long that took."""
    package = importlib.import_module(job["package"])
    start = time.perf_counter()
    plan = package.plan(job["checkpoint"], device="cpu", **job["options"])
    taken = time.perf_counter() - start
    found = next(one for one in plan.generations if one.compression == job["options"].get("compression"))
    return {
        "plan_seconds": taken,
        "predicted_token_seconds": found.token_seconds,
        "predicted_first_token_seconds": found.first_token_seconds,
        "predicted_streamed_bytes": found.read_bytes,
        "speeds": {speed.what: speed.bytes_per_second for speed in found.speeds},
    }


TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "split": split,
    "decode": decode,
    "requests": requests,
    "predict": predict,
}
LLAMA_CPP = "llama_cpp"
"""It needs no torch, which it would be idle with."""
OTHERS = {
    "bulk": "worker_batch.py",
    "score": "worker_batch.py",
    "score-plain": "worker_batch.py",
    "gpu probe": "worker_gpu.py",
    "gpu decode": "worker_gpu.py",
    "serve": "worker_serve.py",
}
"""Task -> the file next to this one that does it; its `tasks` takes this module and the job."""


def other_tasks(file: str, job: dict[str, Any]) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """What a file next to this one does."""
    found = runpy.run_path(str(Path(__file__).with_name(file)))["tasks"](sys.modules[__name__], job)
    return dict(found)


def main() -> None:
    """Talk over what was stdout; let everything that is printed go to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        job = json.loads(sys.argv[1])
        if "cores" in job:
            os.sched_setaffinity(0, job["cores"])
        versions = import_libraries(job["package"]) if job["package"] is not None else {}
        if job["task"] in OTHERS:  # whatever it imports is there before the job, so that all are idle alike
            TASKS.update(other_tasks(OTHERS[job["task"]], job))
        answer({"ready": versions})
        if sys.stdin.readline():
            if job["package"] == LLAMA_CPP:
                TASKS.update(other_tasks("worker_llama_cpp.py", job))
            answer(TASKS[job["task"]](job))
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
