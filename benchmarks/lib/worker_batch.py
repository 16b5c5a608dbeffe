"""Many prompts, or many texts to score, with one implementation; loaded by `worker.py`, in its environment.

Prompts are made here, since thousands of them are more than a command line holds. Texts to score come in a file:
[{"context": ids, "choices": [ids, ...]}, ...]. Imports nothing of this repository but the package that is measured.
"""

from __future__ import annotations

import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def prompt(number: int, length: int, vocabulary: int) -> list[int]:
    """Token ids; no two numbers begin alike."""
    return [(number * 7919 + place * (37 + number % 11) + 11) % vocabulary for place in range(length)]


def _ours(job: dict[str, Any], count: int) -> Any:
    package = importlib.import_module(job["package"])
    (manifest,) = Path(job["path"]).rglob("split.json")
    return package.batch(
        str(manifest.parent),
        [{"tokens": prompt(number, job["length"], job["vocabulary"])} for number in range(count)],
        job["out"],
        max_new_tokens=job["tokens"],
        sequences=job["sequences"],
        device="cpu",
        overwrite=True,
        **job["options"],
    )


def texts_of(job: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Context and continuation of every choice, question by question."""
    questions = json.loads(Path(job["questions"]).read_text())
    return [(one["context"], choice) for one in questions for choice in one["choices"]]


class Score:
    """The job of this project, with what `lib/worker.py` knows."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def score(self, job: dict[str, Any]) -> dict[str, Any]:
        """All texts, by `rabbitllm.generation.scoring`; then the time of reading all weights once."""
        import torch

        from rabbitllm.generation.scoring import Room, ScoredText, score  # type: ignore[import-not-found,unused-ignore]

        start = time.perf_counter()
        model = self.worker.LOADERS[job["loader"]](job)
        loaded = time.perf_counter()
        texts = [ScoredText(number, *pair) for number, pair in enumerate(texts_of(job))]
        plans: list[Any] = []
        room = Room(memory_bytes=job.get("memory_bytes"), tokens=job.get("batch_tokens"))
        read = self.worker.bytes_read()
        begun = time.perf_counter()
        found = {one.index: one for one in score(model, texts, room, on_plan=plans.append)}
        seconds = time.perf_counter() - begun
        read = self.worker.bytes_read() - read
        failed = next((one.error for one in found.values() if one.error is not None), None)
        if failed is not None:
            raise RuntimeError(str(failed))
        return {
            **self.worker._limits(model),
            "load_seconds": loaded - start,
            "seconds": seconds,
            "disk_bytes": read,
            "logprobs": [found[number].logprob for number in range(len(texts))],
            "computed_tokens": sum(plan.computed for plan in plans),
            "passes": sum(len(plan.passes) for plan in plans),
            "micro_batches": sum(len(one) for plan in plans for one in plan.passes),
            "threads": torch.get_num_threads(),
            "placed": self.worker._placed(model),
        }

    def score_plain(self, job: dict[str, Any]) -> dict[str, Any]:
        """Texts in batches of like length, by a forward of transformers for each; of the batches only some, spread
        evenly, and the whole reckoned from their tokens."""
        import torch

        start = time.perf_counter()
        model = self.worker.LOADERS[job["loader"]](job)
        loaded = time.perf_counter()
        texts = texts_of(job)
        size = job["batch"]
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number][0]) - len(texts[number][1]))
        batches = [order[at : at + size] for at in range(0, len(order), size)]
        step = max(len(batches) // job["batches"], 1)
        tried = batches[step // 2 :: step][: job["batches"]]
        times, logprobs = [], {}
        read = self.worker.bytes_read()
        for batch in tried:
            begun = time.perf_counter()
            for number, value in zip(batch, _forward(model, [texts[number] for number in batch]), strict=True):
                logprobs[number] = value
            times.append(time.perf_counter() - begun)
        read = self.worker.bytes_read() - read
        return {
            "load_seconds": loaded - start,
            "seconds": statistics.fmean(times) * len(batches),
            "disk_bytes": read * len(batches) // len(tried),
            "logprobs": [logprobs.get(number) for number in range(len(texts))],
            "computed_tokens": sum(len(batch) * max(_inputs(texts[number]) for number in batch) for batch in batches),
            "passes": len(batches),
            "micro_batches": len(batches),
            "threads": torch.get_num_threads(),
            "placed": self.worker._placed(model),
        }


def _inputs(text: tuple[list[int], list[int]]) -> int:
    return len(text[0]) + len(text[1]) - 1


def _forward(model: Any, texts: list[tuple[list[int], list[int]]]) -> list[float]:
    """Filled up in front, so that the logits that are wanted are the last ones of each."""
    import torch

    longest, most = max(map(_inputs, texts)), max(len(text[1]) for text in texts)
    ids, mask = torch.zeros(2, len(texts), longest, dtype=torch.long)
    for row, own, (context, continuation) in zip(ids, mask, texts, strict=True):
        whole = [*context, *continuation][:-1]
        row[-len(whole) :], own[-len(whole) :] = torch.tensor(whole), 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode():
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False, logits_to_keep=most
        ).logits
    found = []
    for own, (_, continuation) in zip(logits, texts, strict=True):
        chances = torch.log_softmax(own[-len(continuation) :].float(), -1)
        found.append(float(chances.gather(1, torch.tensor(continuation)[:, None]).sum()))
    return found


def tasks(worker: Any, job: dict[str, Any]) -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    """What there is to do; `worker` is the module `worker.py`."""

    def bulk(job: dict[str, Any]) -> dict[str, Any]:
        """Generate for so many prompts at once: seconds from the first to the last of them, loading not counted."""
        count, before = job["sequences"], worker.bytes_read()
        if job["package"] == "rabbitllm" and job["is_ours"]:
            report = _ours(job, count)
            if report.errors:
                raise RuntimeError(Path(job["out"]).read_text().splitlines()[0][:200])
            made, seconds = report.new_tokens, report.seconds
        else:
            made, seconds = _generated(job, count)
        if made != count * job["tokens"]:
            raise RuntimeError(f"{count * job['tokens']} tokens were asked for; {made} came")
        return {"seconds": seconds, "new_tokens": made, "disk_bytes": worker.bytes_read() - before}

    def _generated(job: dict[str, Any], count: int) -> tuple[int, float]:
        import torch

        model = worker.LOADERS[job["loader"]](job)
        ids = torch.tensor([prompt(number, job["length"], job["vocabulary"]) for number in range(count)])
        begun = time.perf_counter()
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=job["tokens"], do_sample=False
        )
        return output[:, job["length"] :].numel(), time.perf_counter() - begun

    scoring = Score(worker)
    return {"bulk": bulk, "score": scoring.score, "score-plain": scoring.score_plain}
