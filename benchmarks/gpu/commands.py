"""The commands of the package on a GPU, as a user types them: their exit status, seconds, and equal answers."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import rabbitllm
from benchmarks.gpu.child import Place
from benchmarks.lib.process import REPOSITORY

Row = dict[str, Any]
QUESTION = "What is the capital of France?"
AT_ONCE = 10
"""Commands; each takes most of its time to import torch."""
LIMIT, REHEARSAL_LIMIT = 60, 1200
"""Seconds of a command; in a rehearsal other work may have the processor, and the kernels are compiled first."""
NOTHING = ("--max-memory", "cuda:0=0", "--max-memory", "cpu=0")


def commands(place: Place) -> Iterator[Row]:
    """Each command; `run` answers alike wherever the weights are."""
    demo = shutil.copytree(Path(rabbitllm.__file__).parent / "demo" / "model", place.work / "demo")
    lines, schema, used = place.work / "in.jsonl", place.work / "schema.json", place.work / "used-up"
    lines.write_text("".join(json.dumps({"prompt": QUESTION, "max_new_tokens": 8}) + "\n" for _ in range(9)))
    schema.write_text(json.dumps({"enum": ["yes", "no"]}))
    shutil.copytree(demo, used)
    where = ("--device", "cpu") if place.is_rehearsal else ()
    nothing = ("--max-memory", "cpu=0") if place.is_rehearsal else NOTHING
    schemes = ("4bit", "8bit", "q4_k_m", "4bit-double")
    run = ("run", str(demo), QUESTION, "--max-new-tokens", "16", "--temperature", "0", *where)
    for scheme in ("none", "4bit"):
        yield ended(place, "pull", str(demo), "--compression", scheme)
    alike = {"resident": run, "streamed": (*run, *nothing), "no split": (*run, "--no-split")}
    alike |= {"n-grams": (*run, "--draft", "ngram", *nothing), "profile": (*run, "--stats", *nothing)}
    others: list[Sequence[str]] = [
        ("doctor",),
        ("plan", str(demo), "--compression", "4bit", *where),
        *((*run, "--compression", scheme) for scheme in schemes),
        (*run, "--compression", "4bit", *nothing),
        (*run, "--draft", "auto", *nothing),
        (*run, "--schema", str(schema)),
        ("run", str(used), QUESTION, "--sequential", "--compression", "4bit", "--max-new-tokens", "4", *where),
        ("bench", str(demo), "--tokens", "8", *where, *nothing),
        ("batch", str(demo), str(lines), "-o", str(place.work / "out.jsonl"), *where, *nothing),
        ("quality", str(demo), "--compression", "4bit", *where),
    ]
    if place.is_rehearsal:
        others = others[-4:-3]
    with ThreadPoolExecutor(2 if place.is_rehearsal else AT_ONCE) as pool:
        futures = {pool.submit(ended, place, *command): f"run, {name}" for name, command in alike.items()}
        futures |= {pool.submit(ended, place, *command): "" for command in others}
        futures |= {pool.submit(_served, place, str(demo), *where, *nothing): ""}
        answers = list[str]()
        for future in as_completed(futures):
            row = future.result()
            if name := futures[future]:
                answers.append(row["output"])
                row["command"] = name
            yield row
    yield {"places of weights": len(answers), "different answers": len({*answers}), "ok": len({*answers}) == 1}


def _limit(place: Place) -> int:
    """Seconds after which a command of this run is ended."""
    return REHEARSAL_LIMIT if place.is_rehearsal else LIMIT


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "rabbitllm", *words]


def _environment() -> dict[str, str]:
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "PYTHONFAULTHANDLER": "1",
        "OMP_NUM_THREADS": "2",
    }


def ended(place: Place, *words: str) -> Row:
    """The result of a command; of its errors the last lines."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        _command(*words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=_limit(place))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # it says where each thread is
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
    row: Row = {"command": _named(place, words), "status": process.returncode, "seconds": time.perf_counter() - begun}
    failed = process.returncode != 0
    said = errors[-3000:] if failed else output[-300:] if words[0] == "run" else ""
    return row | {"output": " ".join(said.split()), "ok": not failed}


def _named(place: Place, words: Sequence[str]) -> str:
    return " ".join(words).replace(str(place.work), "").replace(QUESTION, "…")


def _served(place: Place, *words: str) -> Row:
    """Answers of a server to requests at once, of which two are streamed; then Ctrl-C."""
    begun, log, limit = time.perf_counter(), place.work / "serve.log", _limit(place)
    with log.open("w") as errors:
        server = subprocess.Popen(
            _command("serve", *words, "--port", "0"), stdout=errors, stderr=errors, env=_environment()
        )
    row: Row = {"command": _named(place, ("serve", *words))}
    try:
        address = _address(log, server, limit)
        with ThreadPoolExecutor(8) as pool:
            bodies = list(pool.map(lambda index: _asked(address, index, limit), range(8)))
        same = len(set(bodies)) == 1 and bool(bodies[0])
        server.send_signal(2)
        status = server.wait(limit)
        row |= {"status": status, "seconds": time.perf_counter() - begun, "output": bodies[0]}
        return row | {"ok": same and status in (0, 130)}
    except Exception as error:
        said = f"{error!r}: {log.read_text()[-1500:]}"
        return row | {"status": None, "seconds": time.perf_counter() - begun, "output": said, "ok": False}
    finally:
        server.kill()


def _address(log: Path, server: subprocess.Popen[bytes], limit: int) -> str:
    """Where a server listens, once it says so."""
    end = time.monotonic() + limit
    while time.monotonic() < end and server.poll() is None:
        for word in log.read_text().split():
            if word.startswith("http://127.0.0.1:"):
                return word.rstrip("/.,").removesuffix("/v1")
        time.sleep(0.1)
    raise RuntimeError("the server did not start")


def _asked(address: str, index: int, limit: int) -> str:
    """The text of an answer."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8, "temperature": 0, "stream": index < 2}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=limit) as answer:
        content = answer.read().decode()
    if not body["stream"]:
        return str(json.loads(content)["choices"][0]["message"]["content"])
    pieces = [json.loads(line[6:]) for line in content.splitlines() if line.startswith("data: {")]
    return "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces if piece["choices"])
