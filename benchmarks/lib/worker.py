"""Runs one job with one implementation, in the environment of that implementation, without this repository.

    python -P worker.py '{"task": "split", "package": "airllm", ...}'

Protocol: `{"ready": {package: version}}` on stdout once the libraries are imported; a line on stdin starts the job; one
JSON object with its outcome follows, or `{"error": "..."}`. The output of libraries goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
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
    """Import the libraries of all implementations, so that all idle processes are alike; return versions.

    At the smallest size, import only the libraries that every model needs.
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
    """Split a checkpoint into layer files: seconds of the call, seconds of all cores, and the folder."""
    package = importlib.import_module(job["package"])
    start, begun = time.perf_counter(), time.process_time()
    folder = package.split_and_save_layers(job["checkpoint"], **job["options"])
    seconds, core_seconds = time.perf_counter() - start, time.process_time() - begun
    return {"seconds": seconds, "core_seconds": core_seconds, "folder": str(folder)}


READING_TURNS = 5
PROBED_BYTES = 1 << 28
"""Read to measure a rate between two requests."""


def bytes_read() -> int:
    """By this process from the disk so far (proc(5), io), with mapped files and reads past the page cache."""
    with open("/proc/self/io") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


class Clock:
    """A streamer of `generate` that notes the time of each token and the bytes read from the disk until then.

    Args:
        between: called after each token; its time does not count.
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


def generate(
    model: Any, ids: list[int] | list[list[int]], length: int, clock: Clock, device: Any = "cpu"
) -> dict[str, Any]:
    """Generate greedily for a prompt, or several of one length: seconds to the first token and of the steps after it.

    Raises:
        RuntimeError: another number of tokens came.
    """
    import torch

    is_one = isinstance(ids[0], int)
    prompt = torch.tensor([ids] if is_one else ids).to(device)
    begun = time.perf_counter()
    output = model.generate(  # by name: one peer's takes nothing else
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=length, do_sample=False, streamer=clock
    )
    generated = output[:, prompt.shape[1] :]
    if generated.shape[1] != length or len(clock.times) != length + 1:
        raise RuntimeError(
            f"{length} tokens were asked for; {generated.shape[1]} came, in {len(clock.times) - 1} steps"
        )
    tokens = generated.tolist()
    return {
        "first_token_seconds": clock.times[1] - begun,
        "step_seconds": clock.steps(),
        "step_bytes": clock.step_bytes(),
        "token_seconds": statistics.median(clock.steps()),
        "tokens": tokens[0] if is_one else tokens,
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Load a model and generate; see `generation.StepsRun`."""
    start = time.perf_counter()
    model = LOADERS[job["loader"]](job)
    loaded = {"load_seconds": time.perf_counter() - start, "placed": _placed(model)}
    return generate(model, job["prompt"], job["tokens"], Clock()) | loaded | _limits(model)


def requests(job: dict[str, Any]) -> dict[str, Any]:
    """Load a model of experts, and answer requests greedily, each of a prompt or several; see `experts.MoeRun`.

    Only the steps after first tokens count, of all requests after the first `warm_up`. The last `counted` ones are not
    timed: in them the profiler counts, and its clocks take time. Before each timed request the worker measures a rate:
    of the disk with the files `probed`, or of the memory if there are none. `endless`: no token ends an answer.
    """
    start = time.perf_counter()
    model = LOADERS[job["loader"]](job)
    if job.get("endless"):
        model.generation_config.eos_token_id = None
    loaded = time.perf_counter() - start
    answers, rates, last = list[dict[str, Any]](), list[float](), len(job["prompts"]) - job.get("counted", 0)
    for number, prompts in enumerate(job["prompts"]):
        if hasattr(model, "profiler"):  # only now: with clocks around resident layers each is a call of its own
            model.profiler.enabled = number >= last
        if "probed" in job and job["warm_up"] <= number < last:
            rates.append(_rate(job["probed"]))
            time.sleep(0.5)  # else the engine could take the threads of that for other work (`openmp.look`)
        answers.append(generate(model, prompts, job["tokens"], Clock()))
    counted = answers[job["warm_up"] : last]
    steps = [seconds for answer in counted for seconds in answer["step_seconds"]]
    probed = {"disk_speed" if job["probed"] else "memory_speed": statistics.median(rates)} if rates else {}
    return (
        _experts(model)
        | probed
        | {
            "load_seconds": loaded,
            "first_token_seconds": statistics.median(answer["first_token_seconds"] for answer in counted),
            "step_seconds": steps,
            "step_bytes": [nbytes for answer in counted for nbytes in answer["step_bytes"]],
            "token_seconds": statistics.fmean(steps),
            "tokens": [answer["tokens"] for answer in answers],
            "threads": counted[0]["threads"],
            "placed": _placed(model),
        }
    )


def _rate(files: Sequence[str]) -> float:
    """Bytes a second that are read from these files, or from memory without any."""
    from benchmarks.lib import measure

    if files:
        return measure.read_speed([*map(Path, files)], PROBED_BYTES)
    # in another process: the memory of this one is measured
    program = f"from benchmarks.lib import measure; print(measure.memory_speed({PROBED_BYTES}, 3))"
    return float(subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE).stdout)


def _experts(model: Any) -> dict[str, Any]:
    """This project's: the profiler's figures of the steps after the first token."""
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
    """transformers, with the whole model in RAM (it maps the files)."""
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
    """oLLM, every decoder layer from disk; it needs one of the names of models that it knows."""
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
    """This project's: bytes that a pass reads, and seconds of reading them without computing."""
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
    """The places of the weights, if the model has them."""
    placement = getattr(model, "placement", None)
    if placement is not None:
        return f"{placement.streamed_bytes / 1e6:.0f} MB streamed"
    devices = list(getattr(model, "hf_device_map", {}).values())
    return f"{devices.count('disk')} modules on disk" if "disk" in devices else ""


def predict(job: dict[str, Any]) -> dict[str, Any]:
    """This project's prediction for one compression without a split, and the seconds it took."""
    package = importlib.import_module(job["package"])
    start = time.perf_counter()
    plan = package.plan(job["checkpoint"], device="cpu", **job["options"])
    taken = time.perf_counter() - start
    compression = job["options"].get("compression")
    generation = next(each for each in plan.generations if each.compression == compression)
    return {
        "plan_seconds": taken,
        "predicted_token_seconds": generation.token_seconds,
        "predicted_first_token_seconds": generation.first_token_seconds,
        "predicted_streamed_bytes": generation.read_bytes,
        "speeds": {speed.what: speed.bytes_per_second for speed in generation.speeds},
    }


def llama_cpp(job: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp: load the file and generate greedily.

    Options, as of its own programs: `direct_io` loads the file by direct I/O instead of mapping it; `cpu_moe`;
    `no_repack` keeps it from rewriting some types into memory of its own.
    """
    from llama_cpp import Llama  # type: ignore[import-not-found,unused-ignore]

    threads, is_mapped = len(os.sched_getaffinity(0)), not job["options"].get("direct_io")
    kept = _set_parameters(job["options"])
    begun = time.perf_counter()
    model = Llama(job["path"], n_ctx=512, n_threads=threads, n_threads_batch=threads, use_mmap=is_mapped, verbose=False)
    del kept
    loaded = time.perf_counter()
    tokens, clock = [], Clock()
    clock.put(None)
    for token in model.generate(job["prompt"], top_k=1, temp=0.0, repeat_penalty=1.0):
        clock.put(token)
        tokens.append(token)
        if len(tokens) == job["tokens"]:
            break
    return {
        "load_seconds": loaded - begun,
        "first_token_seconds": clock.times[1] - clock.times[0],
        "step_seconds": clock.steps(),
        "token_seconds": statistics.median(clock.steps()),
        "step_bytes": clock.step_bytes(),
        "tokens": tokens,
        "threads": threads,
        "dtype": job["kind"],
        "placed": "mapped" if is_mapped else "read by direct I/O",
    }


def _set_parameters(options: dict[str, Any]) -> Any:
    """Set options that `Llama` has no argument for; returns memory that must live until the file is loaded."""
    import ctypes

    from llama_cpp import llama_cpp as library
    from llama_cpp._ggml import libggml  # type: ignore[import-not-found,unused-ignore]

    if options.get("direct_io"):
        library.LLAMA_LOAD_MODE_NONE = library.LLAMA_LOAD_MODE_DIRECT_IO
    # as `--cpu-moe` does (common/arg.cpp): matrices of these names go to buffers of the CPU
    pattern = ctypes.c_char_p(rb"\.ffn_(up|down|gate|gate_up)_(ch|)exps")
    libggml.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    name, buffer = ctypes.cast(pattern, ctypes.c_void_p).value, libggml.ggml_backend_cpu_buffer_type()
    overrides = (ctypes.c_void_p * 4)(name, buffer, None, None)
    defaults = library.llama_model_default_params

    def changed() -> Any:
        parameters = defaults()
        parameters.use_extra_bufts = not options.get("no_repack")
        if options.get("cpu_moe"):
            parameters.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        return parameters

    library.llama_model_default_params = changed
    return overrides, pattern


def prompt(number: int, length: int, vocabulary: int) -> list[int]:
    """Token ids, with another first token for each number; a command line cannot hold thousands of them."""
    return [(number * 7919 + place * (37 + number % 11) + 11) % vocabulary for place in range(length)]


def bulk(job: dict[str, Any]) -> dict[str, Any]:
    """Generate for many prompts at once: seconds from the first to the last of them, without loading."""
    count, before = job["sequences"], bytes_read()
    prompts = [prompt(number, job["length"], job["vocabulary"]) for number in range(count)]
    new_tokens, seconds = (_batch if job["is_ours"] else _one_batch)(job, prompts)
    if new_tokens != count * job["tokens"]:
        raise RuntimeError(f"{count * job['tokens']} tokens were asked for; {new_tokens} came")
    return {"seconds": seconds, "new_tokens": new_tokens, "disk_bytes": bytes_read() - before}


def _batch(job: dict[str, Any], prompts: list[list[int]]) -> tuple[int, float]:
    package = importlib.import_module(job["package"])
    (manifest,) = Path(job["path"]).rglob("split.json")
    report = package.batch(
        str(manifest.parent),
        [{"tokens": ids} for ids in prompts],
        job["out"],
        max_new_tokens=job["tokens"],
        sequences=job["sequences"],
        device="cpu",
        overwrite=True,
        **job["options"],
    )
    if report.errors:
        raise RuntimeError(Path(job["out"]).read_text().splitlines()[0][:200])
    return report.new_tokens, report.seconds


def _one_batch(job: dict[str, Any], prompts: list[list[int]]) -> tuple[int, float]:
    import torch

    model, ids = LOADERS[job["loader"]](job), torch.tensor(prompts)
    begun = time.perf_counter()
    output = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=job["tokens"], do_sample=False
    )
    return output[:, job["length"] :].numel(), time.perf_counter() - begun


def serve(job: dict[str, Any]) -> None:
    """Run a server until a signal ends it."""
    if job["how"] == "program":  # in the place of this process
        os.dup2(2, 1)
        os.execv(job["program"], [job["program"], *job["arguments"], "--port", str(job["port"])])
    if job["how"] == "rabbitllm":
        sys.argv = ["rabbitllm", "serve", job["model"], "--port", str(job["port"]), *job["arguments"]]
        importlib.import_module("rabbitllm.cli.main").main()
        return
    # transformers has no option for offloading: accelerate's disk offload replaces its loading of a model
    manager = importlib.import_module("transformers.cli.serving.model_manager").ModelManager
    manager._load_model = lambda self, name, *args, **kwargs: _load_offloaded({"checkpoint": name.split("@")[0], **job})
    command = importlib.import_module("transformers.cli.serve").Serve
    command(force_model=job["model"], port=job["port"], host="127.0.0.1", **job["options"])


TASKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "split": split,
    "decode": lambda job: llama_cpp(job) if job["package"] == "llama_cpp" else decode(job),
    "requests": requests,
    "predict": predict,
    "bulk": bulk,
    "serve": serve,
}
_OF_SERVERS = ("uvicorn", "fastapi", "openai", "transformers.cli.serve")
"""Imported before a server's memory is limited."""


def main() -> None:
    """Send messages over the original stdout, and all other output to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        job = json.loads(sys.argv[1])
        if "cores" in job:
            os.sched_setaffinity(0, job["cores"])
        versions = import_libraries(job["package"]) if job["package"] is not None else {}
        if job["task"] == "serve" and job["package"] is not None:
            for library in _OF_SERVERS:
                with contextlib.suppress(ImportError):
                    importlib.import_module(library)
        answer({"ready": versions})
        if sys.stdin.readline():
            answer(TASKS[job["task"]](job))
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
