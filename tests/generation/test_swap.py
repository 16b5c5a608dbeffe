"""KV caches that are swapped out are swapped in bit for bit, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from rabbitllm.engine.kv_room import append
from rabbitllm.generation.swap import SHARE, SwapSpace, default_folder, put_together, taken_apart
from rabbitllm.storage.durable import NamelessFile, Step, observe_steps
from rabbitllm.storage.folders import folder_at

LIMIT = 1 << 20


def filled(dtype: torch.dtype = torch.float32, device: str = "cpu") -> DynamicCache:
    """A cache with layers of several kinds."""
    cache = DynamicCache()
    grown, window, state = DynamicLayer(), DynamicSlidingWindowLayer(8), LinearAttentionLayer()
    for tokens in (7, 1, 1):
        keys = torch.randn(1, 2, tokens, 4, dtype=dtype, device=device)
        grown.update(keys, keys + 1)
        window.update(keys + 2, keys + 3)
    state.update_conv_state(torch.randn(1, 6, 4, dtype=dtype, device=device))
    state.update_recurrent_state(torch.randn(1, 2, 4, 3, device=device).transpose(1, 2))
    cache.layers = [grown, window, state]
    return cache


def bytes_in(cache: Any) -> int:
    parts = taken_apart(cache)
    assert parts is not None
    return sum(tensor.nbytes for tensor in parts[1])


def content(value: Any) -> Any:
    """What a cache holds, as plain values and bytes."""
    if isinstance(value, torch.Tensor):
        flat = value.reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), str(value.device), flat.tolist()
    if isinstance(value, dict):
        return {name: content(item) for name, item in value.items() if name != "_room"}
    if isinstance(value, list):
        return [content(item) for item in value]
    return content(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_swapped_caches_keep_their_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    aside = SwapSpace(LIMIT, tmp_path)
    caches = [filled(dtype) for _ in range(3)]
    before = [content(cache) for cache in caches]
    swapped = [aside.put(cache) for cache in caches]
    assert aside.nbytes == sum(cache.nbytes for cache in swapped if cache is not None) > 0
    for index in (1, 0, 2):
        cache = swapped[index]
        assert cache is not None
        back = aside.take(cache)
        assert back is not caches[index]
        assert content(back) == before[index]
        back.layers[0].update(torch.ones(1, 2, 1, 4, dtype=dtype), torch.ones(1, 2, 1, 4, dtype=dtype))  # and goes on
        assert back.get_seq_length() == 10
    assert aside.nbytes == 0


def test_axes_keep_their_order_in_memory(tmp_path: Path) -> None:
    aside = SwapSpace(LIMIT, tmp_path)
    cache = filled()
    strides = cache.layers[2].recurrent_states[0].stride()
    assert not cache.layers[2].recurrent_states[0].is_contiguous()
    swapped = aside.put(cache)
    assert swapped is not None
    assert aside.take(swapped).layers[2].recurrent_states[0].stride() == strides


def test_reserved_room_is_not_moved(tmp_path: Path) -> None:
    cache = DynamicCache()
    keys = torch.randn(1, 4, 700, 128)
    cache.update(keys, keys + 1, 0)
    append(cache.layers[0], keys[:, :, :1], keys[:, :, :1])
    before = content(cache)
    aside = SwapSpace(LIMIT * 8, tmp_path)
    swapped = aside.put(cache)
    assert swapped is not None
    assert swapped.nbytes == 2 * 701 * 4 * 128 * 4
    assert content(aside.take(swapped)) == before


def test_one_tensor_in_two_places_is_moved_once() -> None:
    cache = filled()
    apart = taken_apart(cache)
    cache.layers[1].keys = cache.layers[0].keys
    parts = taken_apart(cache)
    assert apart is not None
    assert parts is not None
    shell, tensors = parts
    assert len(tensors) == len(apart[1]) - 1
    restored = put_together(shell, [tensor.clone() for tensor in tensors])
    assert restored.layers[1].keys is restored.layers[0].keys


def test_caches_with_unknown_values_are_not_moved(tmp_path: Path) -> None:
    for strange in (object(), torch.nn.Parameter(torch.ones(2)), torch.ones(2, 2).to_sparse(), lambda: None):
        cache = filled()
        cache.layers[1].strange = strange
        assert taken_apart(cache) is None
        assert SwapSpace(LIMIT, tmp_path).put(cache) is None


def test_the_swap_limit_holds(tmp_path: Path) -> None:
    cache = filled()
    nbytes = bytes_in(cache)
    assert SwapSpace(nbytes - 1, tmp_path).put(cache) is None
    assert SwapSpace(0, tmp_path).put(cache) is None
    assert SwapSpace(nbytes, None).put(cache) is None
    aside = SwapSpace(2 * nbytes, tmp_path)
    first = aside.put(cache)
    assert first is not None
    assert aside.put(cache) is not None
    assert aside.put(cache) is None
    aside.drop(first)
    assert aside.put(cache) is not None
    assert aside.nbytes == aside.limit


def test_a_disk_is_never_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled()
    nbytes = bytes_in(cache)
    usage = type("Usage", (), {"free": SHARE * nbytes})
    monkeypatch.setattr("rabbitllm.generation.swap.shutil.disk_usage", lambda folder: usage)
    assert SwapSpace(LIMIT, tmp_path).put(cache) is not None
    usage.free -= SHARE
    assert SwapSpace(LIMIT, tmp_path).put(cache) is None


def test_an_unreadable_file_loses_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    aside = SwapSpace(LIMIT, tmp_path)
    swapped = aside.put(filled())
    assert swapped is not None
    assert isinstance(swapped.content, NamelessFile)
    os.ftruncate(swapped.content._file.fileno(), swapped.nbytes - 1)
    assert aside.take(swapped) is None
    assert aside.nbytes == 0
    assert "computed again" in caplog.text


def test_a_full_disk_releases_written_bytes(tmp_path: Path) -> None:
    def full(step: Step) -> None:
        if step.offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    aside = SwapSpace(LIMIT, tmp_path)
    with observe_steps(full):
        assert aside.put(filled()) is None
    assert aside.nbytes == 0
    assert aside.put(filled()) is not None  # there is room again


def test_the_default_folder_is_on_a_disk() -> None:
    folder = default_folder()
    assert folder is None or (folder_at(folder).writable and not folder_at(folder).in_memory)


def test_ram_holds_at_most_a_quarter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a GPU, but for the copy."""
    cache = filled()
    before = content(cache)
    nbytes = bytes_in(cache)
    monkeypatch.setattr("rabbitllm.generation.swap._is_on_gpu", lambda forms: True)
    aside = SwapSpace(LIMIT, None)  # without any file
    for free, fits in ((SHARE * nbytes, True), (SHARE * nbytes - 1, False)):
        monkeypatch.setattr("rabbitllm.generation.swap.available_ram", lambda free=free: free)
        swapped = aside.put(cache)
        assert (swapped is not None) is fits
        if swapped is not None:
            assert aside.nbytes == nbytes
            assert content(aside.take(swapped)) == before
    assert aside.nbytes == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_caches_go_to_ram_and_then_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(torch.bfloat16, "cuda")
    before = content(cache)
    aside = SwapSpace(LIMIT, tmp_path)
    in_ram = aside.put(cache)
    assert in_ram is not None
    assert isinstance(in_ram.content, list)
    monkeypatch.setattr("rabbitllm.generation.swap.available_ram", lambda: 0)
    in_file = aside.put(cache)
    assert in_file is not None
    assert isinstance(in_file.content, NamelessFile)
    for swapped in (in_ram, in_file):
        assert content(aside.take(swapped)) == before
