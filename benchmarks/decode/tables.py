"""A table of 10 GB of which a token uses a few rows: bytes from the disk, memory and seconds of tokens and of a prompt.

The model is a small Qwen4-Exp whose n-gram table is stored in eight tensors, as such models are published; all other
weights stay in memory. It is read from the checkpoint, and from a split, whose blocks are compared with their checksums
when a row of them is first used.

    python -m benchmarks decode.tables [--megabytes 10000] [--tokens 64] [--prompt 4000] [--work-dir DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import command_line, report
from benchmarks.lib.measure import drop_cached, fresh_folder, memory_of, spread
from benchmarks.lib.worker import bytes_read

_RESULTS = command_line.RESULTS / "tables"
_PARTS = 8
_ROW = 64
"""Columns of the table, bfloat16."""
_HEADS = 8
"""Rows of each token, for n-grams of two tokens and of three each."""
_CONFIG: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8000,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "hc_lowrank": 16,
    "ple_layer_ids": [1],
    "ple_embed_dim": 2 * _HEADS * _ROW,
    "heads_per_ngram": _HEADS,
    "split_ngram_parts": _PARTS,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 64,
    "indexer_compress_ratio": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Row:
    """Passes of one token each, and of a prompt after them.

    Attributes:
        source: what the table is read from.
        table_bytes: of the whole table.
        rows: looked up in all passes.
        read: bytes from the disk, for each pass.
        seconds: for each pass.
        prompt_rows, prompt_read, prompt_seconds: of the table alone, for the prompt.
        memory: anonymous bytes added to the process by the model and its passes.
    """

    source: str
    table_bytes: int
    rows: int
    read: list[int]
    seconds: list[float]
    prompt_rows: int
    prompt_read: int
    prompt_seconds: float
    memory: int


def build(folder: Path, megabytes: int) -> int:
    """Write the checkpoint, and return the bytes of its table."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    base = megabytes * 1000**2 // (2 * _HEADS * _ROW * 2)

    def config_of(base: int) -> Any:
        return transformers.AutoConfig.for_model("qwen4_exp_text", **_CONFIG, ngram_vocab_size_base=base)

    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(config_of(300), dtype=torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    with torch.device("meta"):
        table = Qwen4ExpTextNGramEmbedding(config_of(base), _CONFIG["ple_embed_dim"], 0)
    path = next(name for name in tensors if "ngram_embedding.shard_0" in name).partition("ngram_embedding")[0]
    plain = {name: tensor for name, tensor in tensors.items() if "ngram_embedding.shard_" not in name}
    plain[f"{path}ngram_heads_vocab_sizes"] = torch.tensor(table.head_vocab_sizes)
    plain[f"{path}ngram_heads_offsets"] = torch.tensor(table.head_offsets)
    (folder / "model.safetensors").unlink()
    save_file(plain, folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    rows = table.ngram_embedding.weight.shape[0]
    ends = [rows * part // _PARTS for part in range(_PARTS + 1)]
    names = [f"{path}ngram_embedding.shard_{part}.weight" for part in range(_PARTS)]
    _write_table(folder / "model-00002-of-00002.safetensors", names, ends)
    weight_map = dict.fromkeys(plain, "model-00001-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": weight_map | dict.fromkeys(names, "model-00002-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "ngram_vocab_size_base": base}))
    return int(rows) * _ROW * 2


def _write_table(path: Path, names: Sequence[str], ends: Sequence[int]) -> None:
    """Random small numbers, repeated every 8 MiB: the system would read nothing of a sparse file."""
    import torch

    header = {
        name: {"dtype": "BF16", "shape": [end - begin, _ROW], "data_offsets": [begin * _ROW * 2, end * _ROW * 2]}
        for name, begin, end in zip(names, ends, ends[1:], strict=False)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = (torch.randn(4 << 20, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    data = block.view(torch.uint8).numpy().data
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        left = ends[-1] * _ROW * 2
        while left:
            left -= file.write(data[: min(left, len(data))])
        file.flush()
        os.fsync(file.fileno())


def measure(folder: Path, table_bytes: int, tokens: int, prompt: int, split: Path | None) -> Row:
    """Load the model with memory for all weights except the table, and compute passes of one token, then a prompt."""
    import torch

    from rabbitllm import AutoModel
    from rabbitllm.engine.placement import Tier

    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    options: dict[str, Any] = {"max_memory": {"cpu": total - table_bytes // 2}, "show_layer_progress": False}
    options |= {"split": False} if split is None else {"layer_shards_saving_path": str(split)}
    if split is not None:
        AutoModel.from_pretrained(folder, device="cpu", **options)
    drop_cached(split or folder)
    before = memory_of(os.getpid())
    model = AutoModel.from_pretrained(folder, device="cpu", **options)
    tiers = {placed.unit: placed.tier for placed in model.placement.units}
    [(name, table)] = model.streamer.tables.items()
    assert tiers[name] is Tier.ROWS
    ids = random.Random(0)
    read, seconds = [], []
    with torch.inference_mode():
        cache = model(torch.tensor([[1, 5]]), use_cache=True).past_key_values
        first = table.rows_read
        for _ in range(tokens):
            token = torch.tensor([[ids.randrange(3, _CONFIG["vocab_size"])]])
            began, start = bytes_read(), time.perf_counter()
            cache = model(token, past_key_values=cache, use_cache=True).past_key_values
            seconds.append(time.perf_counter() - start)
            read.append(bytes_read() - began)
        rows = table.rows_read - first
        drop_cached(split or folder)
        text = torch.tensor([[ids.randrange(3, _CONFIG["vocab_size"]) for _ in range(prompt)]])
        began, start = bytes_read(), 0.0
        embedding = model.get_submodule(name)

        def before_table(module: Any, args: Any) -> None:
            nonlocal began, start
            began, start = bytes_read(), time.perf_counter()

        def after_table(module: Any, args: Any, output: Any) -> None:
            nonlocal began, start
            began, start = bytes_read() - began, time.perf_counter() - start

        embedding.register_forward_pre_hook(before_table)
        embedding.register_forward_hook(after_table)
        model(text, use_cache=True)
    after = memory_of(os.getpid())
    added = after.anonymous - before.anonymous if before is not None and after is not None else 0
    prompt_rows = table.rows_read - first - rows
    source = "checkpoint" if split is None else "split"
    return Row(source, table_bytes, rows, read, seconds, prompt_rows, began, start, added)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, run, print, write; delete the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=10_000, help="of the table (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="passes of one token (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=4000, help="its tokens (default: %(default)s)")
    parser.add_argument("--work-dir", type=Path, default=command_line.WORK, help="for the checkpoint")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="file to write, without suffix")
    options = command_line.parsed(parser, arguments, megabytes=30, tokens=4, prompt=40)
    rows = []
    with fresh_folder(options.work_dir / "tables") as folder, fresh_folder(options.work_dir / "tables-split") as split:
        table_bytes = build(folder, options.megabytes)
        for source in (None, split):
            rows.append(measure(folder, table_bytes, options.tokens, options.prompt, source))
    title = (
        f"A table of which a token uses a few rows, {options.tokens} passes, and a prompt of {options.prompt} tokens"
    )
    report.write(options.results, title, *_shown(rows), rows, work=options.work_dir)
    return 0


def _shown(measured: Sequence[Row]) -> tuple[report.Table, list[str]]:
    headings = (
        *("read from", "table, GB", "rows a token", "their bytes", "read a token, KiB", "s/token"),
        *("rows of the prompt", "read for it, MB", "s for it", "memory added, MB"),
    )
    notes = [
        "Of the prompt: the table alone, cold; the other columns are of whole passes.",
        "Memory: anonymous bytes of the process, added by loading and all passes; page cache is not counted.",
    ]
    return report.Table(headings, [_cells(row) for row in measured]), notes


def _cells(row: Row) -> tuple[str, ...]:
    rows = row.rows / len(row.read)
    return (
        row.source,
        f"{row.table_bytes / 1e9:.2f}",
        f"{rows:.1f}",
        f"{rows * _ROW * 2:.0f}",
        report.shown(spread(row.read), 1, 1024),
        report.shown(spread(row.seconds), 4),
        f"{row.prompt_rows:,}",
        f"{row.prompt_read / 1e6:.0f}",
        f"{row.prompt_seconds:.2f}",
        f"{row.memory / 1e6:.1f}",
    )
