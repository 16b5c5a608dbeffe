"""Finds the supported model types of transformers: `python -m tools.supported_models`.

Each class of the mappings below that can be built small is split sequentially, loaded resident and streamed, and
compared with transformers bit for bit, in a process of its own with a limit of time and memory. Results are cached, so
that an interrupted run resumes. The table is docs/reference/supported-models.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.examined_model import DIED, OK, REFUSED, UNBUILT, Case, Row, examine

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "supported-models.md"
FOUND = ROOT / "build" / "supported_models.json"
MAPPINGS: Mapping[str, str] = {
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModel": "MODEL_MAPPING_NAMES",
}
"""Auto class -> its mapping of types to classes. Of the last one only types that take text."""
TEXT_MAPPINGS = ("MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES", "MODEL_FOR_MASKED_LM_MAPPING_NAMES")
PRELOADED = (
    *("tools.examined_model", "rabbitllm.engine.load", "rabbitllm.auto_model", "numba"),
    *("transformers.generation.utils", "transformers.processing_utils", "transformers.convert_slow_tokenizer"),
)
"""Modules that are slow to import and start no thread."""
_TEXT = re.compile("_text$|^embedding_|^dpr$|^splinter$")
"""Types that take text by their names, and are in no mapping that says so."""
SECONDS = 300.0
MEMORY = 8 << 30


def cases() -> list[Case]:
    """Every class of the mappings, once."""
    from transformers.models.auto import modeling_auto

    def types_of(mapping: str) -> Mapping[str, Any]:
        types: Mapping[str, Any] = getattr(modeling_auto, mapping)
        return types

    text = {t for mapping in (*[*MAPPINGS.values()][:-1], *TEXT_MAPPINGS) for t in types_of(mapping)}
    by_key: dict[tuple[str, str], Case] = {}
    for auto, mapping in MAPPINGS.items():
        for model_type, names in types_of(mapping).items():
            name = names if isinstance(names, str) else names[0]
            if auto == "AutoModel" and not (model_type in text or _TEXT.search(model_type)):
                continue
            by_key.setdefault((model_type, name), Case(model_type, auto, name))
    return [by_key[key] for key in sorted(by_key)]


def row_of(case: Case, seconds: float = SECONDS, memory: int = MEMORY) -> Row:
    """Examine a class in a process of its own.

    Args:
        case: the class.
        seconds: after which the process is ended.
        memory: bytes that it may take.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="supported-") as folder:
        result = Path(folder) / "row.json"
        process = _context().Process(target=_examine, args=(case, Path(folder) / "model", result, memory))
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            row = Row(case.model_type, case.name, DIED, f"it was not through after {seconds:.0f} s")
        elif not result.exists():
            row = Row(case.model_type, case.name, DIED, f"exit status {process.exitcode}")
        else:
            row = _row(json.loads(result.read_text()))
    return dataclasses.replace(row, seconds=round(time.perf_counter() - start, 1))


def _context() -> Any:
    """One that forks from a process which has imported everything and does nothing, where the system has that."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    return context


def _examine(case: Case, folder: Path, result: Path, memory: int) -> None:
    import logging
    import os
    import warnings

    import torch
    import transformers

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("rabbitllm").propagate = False
    torch.set_num_threads(1)
    try:
        import resource
    except ImportError:  # Windows
        pass
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    row = examine(case, folder)
    part = result.with_suffix(".part")
    part.write_text(json.dumps(dataclasses.asdict(row)))
    part.replace(result)


def _row(content: Mapping[str, Any]) -> Row:
    lists = {key: tuple(value) for key, value in content.items() if isinstance(value, list)}
    return Row(**{**content, **lists})


MEANINGS = {
    OK: "the outputs are equal.",
    UNBUILT: "the class was not examined. It may work.",
    REFUSED: "RabbitLLM does not load this class.",
}


def page(rows: Iterable[Row]) -> str:
    """The rows as docs/reference/supported-models.md: a line for each type."""
    import torch
    import transformers

    rows = sorted(rows, key=lambda row: (row.model_type, row.name))
    counts = Counter(row.result for row in rows)
    lines = [
        "# Supported models",
        "",
        f"This page is made by `python -m tools.supported_models` with transformers {transformers.__version__} and "
        f"torch {torch.__version__} on a CPU. Do not edit it.",
        "",
        "Each model class is built small with random weights, saved in shards, and split with",
        "`sequential_shard_processing=True`. It is loaded twice: with memory for all weights and with memory for none.",
        "Its outputs are compared with those of transformers, bit for bit. Classes by result:",
        "",
        *(f"- **{result}** ({number}): {MEANINGS.get(result, 'a defect.')}" for result, number in counts.most_common()),
        "",
        "| type | classes | inputs | remarks |",
        "| --- | --- | --- | --- |",
        *(_line(model_type, tuple(own)) for model_type, own in itertools.groupby(rows, lambda row: row.model_type)),
    ]
    return "\n".join(lines) + "\n"


def _line(model_type: str, rows: Sequence[Row]) -> str:
    """A line of the table. A remark on some of the classes names them."""
    said: dict[str, list[str]] = {}
    for row in rows:
        result = "" if row.result == OK else row.result
        said.setdefault(" ".join(filter(None, (result, row.why and f"({row.why})"))), []).append(row.name)
    everything = len(said) == 1
    results = [text if everything else f"{', '.join(names)}: {text}" for text, names in said.items() if text]
    inputs = dict.fromkeys(name for row in rows for name in row.inputs)
    cells = [model_type, ", ".join(row.name for row in rows), ", ".join(inputs), "; ".join(results)]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


class Found:
    """Cached rows, in a file; rows of other versions of transformers are dropped."""

    def __init__(self, path: Path) -> None:
        import transformers

        self._path = path
        self._version = transformers.__version__
        content = json.loads(path.read_text()) if path.exists() else {}
        same = content.get("transformers") == self._version
        self.rows = {key: _row(row) for key, row in content.get("rows", {}).items()} if same else {}

    def add(self, case: Case, row: Row) -> None:
        """Cache a row."""
        self.rows[case.key] = row
        content = {"transformers": self._version, "rows": {k: dataclasses.asdict(r) for k, r in self.rows.items()}}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1))
        part.replace(self._path)


def _chosen(names: Sequence[str]) -> list[Case]:
    known = cases()
    return [case for case in known if not names or case.model_type in names or case.name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description="Examine every model class of transformers that can be built small.")
    parser.add_argument("names", nargs="*", metavar="name", help="types or classes; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (1)")
    parser.add_argument("--again", action="store_true", help="ignore cached results")
    parser.add_argument("--found", type=Path, default=FOUND, help="cache of results (build/supported_models.json)")
    parser.add_argument("--page", type=Path, default=PAGE, help="the table (docs/reference/supported-models.md)")
    options = parser.parse_args()
    chosen = _chosen(options.names)
    if not chosen:
        parser.error(f"there is no model type or class {', '.join(options.names)}")
    cache = Found(options.found)
    left = [case for case in chosen if options.again or case.key not in cache.rows]
    with ThreadPoolExecutor(options.jobs) as pool:
        for number, (case, row) in enumerate(zip(left, pool.map(row_of, left), strict=True), 1):
            cache.add(case, row)
            print(f"{number}/{len(left)} {row.model_type} {row.name}: {row.result} {row.why}", flush=True)
    rows = [cache.rows[case.key] for case in chosen]
    if not options.names:
        options.page.write_text(page(rows))
    for result, count in Counter(row.result for row in rows).most_common():
        print(f"{result}: {count}")
    return 0 if all(row.is_sound for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
