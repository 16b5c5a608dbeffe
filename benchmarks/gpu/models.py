"""Steps with models: late copies, the pace of a streamed pass, wide layers, other forms of weights, little VRAM."""

from __future__ import annotations

import gc
import importlib
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import rabbitllm
from benchmarks.gpu import devices, passes, sized_model
from benchmarks.gpu.child import Place
from benchmarks.lib import worker
from benchmarks.lib.models import MODELS
from benchmarks.lib.published import Model, checkpoint
from benchmarks.lib.report import LIMIT_GOAL
from rabbitllm.base.options import RunOptions
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.engine.load import load_model
from rabbitllm.engine.placement import SLOTS
from rabbitllm.errors import NotEnoughMemoryError
from rabbitllm.models.gguf_output import convert_to_gguf

MIB, GIB = 1 << 20, 1 << 30
ALL = 1 << 40
MAX_MARGIN = 256 << 20
"""Of a cap, for activations and the KV cache of 24 tokens; at most an eighth of it."""
COPIED_BYTES = 256 << 20
"""In each copy that measures the link's rate."""
Row = dict[str, Any]


def _split(source: Path, target: Path, compression: str | None = "4bit") -> Path:
    """Layer files, unless they are there."""
    options = {"layer_shards_saving_path": str(target), "compression": compression}
    return Path(worker.split({"package": "rabbitllm", "checkpoint": str(source), "options": options})["folder"])


def _load(folder: Path, gpus: Sequence[Any], budget: int, host: int, **options: Any) -> Any:
    """A model with `budget` bytes for weights on all GPUs together, and `host` bytes of pinned memory."""
    limits = {gpu.name: budget // len(gpus) for gpu in gpus} | {"cpu": host}
    return load_model(folder, RunOptions(max_memory=limits, show_progress=False, **options), None, gpus)


def _tiers(model: Any) -> str:
    counts = Counter(placed.tier.value for placed in (*model.placement.units, *model.placement.experts))
    return ", ".join(f"{count} {tier}" for tier, count in counts.items())


def _ids(model: Any, tokens: int = 24, sequences: int = 1) -> torch.Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    return torch.tensor([[(i * 37 + 11) % (vocabulary - 3) + 3 for i in range(tokens)]] * sequences).to(model.device)


FAMILIES = ("llama", "qwen3_moe", "gpt_oss", "qwen3_next")
PASSES = 50
CYCLES = 2_000_000
"""Of a GPU's clock, about a millisecond: more than computing or copying a small layer takes."""


def races(place: Place) -> Iterator[Row]:
    """Small models at 4bit: equal logits with `exact` in every place and with late copies."""
    build: Any = importlib.import_module("tests.support.builders").build_checkpoint
    sources = {"demo": Path(rabbitllm.__file__).parent / "demo" / "model"}
    for family in FAMILIES[:1] if place.is_rehearsal else FAMILIES:
        folder = place.work / f"checkpoint-{family}"
        sources[family] = folder if folder.exists() else build(folder, family, dtype=torch.bfloat16)
    every_gpu = devices.gpus(place)
    sets = [[gpu] for gpu in every_gpu] + ([every_gpu] if len(every_gpu) > 1 else [])
    with devices.watched(place), torch.inference_mode():
        for name, source in sources.items():
            try:
                folder = _split(source, place.work / f"layers-{name}")
                for gpus in sets[-1:] if place.is_rehearsal else sets:
                    yield from _late(name, folder, gpus, 2 if place.is_rehearsal else PASSES)
                yield _interrupted(name, folder, every_gpu[0])
            except Exception:  # the other models may work
                yield {"model": name, "failed": traceback.format_exc(), "ok": False}


def _late(name: str, folder: Path, gpus: Sequence[Any], passes: int) -> Iterator[Row]:
    model = _load(folder, gpus, ALL, 0, exact=True)
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    expected = model(_ids(model)).logits.cpu()
    for budget, host in ((nbytes - 1, 0), (0, ALL), (0, 0)):
        first = None
        for late in ("nothing", "copies", "layers"):
            model, different, changed = _load(folder, gpus, budget, host, exact=True), 0, 0
            ids, begun = _ids(model), time.perf_counter()
            for gpu in gpus:
                gpu.cycles = CYCLES if late == "copies" else 0
            for module in model.modules():
                if late == "layers" and devices.is_cuda(gpus[0]) and "DecoderLayer" in type(module).__name__:
                    module.register_forward_pre_hook(lambda module, args: devices.sleep(args[0].device, CYCLES))
            for _ in range(passes):
                logits = model(ids).logits.cpu()
                first = logits if first is None else first
                different, changed = (
                    different + (not torch.equal(logits, expected)),
                    changed + (not torch.equal(logits, first)),
                )
            row = {"model": name, "GPUs": len(gpus), "weights": _tiers(model), "late": late, "passes": passes}
            milliseconds = 1e3 * (time.perf_counter() - begun) / passes
            row |= {"differ from resident": different, "from the first pass": changed, "ms a pass": milliseconds}
            yield row | {"ok": not different and not changed}
    for gpu in gpus:
        gpu.cycles = 0


def _interrupted(name: str, folder: Path, gpu: Any) -> Row:
    """Ctrl-C in every wait for the GPU, once for each buffer."""
    model = _load(folder, [gpu], 0, 0, exact=True, profiling=True)
    ids = _ids(model)
    expected, before = model(ids).logits, gpu.waits
    model(ids)
    waits, came, wrong = gpu.waits - before, 0, 0
    for number in range(1, waits + 1):
        for _ in range(SLOTS):
            gpu.interrupt_at = gpu.waits + number
            try:
                model(ids)
            except KeyboardInterrupt:
                came += 1
        gpu.interrupt_at = None
        wrong += not torch.equal(model(ids).logits, expected)
    return {"model": name, "Ctrl-C in each wait of": waits, "came": came, "wrong after it": wrong, "ok": not wrong}


def little_vram(place: Place) -> Iterator[Row]:
    """Tokens with less VRAM than the model: accelerate, whose tokens are expected, and this project.

    Other weights come from pinned memory, or from layer files that are out of the page cache.
    """
    cap, gpu = (2 << 20) if place.is_rehearsal else GIB, devices.gpus(place)[0]
    part, expected = sized_model.model_of(0.01 if place.is_rehearsal else 2, tiny=place.is_rehearsal), None
    sized_model.write(part, place.work / "vram")
    weights = cap - min(cap // 8, MAX_MARGIN)
    for runner, host in (("accelerate", ALL), ("none", ALL), ("4bit", ALL), ("none", 0), ("4bit", 0)):
        is_ours, figures, said, copied = runner != "accelerate", Row(), None, 0
        devices.limit(gpu, None if place.is_rehearsal else cap)
        devices.forget_peak(gpu)
        try:
            with devices.watched(place), torch.inference_mode():
                model = (
                    _streamed(place, "vram", runner, gpu, weights, host) if is_ours else _placed(place, gpu, weights)
                )
                figures = passes.generate(model, 8, [] if host else [place.work])
                copied = passes.copied_bytes(model)
        except Exception:  # other rows may work
            said = traceback.format_exc()
        expected = figures.get("tokens") if not is_ours else expected
        equal = figures.get("tokens") == expected if runner == "none" and figures else None
        held = devices.held(gpu)
        row: Row = {"runner": runner, "from": "pinned memory" if host else "layer files"}
        row |= {"s/token": figures.get("token_seconds"), "GiB held": held / GIB, "GB/token to it": copied / 1e9}
        row |= {"of the limit": held / cap, "tokens equal": equal, "failed": said}
        yield row | {"ok": said is None and equal is not False}
        shutil.rmtree(place.work / "offload", ignore_errors=True)
        model = None
        gc.collect()
    devices.limit(gpu, None)


def _streamed(place: Place, name: str, compression: str, gpu: Any, weights: int, host: int) -> Any:
    """This project's model, with so many bytes for weights on the GPU and in pinned memory."""
    folder = _split(place.work / name, place.work / f"layers-{name}", None if compression == "none" else compression)
    return _load(folder, [gpu], weights, host, dtype=_dtype(gpu))


def _placed(place: Place, gpu: Any, weights: int) -> Any:
    """A model of transformers that accelerate places: so many bytes on the GPU, the others in memory."""
    auto: Any = importlib.import_module("transformers").AutoModelForCausalLM
    limits = {"cpu": ALL, 0: weights} if devices.is_cuda(gpu) else {"cpu": weights}
    options = {"device_map": "auto", "max_memory": limits, "offload_folder": str(place.work / "offload")}
    return auto.from_pretrained(place.work / "vram", dtype=getattr(torch, _dtype(gpu)), **options)


def _dtype(gpu: Any) -> str:
    """GPUs before compute capability 8.0 only emulate bfloat16."""
    return "bfloat16" if gpu.has_bf16 else "float16"


T4_BYTES = 14 * GIB


def wide(place: Place) -> Iterator[Row]:
    """Peaks of passes in a T4's memory, and a pass after one with too little memory."""
    shape = MODELS["tiny" if place.is_rehearsal else "qwen2.5-72b"]
    model = _endless(shape)
    part, gpu, most = checkpoint(model, 2 / shape.layers), devices.gpus(place)[0], T4_BYTES
    sized_model.write(part, place.work / "wide")
    folder = _split(place.work / "wide", place.work / "layers-wide")
    for budget, host in ((2 * part.nbytes_4bit, 0), (0, ALL)):
        devices.limit(gpu, most)
        with devices.watched(place), torch.inference_mode():
            yield from _peaks(_load(folder, [gpu], budget, host), gpu, most, 96 if place.is_rehearsal else 3000)
        gc.collect()


def _endless(model: Model, **config: Any) -> Model:
    """A model that generates greedily, and ends no text."""
    config = {**model.config, **config, "bos_token_id": None, "eos_token_id": None}
    return replace(model, config=config, generation_config={"do_sample": False})


def whole(place: Place) -> Iterator[Row]:
    """Tokens of a 72B model at 4bit: in a T4's memory with the rest in pinned memory, and all in GPU memory."""
    shape, gpu = MODELS["tiny" if place.is_rehearsal else "qwen2.5-72b"], devices.gpus(place)[0]
    begun = time.perf_counter()
    sized_model.write(checkpoint(_endless(shape), 2 / shape.layers), place.work / "whole")
    folder = _split(place.work / "whole", place.work / "layers-whole")
    shutil.rmtree(place.work / "whole")  # the layers take 41 GB
    sized_model.repeat_a_layer(folder, 4 if place.is_rehearsal else shape.layers)
    seconds, nbytes = time.perf_counter() - begun, MIB if place.is_rehearsal else COPIED_BYTES
    rate = devices.copy_rate(gpu, nbytes, gpu.host_buffer(nbytes))
    for most in (T4_BYTES, None):
        devices.limit(gpu, most)
        devices.forget_peak(gpu)
        budget, begun = (0 if place.is_rehearsal else most - GIB) if most else ALL, time.perf_counter()
        with devices.watched(place), torch.inference_mode():
            loaded = _load(folder, [gpu], budget, ALL, verify_checksums=False)
            row: Row = {"weights": _tiers(loaded), "made s": seconds, "load s": time.perf_counter() - begun}
            measured = passes.generate(loaded, 12)
            link = passes.copied_bytes(loaded) / rate
        row |= {"first token s": measured["first_token_seconds"], "s/token": measured["token_seconds"]}
        yield row | {
            "GB a pass": passes.copied_bytes(loaded) / 1e9,
            "link alone": link,
            "GiB held": devices.held(gpu) / GIB,
        }
        del loaded
        gc.collect()


def _peaks(model: Any, gpu: Any, most: int, long: int) -> Iterator[Row]:
    """Of passes of one sequence, of several, of a long prompt; and again in half the memory of the last one."""
    cost, weights = _cost(model), devices.forget_peak(gpu)
    last, answers = f"a prompt of {long}", dict[str, torch.Tensor]()
    generate = partial(model.generate, max_new_tokens=4, do_sample=False)
    short, eight, long_prompt = _ids(model, 16), _ids(model, 16, 8), _ids(model, long)
    works = {"one sequence": partial(generate, short), "2 beams": partial(generate, short, num_beams=2)}
    works |= {"batch of 8": partial(generate, eight), last: partial(generate, long_prompt)}
    sizes = {"one sequence": (16, 1), "2 beams": (32, 2), "batch of 8": (128, 8), last: (long, 1)}
    taken, cases = 0, [*works, "in half of that", "one sequence, again"]
    for case in cases:
        if is_too_little := case == cases[-2]:
            devices.limit(gpu, weights + taken // 2)
        elif case == cases[-1]:
            devices.limit(gpu, most)
        name, said, begun = {cases[-2]: last, cases[-1]: cases[0]}.get(case, case), None, time.perf_counter()
        devices.forget_peak(gpu)
        try:
            answers[case] = works[name]().cpu()
        except NotEnoughMemoryError as error:
            said = error.problem[:120]
        taken = devices.peak(gpu) - weights
        tokens, sequences = sizes[name]
        row = {"weights": _tiers(model), "case": case, "seconds": time.perf_counter() - begun, "MiB": taken / MIB}
        is_right = case != cases[-1] or (
            cases[0] in answers and case in answers and torch.equal(answers[cases[0]], answers[case])
        )
        row |= {"estimated": cost.of(tokens, tokens, sequences) / MIB, "out of memory": said}
        yield row | {"ok": bool(said) == is_too_little and is_right}


def _cost(model: Any) -> Any:
    """The estimate of a pass."""
    memory = importlib.import_module("rabbitllm.generation.memory")
    return memory.cost_of_a_pass(model.config.get_text_config(), model.dtype.itemsize)


def pace(place: Place) -> Iterator[Row]:
    """Seconds of a token over the longer of its copies alone, at the link's rate, and computing alone."""
    part = sized_model.model_of(0.004 if place.is_rehearsal else 4, tiny=place.is_rehearsal)
    sized_model.write(part, place.work / "pace")
    gpu, nbytes = devices.gpus(place)[0], MIB if place.is_rehearsal else COPIED_BYTES
    rate = devices.copy_rate(gpu, nbytes, gpu.host_buffer(nbytes))
    for compression, host in (("none", ALL), ("4bit", ALL), ("none", 0)):
        with devices.watched(place), torch.inference_mode():
            model = _streamed(place, "pace", compression, gpu, 0, host)
            # the first products of a kind take long, and for a second after a load copies may take twice as long
            passes.generate(model, 20)
            measured, copied = passes.generate(model, 20), passes.copied_bytes(model)
            seconds = measured["token_seconds"]
            link, bring, compute = (
                copied / rate,
                passes.seconds_to_bring(model, gpu),
                passes.seconds_to_compute(model, 6),
            )
        ratio = seconds / max(link if host else max(link, bring), compute)
        row: Row = {"compression": compression, "from": "pinned memory" if host else "layer files"}
        row |= {"GB a pass": copied / 1e9, "link GB/s": rate / 1e9, "s/token": seconds}
        row["slowest"] = max(measured["step_seconds"])
        row |= {"link alone": link, "bringing alone": bring, "computing alone": compute, "of its limit": ratio}
        yield row | {"ok": ratio <= LIMIT_GOAL or place.is_rehearsal}
        del model
        gc.collect()


STEPS = 30
"""Tokens whose time is taken."""


def overhead(place: Place) -> Iterator[Row]:
    """Milliseconds of a token and of a layer where products take next to nothing, against transformers' own model."""
    build: Any = importlib.import_module("tests.support.builders").build_checkpoint
    auto: Any = importlib.import_module("transformers").AutoModelForCausalLM
    gpu = devices.gpus(place)[0]
    for family in ("llama",) if place.is_rehearsal else ("llama", "qwen3_next"):
        layers = 4 if place.is_rehearsal else 24
        source = build(place.work / f"steps-{family}", family, num_hidden_layers=layers, dtype=torch.bfloat16)
        ways: dict[str, tuple[str | None, int, int]] = {"none": (None, ALL, 0), "4bit": ("4bit", ALL, 0)}
        ways |= {"none, pinned": (None, 0, ALL), "4bit, pinned": ("4bit", 0, ALL)}
        with devices.watched(place), torch.inference_mode():
            if devices.is_cuda(gpu):
                plain = auto.from_pretrained(source, dtype=torch.bfloat16).to(gpu.torch_device)
                yield {"family": family, "way": "transformers", **_stepped(plain, gpu, layers)}
            for way, (compression, budget, host) in ways.items():
                folder = _split(source, place.work / f"steps-{family}-{compression}", compression)
                model = _load(folder, [gpu], budget, host, dtype=_dtype(gpu))
                yield {"family": family, "way": way, **_stepped(model, gpu, layers)}


def _stepped(model: Any, gpu: Any, layers: int) -> Row:
    """The median of three times; a token's time is that of a long answer less that of a short one."""
    model.generation_config.eos_token_id = None
    ids, taken = _ids(model, 16), dict[int, float]()
    for count in (4, 4 + STEPS):
        work = partial(model.generate, ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        taken[count] = devices.seconds_of([gpu], work, 3)
    milliseconds = 1e3 * (taken[4 + STEPS] - taken[4]) / STEPS
    return {"ms a token": milliseconds, "ms a layer": milliseconds / layers}


FORMS = ("none", "8bit", "auto", "GGUF", "experts")
AUTO_SHARE = 0.45
"""Of a checkpoint: the size of layer files at "auto"."""
EXPERTS = 64
"""Of a layer; the model has 512."""
TOKENS = 6


def forms(place: Place) -> Iterator[Row]:
    """Seconds of loading and of a token, and equal tokens in every place of the weights."""
    part = sized_model.model_of(0.004 if place.is_rehearsal else 1, tiny=place.is_rehearsal)
    sized_model.write(part, place.work / "dense")
    gpu = devices.gpus(place)[0]
    for form in FORMS:
        try:
            begun = time.perf_counter()
            folder = _in_form(form, place, part.nbytes)
            seconds, expected = time.perf_counter() - begun, None
            for budget, host in ((ALL, 0), (0, ALL), (0, 0)):
                begun = time.perf_counter()
                with devices.watched(place), torch.inference_mode():
                    model = _load(folder, [gpu], budget, host, exact=True)
                    gpu.synchronise()
                    row: Row = {"form": form, "weights": _tiers(model), "split s": seconds}
                    row |= {"load s": time.perf_counter() - begun, **_paced(model, expected)}
                expected = row.pop("tokens")
                yield row
                del model
                gc.collect()
        except Exception:  # the other forms may work
            yield {"form": form, "failed": traceback.format_exc(), "ok": False}


def _in_form(form: str, place: Place, nbytes: int) -> Path:
    """A split directory of the dense model or of one with experts."""
    source, options = place.work / "dense", dict[str, Any](compression=None if form in ("none", "GGUF") else form)
    if form == "auto":
        options["max_disk"] = int(nbytes * AUTO_SHARE)
    elif form == "GGUF":
        bare = place.work / "without-a-tokenizer"  # a GGUF file cannot have this model's
        shutil.copytree(source, bare, ignore=shutil.ignore_patterns("tokenizer*", "*.safetensors"))
        for shard in source.glob("*.safetensors"):
            (bare / shard.name).hardlink_to(shard)
        source = place.work / "dense.gguf"
        convert_to_gguf(str(bare), source, "q8_0", HubAccess(), max_disk=None, min_free=0)
    elif form == "experts":
        source, options["compression"] = place.work / "experts", "4bit"
        model = MODELS["tiny-moe" if place.is_rehearsal else "coder-next"]
        few = {} if place.is_rehearsal else {"num_experts": EXPERTS}
        model = _endless(model, **few)
        sized_model.write(checkpoint(model, 4 / model.layers), source)
    target = place.work / f"layers-{form}"
    rabbitllm.AutoModel.from_pretrained(source, device="cpu", layer_shards_saving_path=target, **options)
    return next(target.rglob("split.json")).parent


def _paced(model: Any, expected: list[int] | None) -> Row:
    """Seconds of a token after the first, and the tokens."""
    ids, taken, tokens = _ids(model), list[float](), list[int]()
    for count in (1, 2, 1, TOKENS + 1):  # the first two load the kernels of a prompt and those of a token
        begun = time.perf_counter()
        tokens = model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)[0].tolist()
        taken.append(time.perf_counter() - begun)
    equal = expected is None or tokens == expected
    row = {"first token s": taken[0], "s/token": (taken[3] - taken[2]) / TOKENS}
    return row | {"GB a pass": model.placement.uploaded_bytes / 1e9, "ok": equal, "tokens": tokens}
