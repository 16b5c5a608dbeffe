"""Causal models of every type that can be built small, on a GPU against the CPU: logits, tokens, drafts, batches.

Processes share the types, each with a context of its own on the GPU. The first matrix products of a process take most
of its time, so there are as many processes as cores, and at most `MOST_PROCESSES`.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import shutil
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import devices
from benchmarks.gpu.child import Place
from rabbitllm.base.options import RunOptions
from rabbitllm.engine.devices import CpuDevice
from rabbitllm.engine.load import load_model
from rabbitllm.errors import OptionError, RabbitLLMError
from rabbitllm.generation.batch import Batch
from rabbitllm.generation.request import Limits, Request
from rabbitllm.generation.session import answer

ALL = 1 << 34
PLACES = {"resident": (ALL, 0), "pinned": (0, ALL), "streamed": (0, 0)}
"""Bytes for weights on the GPU, and in pinned memory."""
MOST_PROCESSES = 14
NEAR, NEAR_CODES = 1e-3, 2e-2
"""Relative errors of logits in float32, by the norm: of weights as stored, and of products from codes."""
IDS = [[1, 40, 81, 7, 200, 33, 160, 5, 92, 11, 64]]
NEW_TOKENS = 12
REHEARSED = ("llama", "qwen3_next")
GENERATED = ("llama", "gemma3_text", "qwen3_next", "qwen3_5_text", "kimi_linear", "nemotron_h", "mamba2", "gpt_oss")
"""Types that answer with drafts and in batches; all others are compared by logits and greedy tokens."""
Row = dict[str, Any]


def families(place: Place) -> Iterator[Row]:
    """Rows of types that differ from the CPU or fail, and of those that generate; then their numbers."""
    rows = list[Row]()
    if place.is_rehearsal:
        rows = [_compared(name, place) for name in REHEARSED]
    else:
        mapping: Any = importlib.import_module("transformers.models.auto.modeling_auto")
        names = sorted({*mapping.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *GENERATED})
        processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            rows += pool.map(_compared, names, [place] * len(names))
    yield from ({"type": row["type"], "failed": row["failed"], "ok": False} for row in rows if "failed" in row)
    done = [row for row in rows if "skipped" not in row]
    steady = [row for row in done if row["CPU to GPU"] <= NEAR]
    yield {
        "types": len(done),
        "cannot be built small": len(rows) - len(done),
        "worst error": max((row["error"] for row in steady), default=0.0),
        "from codes": max((row["from codes"] for row in steady), default=0.0),
        "differ in transformers": ", ".join(row["type"] for row in done if row["CPU to GPU"] > NEAR) or "none",
        "other tokens than the CPU's": sum(row["other tokens"] for row in done),
        "answers with drafts and in batches": sum(row["answers"] for row in done),
        "ok": all(row.get("ok", True) for row in done),
    }


@dataclass(frozen=True)
class _Split:
    """A split directory, loaded on a device."""

    folder: Path
    gpu: Any

    def load(self, where: str | None, **options: Any) -> Any:
        """A model in float32; on the CPU if `where` is None."""
        device, (budget, host) = (CpuDevice(), (ALL, ALL)) if where is None else (self.gpu, PLACES[where])
        limits = {"cpu": budget} if where is None else {device.name: budget, "cpu": host}
        settings = {"exact": True, "dtype": "float32", **options}
        return load_model(self.folder, RunOptions(max_memory=limits, show_progress=False, **settings), None, [device])


def _compared(name: str, place: Place) -> Row:
    """The rows of one type."""
    folder, row = (
        place.work / f"type-{name}",
        {"type": name, "error": 0.0, "from codes": 0.0, "other tokens": 0, "CPU to GPU": 0.0},
    )
    row |= {"answers": 0}
    try:
        with devices.watched(place), torch.inference_mode():
            if (reason := _build(folder, name)) is not None:
                return {"type": name, "skipped": reason}
            for compression in (None, "4bit"):
                _compare(row, _Split(_split(folder, compression), devices.gpus(place)[0]), compression)
    except Exception:  # other types may work
        row |= {"failed": "\n".join(traceback.format_exc().splitlines()[-60:]), "ok": False}
    finally:
        gc.collect()
        shutil.rmtree(folder, ignore_errors=True)
    return row


def _build(folder: Path, name: str) -> str | None:
    """Save a small random model that transformers can load again; else return the reason."""
    configs: Any = importlib.import_module("tests.support.tiny_configs")
    auto: Any = importlib.import_module("transformers").AutoModelForCausalLM
    errors: list[Exception] = []
    for model in configs.models(auto, name, errors):
        try:
            if not model(torch.tensor(IDS)).logits.isfinite().all():
                raise ValueError("its logits are not finite")
            model.save_pretrained(folder)
            auto.from_pretrained(folder)
        except Exception as error:
            errors.append(error)
            shutil.rmtree(folder, ignore_errors=True)
        else:
            importlib.import_module("tests.support.builders").make_tokenizer().save_pretrained(folder)
            return None
    return str(errors[0])[:200]


def _split(folder: Path, compression: str | None) -> Path:
    split: Any = importlib.import_module("tests.support.tiny_models").split
    return Path(split(folder, compression))


def _compare(row: Row, split: _Split, compression: str | None) -> None:
    """Compare logits and tokens of all places with each other's, and with the CPU's."""
    plain = split.load(None)
    expected, tokens = plain(torch.tensor(IDS)).logits, _greedy(plain)
    if compression is None:
        row["CPU to GPU"] = _distance(genuine := _on_the_gpu(split), expected)
        if row["CPU to GPU"] > NEAR:
            expected = genuine
    elif row["CPU to GPU"] > NEAR:  # routing or an index is decided by rounding
        expected = split.load("resident")(torch.tensor(IDS).to(split.gpu.torch_device)).logits.cpu()
    results = dict[str, tuple[torch.Tensor, list[int] | None]]()
    for where in PLACES:
        try:
            model = split.load(where)
        except RabbitLLMError as error:
            if where == "resident" or "must be resident" not in str(error):
                raise
            break
        results[where] = (model(torch.tensor(IDS).to(model.device)).logits.cpu(), _greedy(model, tokens is not None))
    errors = {where: _distance(logits, expected) for where, (logits, _) in results.items()}
    row["error"] = max(row["error"], *errors.values())
    problems = [f"{where}: error {error:.2g}" for where, error in errors.items() if not error <= NEAR]
    logits, own = results["resident"]
    problems += [f"{where}: not the bits of resident" for where, r in results.items() if not torch.equal(r[0], logits)]
    problems += [f"{where}: other tokens than resident" for where, r in results.items() if r[1] != own]
    row["other tokens"] += own != tokens
    where = list(results)[-1]
    fast = split.load(where, exact=False)
    from_codes = _distance(fast(torch.tensor(IDS).to(fast.device)).logits.cpu(), expected)
    if compression:
        row["from codes"] = max(row["from codes"], from_codes)
    problems += (
        [f"not exact: error {from_codes:.2g}"] if not from_codes <= (NEAR_CODES if compression else NEAR) else []
    )
    if row["type"] in (*GENERATED, *REHEARSED):
        with importlib.import_module("pytest").MonkeyPatch.context() as patch:
            importlib.import_module("tests.support.always_drafts").draft_always(patch)
            problems += _answers(row, split, fast)
    if problems:
        row |= {
            "ok": False,
            "failed": "; ".join([*filter(None, [row.get("failed")]), f"{compression or 'as stored'}: ", *problems]),
        }


def _on_the_gpu(split: _Split) -> torch.Tensor:
    """Logits of transformers' own model, computed by the same device."""
    auto: Any = importlib.import_module("transformers").AutoModelForCausalLM
    model = auto.from_pretrained(split.folder.parent, dtype=torch.float32)
    if not devices.is_cuda(split.gpu):
        return torch.as_tensor(model(torch.tensor(IDS)).logits)
    return torch.as_tensor(model.to(split.gpu.torch_device)(torch.tensor(IDS).to(split.gpu.torch_device)).logits.cpu())


def _greedy(model: Any, is_expected: bool = True) -> list[int] | None:
    """Tokens after a prompt; None if the type does not generate with these settings."""
    try:
        ids = torch.tensor(IDS).to(model.device)
        tokens: list[int] = model.generate(ids, max_new_tokens=6, do_sample=False)[0].tolist()
        return tokens
    except Exception:
        if is_expected and model.device.type == "cuda":
            raise
        return None


def _answers(row: Row, split: _Split, model: Any) -> list[str]:
    """Answers with a draft and of a batch, of which each is to be what the model answers alone."""
    submitting: Any = importlib.import_module("tests.generation.submitting")
    draft = split.load("resident", exact=False)
    draft.generation_config.assistant_confidence_threshold = 0
    requests = [Request(tuple(IDS[0][:count]), NEW_TOKENS) for count in (11, 5, 8)]
    alone = [list(answer(model, request, lambda piece: None).tokens) for request in requests]
    drafted = [list(answer(model, request, lambda piece: None, draft=draft).tokens) for request in requests]
    row["answers"] += len(requests)
    problems = [] if drafted == alone else [f"other tokens with a draft: {drafted}, not {alone}"]
    for limits in (Limits(chunk=16), Limits(chunk=16, draft=draft)):
        try:
            batch = Batch(model, limits)
        except OptionError:  # not for every type
            continue
        try:
            answers = submitting.answered_together(batch, requests)
            tokens = [list(answer.finished.tokens) for answer in answers]
        finally:
            batch.close(0)
        row["answers"] += len(requests)
        if tokens != alone:
            how = " with a draft" if limits.draft is draft else ""
            problems.append(f"other tokens in a batch{how}: {tokens}, not {alone}")
    return problems


def _distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits.float() - expected.float()).norm() / expected.float().norm())
