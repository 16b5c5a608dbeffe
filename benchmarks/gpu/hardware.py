"""Steps without a model: the link, kernels compared with the CPU, pinned memory, attention."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu import devices
from benchmarks.gpu.child import Place
from benchmarks.lib.machine import versions_here
from rabbitllm.engine.free_memory import available_ram

MIB = 1 << 20
Row = dict[str, Any]
PACKAGES = ("torch", "transformers", "accelerate", "bitsandbytes", "safetensors", "numpy", "numba", "gguf", "zlib-ng")


def versions(place: Place) -> Iterator[Row]:
    """Packages, GPUs, and the rates of copies from pinned and from ordinary memory."""
    installed = versions_here(PACKAGES) | {"CUDA of torch": str(torch.version.cuda)}
    yield from (
        {"package": name, "version": installed.get(name, "not installed")} for name in (*PACKAGES, "CUDA of torch")
    )
    for number, gpu in enumerate(devices.gpus(place)):
        nbytes = MIB if place.is_rehearsal else 256 * MIB
        sources = {"pinned here": gpu.host_buffer(nbytes), "ordinary": torch.ones(nbytes, dtype=torch.uint8)}
        if not place.is_rehearsal:
            free, total = torch.cuda.mem_get_info(number)
            yield {"GPU": gpu.name, **devices.facts(number), "free GiB": free / 2**30, "GiB": total / 2**30}
            sources["pinned by torch"] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        for memory, host in sources.items():
            down = devices.seconds_of([gpu], partial(host.copy_, gpu.device_buffer(nbytes)))
            rate = devices.copy_rate(gpu, nbytes, host)
            yield {"GPU": gpu.name, "memory": memory, "GB/s to it": rate / 1e9, "GB/s back": nbytes / down / 1e9}


FORMS = ("4bit", "8bit", "Q4_K", "Q6_K")
WIDE = {"down_proj of 72B": (8192, 29568), "gate_proj of 72B": (29568, 8192)}
INPUTS = (1, 4, 5, 16, 64)


def kernels(place: Place) -> Iterator[Row]:
    """Quantizing, dequantizing, and products from 4bit codes."""
    gpu = devices.gpus(place)[0]
    rows, columns = (64, 1024) if place.is_rehearsal else (4096, 8192)
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.02
    values[0] = 0
    yield from _quantized(gpu, values.bfloat16())
    yield from _dequantized(gpu, values.bfloat16())
    for name, shape in {"small": (64, 512)}.items() if place.is_rehearsal else WIDE.items():
        for dtype in (torch.float16, torch.bfloat16)[: 1 + gpu.has_bf16]:
            yield from _products(gpu, name, shape, dtype)


def _quantized(gpu: Any, values: torch.Tensor) -> Iterator[Row]:
    """Splits quantize on the CPU, so differences are no errors; bitsandbytes' CUDA kernel divides by the zeros of the
    first row."""
    from rabbitllm.quant.quantize import quantize_blocks

    for scheme in ("4bit", "8bit"):
        data = values.view(torch.uint8).numpy().data.cast("B")
        encoded = [quantize_blocks(scheme, data, "BF16", where) for where in ("cpu", str(gpu.torch_device))]
        differ = [np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8) for a, b in zip(*encoded, strict=True)]
        ours, zeros = int(differ[0].sum()), int(differ[0][: len(differ[0]) // len(values)].sum())
        row = {"quantized to": scheme, "bytes of codes": len(differ[0]), "differ": ours, "of them of zeros": zeros}
        yield row | {"bytes of scales": len(differ[1]), "of these differ": int(differ[1].sum())}


def _dequantized(gpu: Any, values: torch.Tensor) -> Iterator[Row]:
    """On both sides, from the same codes."""
    from rabbitllm.base.random_tensors import RandomTensors
    from rabbitllm.quant import gguf_blocks
    from rabbitllm.quant.quantize import NestedScales, dequantize, quantize_blocks
    from rabbitllm.quant.schemes import Quantized, code_values

    def compared(form: str, dtype: torch.dtype, sides: list[torch.Tensor]) -> Row:
        expected, actual = (side.cpu().float() for side in sides)
        count, most = int((expected != actual).sum()), float((expected - actual).abs().max())
        named = {"dequantized": form, "to": str(dtype).removeprefix("torch.")}
        return named | {"elements": actual.numel(), "differ": count, "by at most": most, "ok": not count}

    random, places = RandomTensors(), (torch.device("cpu"), gpu.torch_device)
    codes, nothing = random.integers(0, 256, 4096), torch.empty(0)
    nested = random.positive(16, least=0, dtype=torch.float32), code_values("8bit"), torch.tensor(0.1)
    scales = [NestedScales(*(part.to(where) for part in nested)).expanded(codes.to(where)) for where in places]
    yield compared("nested scales", torch.float32, scales)
    data = values.view(torch.uint8).numpy().data.cast("B")
    for scheme in FORMS:
        if scheme in ("4bit", "8bit"):
            parts = [bytearray(part) for part in quantize_blocks(scheme, data, "BF16", "cpu")]
            payload, absmax = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
            absmax, table = absmax.view(torch.float32), code_values(scheme)
        else:
            payload, absmax, table = gguf_blocks.sample(scheme, values.numel(), random), nothing, nothing
        form = Quantized(scheme, tuple(values.shape), "bfloat16" if scheme == "4bit" else None)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            sides = [dequantize(form, payload.to(w), absmax.to(w), table.to(w), dtype) for w in places]
            yield compared(scheme, dtype, sides)


def _products(gpu: Any, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Row]:
    """Relative errors from float64, by the norm; inputs and weights of one sign show sums in 16 bits."""
    from rabbitllm.quant.products import FusedMatrix
    from rabbitllm.quant.schemes import NF4_BLOCK, Quantized, code_values

    (rows, columns), place, generator = shape, gpu.torch_device, torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (rows * columns // 2, 1), dtype=torch.uint8, generator=generator)
    absmax = (torch.rand(rows * columns // NF4_BLOCK, generator=generator) * 0.05).to(place)
    form = Quantized("4bit", shape, str(dtype).removeprefix("torch."))
    for signs, payload in {"both": codes, "one": torch.full_like(codes, 0xFF)}.items():
        matrix = FusedMatrix(form, payload.to(place), absmax, code_values("4bit").to(place))
        x = torch.randn(max(INPUTS), columns, generator=generator).to(dtype)
        x = (x.abs() if signs == "one" else x).to(place)
        plain = replace(matrix, form=replace(form, dtype="float32")).dequantized(torch.float32)
        expected = torch.cat([x.double() @ plain[top : top + 2048].double().T for top in range(0, rows, 2048)], dim=1)
        ways: dict[str, Callable[..., torch.Tensor]] = {
            "fused": matrix.linear,
            "dequantized": partial(_by_torch, matrix),
        }
        for count in INPUTS:
            row: Row = {"product": name, "dtype": form.dtype, "signs": signs, "inputs": count}
            for way, linear in ways.items():
                error = float((linear(x[:count], None).double() - expected[:count]).norm())
                row[f"{way}: error"] = error / float(expected[:count].norm())
                row[f"{way}: ms"] = 1e3 * devices.seconds_of([gpu], partial(linear, x[:count], None))
            limit = max(8 * torch.finfo(dtype).eps, 2 * row["dequantized: error"])
            yield row | {"ok": row["fused: error"] <= limit}


def _by_torch(matrix: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x, matrix.dequantized(x.dtype), bias)


BLOCK_BYTES, MOST_BLOCKS = 494 * MIB, 43
"""Bytes of a layer of Qwen2.5-72B at 4bit, and the number of them that a Kaggle machine can hold."""


def pinned(place: Place) -> Iterator[Row]:
    """Pin blocks up to a limit or a refusal, copy from all of them, and fork a process meanwhile."""
    gpus, block, most = devices.gpus(place), BLOCK_BYTES, min(MOST_BLOCKS, int(available_ram() * 0.7) // BLOCK_BYTES)
    if place.is_rehearsal:
        block, most, gpus[0].lockable = MIB, 8, 5 * MIB
    held: list[torch.Tensor] = []
    refused, begun = "no", time.perf_counter()
    try:
        while len(held) < most:
            held.append(gpus[0].host_buffer(block))
    except (RuntimeError, MemoryError, OSError) as error:
        refused = str(error)
    taken = time.perf_counter() - begun
    row = {"blocks": len(held), "wanted": most, "GB": len(held) * block / 1e9, "seconds": taken}
    yield row | {"refused": refused, "ok": bool(held)}
    for some in [*([gpu] for gpu in gpus), *([gpus] if len(gpus) > 1 else [])]:
        work = partial(devices.copy_to, some, held, [gpu.device_buffer(block) for gpu in some])
        rate = len(held) * block / devices.seconds_of(some, work, 2) / 1e9
        yield {"copies to": " and ".join(gpu.name for gpu in some), "GB/s": rate}
    yield _forked(len(held) * block)
    for buffer in held:
        gpus[0].free_host_buffer(buffer)


def _forked(nbytes: int) -> Row:
    """A forked child, as of a notebook's `!command`; pinned pages must not be copied for it."""
    reading, writing = os.pipe()
    before, begun = available_ram(), time.perf_counter()
    subprocess.run(["true"], check=True, preexec_fn=lambda: os.write(writing, str(available_ram()).encode()))
    seconds, lost = time.perf_counter() - begun, before - int(os.read(reading, 99))
    os.close(reading)
    os.close(writing)
    is_little = lost < max(nbytes // 4, 1 << 28)
    return {"process": "forked meanwhile", "seconds": seconds, "GB gone in it": lost / 1e9, "ok": is_little}


def attention(place: Place) -> Iterator[Row]:
    """Memory and time of torch's kernels, with grouped keys and with repeated ones."""
    gpu = devices.gpus(place)[0]
    heads, groups, tokens, width = (4, 2, 64, 16) if place.is_rehearsal else (64, 8, 2048, 128)
    backends = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
    with devices.watched(place), torch.inference_mode():
        query = torch.randn(1, heads, tokens, width, dtype=torch.float16).to(gpu.torch_device)
        key = query[:, :groups].clone()
        allowed = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril().to(gpu.torch_device)

        def attend(*, is_grouped: bool, mask: torch.Tensor | None) -> torch.Tensor:
            keys = key if is_grouped else key.repeat_interleave(heads // groups, 1)
            causal = {"is_causal": mask is None, "enable_gqa": is_grouped}
            return torch.nn.functional.scaled_dot_product_attention(query, keys, keys, mask, **causal)

        for backend, is_grouped, mask in itertools.product((None, *backends), (True, False), (None, allowed)):
            row: Row = {
                "kernel": (backend or "torch's choice").lower(),
                "keys": "grouped" if is_grouped else "repeated",
            }
            row["mask"] = "causal" if mask is None else "given"
            work, before = partial(attend, is_grouped=is_grouped, mask=mask), devices.forget_peak(gpu)
            with contextlib.nullcontext() if backend is None else sdpa_kernel(getattr(SDPBackend, backend)):
                try:
                    work()
                    row["MiB"] = (devices.peak(gpu) - before) / MIB
                    row["ms"] = 1e3 * devices.seconds_of([gpu], work)
                except RuntimeError:  # the log has its warnings
                    row |= {"MiB": "refused", "ms": None}
            yield row
