"""Lazy tensors in the functions of torch: their results, reads and memory."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import rabbitllm
from rabbitllm.lazy._files import ShardFile
from rabbitllm.lazy._tensor import LazyTensor
from rabbitllm.lazy.load import LazyCheckpoint
from rabbitllm.storage.files import PositionalFile

TENSORS = {
    "w": torch.randn(8, 6, generator=torch.Generator().manual_seed(0)),
    "half": torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
    "count": torch.tensor(7),
    "flags": torch.tensor([True, False, True]),
    "complex": torch.view_as_complex(torch.randn(4, 2, generator=torch.Generator().manual_seed(2))),
}


@pytest.fixture(params=["safetensors", "torch", "odd"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Files of both formats, and one whose tensors all lie at odd addresses."""
    file = tmp_path / "x"
    if request.param == "torch":
        torch.save(TENSORS, file)
        return file
    save_file(TENSORS, file)
    if request.param == "odd":
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little") + 1
        file.write_bytes(length.to_bytes(8, "little") + raw[8 : 7 + length] + b" " + raw[7 + length :])
    return file


@pytest.fixture(params=[True, False], ids=["mapped", "read"])
def lazy(path: Path, request: pytest.FixtureRequest) -> Iterator[LazyCheckpoint]:
    with rabbitllm.lazy_load(path, mapped=request.param) as opened:
        yield opened


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 6))


def saved(module: torch.nn.Module, path: Path, form: str) -> LazyCheckpoint:
    if form == "torch":
        torch.save(module.state_dict(), path)
    else:
        save_file(module.state_dict(), path)
    return rabbitllm.lazy_load(path)


def test_attributes_without_reading(lazy: LazyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(ShardFile, "tensor", never)
    for name, tensor in TENSORS.items():
        unread = lazy[name]
        assert "not read" in repr(unread)
        for attribute in ("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "requires_grad", "grad"):
            assert getattr(unread, attribute) == getattr(tensor, attribute)
        for attribute in ("is_leaf", "is_meta", "is_cpu", "is_cuda", "is_sparse", "grad_fn"):
            assert getattr(unread, attribute) == getattr(tensor, attribute)
        for method in ("size", "stride", "dim", "numel", "element_size", "is_contiguous", "is_complex", "get_device"):
            assert getattr(unread, method)() == getattr(tensor, method)()
        assert torch.is_floating_point(unread) == tensor.is_floating_point()
        assert isinstance(unread, torch.Tensor)
        assert not isinstance(unread, torch.nn.Parameter)
        assert repr(name) in repr(unread)
        assert str(tensor.dtype) in str(unread)
        assert hash(unread) == id(unread)
    assert f"{lazy['w']}" == repr(lazy["w"])
    assert len(lazy["w"]) == 8
    assert lazy["w"].size(1) == 6
    assert lazy.get("nothing") is None
    assert lazy["w"] is not lazy["w"]


@pytest.mark.parametrize(
    "function",
    [
        lambda w: w + 1,
        lambda w: 1 - w,
        lambda w: w @ w.t(),
        lambda w: w.t(),
        lambda w: w[3:5],
        lambda w: w[3],
        lambda w: w[-1],
        lambda w: w[5:2],
        lambda w: w[::2],
        lambda w: w[2:4, 1],
        lambda w: w[..., None],
        lambda w: w[torch.tensor([1, 5])],
        lambda w: w[w > 0],
        lambda w: torch.cat([w, w]),
        lambda w: torch.stack((w, w * 2)),
        lambda w: torch.nn.functional.linear(torch.ones(2, 6), w),
        lambda w: torch.nn.functional.embedding(torch.tensor([[1, 2]]), weight=w),
        lambda w: w.to(torch.float16),
        lambda w: w.to("cpu"),
        lambda w: w.double(),
        lambda w: w.sum(dim=0),
        lambda w: w.reshape(-1).view(torch.uint8),
        lambda w: torch.as_tensor(w.numpy()),
        lambda w: torch.from_numpy(np.asarray(w)),
        lambda w: torch.tensor(w.tolist()),
        lambda w: torch.tensor(w[2, 3].item()),
        lambda w: torch.empty(8, 6).copy_(w),
        lambda w: w.clone(),
        lambda w: w.detach().read() if isinstance(w, LazyTensor) else w.detach(),
        lambda w: w.data,
        lambda w: torch.stack(list(w)),
        lambda w: torch.tensor(w.storage_offset()),
        lambda w: w.bfloat16().float(),
        lambda w: torch.where(w > 0, w, -w),
        lambda w: torch.add(w, w, out=torch.empty(8, 6)),
        lambda w: torch.func.vmap(lambda row: row * 2)(w),
    ],
)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_functions_equal_those_of_an_ordinary_tensor(lazy: LazyCheckpoint, function: Any) -> None:
    expected, actual = function(TENSORS["w"]), function(lazy["w"])
    assert (actual.shape, actual.dtype, actual.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", list(TENSORS))
def test_every_kind_of_tensor(lazy: LazyCheckpoint, name: str) -> None:
    assert torch.equal(lazy[name], TENSORS[name])
    assert torch.equal(TENSORS[name], lazy[name].clone())
    assert lazy[name].tolist() == TENSORS[name].tolist()
    assert bool((lazy[name] == TENSORS[name]).all())


def test_in_place_writes_and_views(lazy: LazyCheckpoint) -> None:
    w, expected = lazy["w"], TENSORS["w"].clone()
    assert w.mul_(2) is w
    expected.mul_(2)
    w += 1
    expected += 1
    w[2] = 5
    expected[2] = 5
    w.t()[1].zero_()
    expected.t()[1].zero_()
    array = w.numpy()
    array[0, 0] = 9
    expected[0, 0] = 9
    torch.add(w, 1, out=w)
    expected += 1
    assert isinstance(w, LazyTensor)
    assert torch.equal(w, expected)
    assert "read" in repr(w)
    assert "not read" not in repr(w)
    assert torch.equal(w.clone(), expected)


def test_file_stays_unchanged(path: Path) -> None:
    before = path.read_bytes()
    lazy = rabbitllm.lazy_load(path)
    for tensor in lazy.values():
        tensor.zero_()
    assert path.read_bytes() == before


def test_gradients(lazy: LazyCheckpoint) -> None:
    w = lazy["w"].requires_grad_()
    assert isinstance(w, LazyTensor)
    assert w.requires_grad
    (w * w).sum().backward()
    assert torch.equal(w.grad, 2 * TENSORS["w"])


def test_in_inference_mode_and_with_a_default_device(lazy: LazyCheckpoint) -> None:
    with torch.inference_mode():
        w = lazy["w"]
        assert torch.equal(w @ w.t(), TENSORS["w"] @ TENSORS["w"].t())
        assert torch.equal(w.clone(), TENSORS["w"])
    assert (w * torch.ones(6, requires_grad=True)).requires_grad
    with torch.device("meta"):
        assert torch.equal(lazy["half"], TENSORS["half"])


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_load_state_dict(tmp_path: Path, form: str, assign: bool, swap: bool) -> None:
    torch.manual_seed(0)
    trained = network()
    trained(torch.randn(5, 6))
    lazy = saved(trained, tmp_path / "x", form)
    fresh = network()
    if assign:
        fresh = fresh.to("meta")
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        assert str(fresh.load_state_dict(lazy, strict=True, assign=assign)) == "<All keys matched successfully>"
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert {type(parameter) for parameter in fresh.parameters()} == {torch.nn.Parameter}
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in fresh.parameters())
    x = torch.randn(5, 6)
    assert torch.equal(fresh.eval()(x), trained.eval()(x))
    for model in (fresh.train(), trained.train()):
        model(x).sum().backward()  # batch normalisation writes its buffers without a trace
        torch.optim.SGD(model.parameters(), 0.1).step()
    assert all(torch.equal(fresh.state_dict()[name], tensor) for name, tensor in trained.state_dict().items())
    stream = io.BytesIO()
    torch.save(copy.deepcopy(fresh).state_dict(), stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    assert {type(tensor) for tensor in loaded.values()} == {torch.Tensor}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trained.state_dict().items())


def test_load_state_dict_names_mismatched_tensors(tmp_path: Path) -> None:
    lazy = saved(network(), tmp_path / "x", "torch")
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight.*\[8, 6\]"):
        torch.nn.Sequential(torch.nn.Linear(6, 7)).load_state_dict(lazy, strict=False)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*2\.weight"):
        network()[:2].load_state_dict(lazy)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="looks at mappings")
def test_filling_a_model_holds_one_tensor_at_a_time(path: Path) -> None:
    """No copy stays in memory, and the mapping is closed with it."""
    lazy = rabbitllm.lazy_load(path, mapped=True)
    tensors = dict(lazy)
    for tensor in tensors.values():
        torch.empty_like(tensor).copy_(tensor)
    assert all("not read" in repr(tensor) for tensor in tensors.values())
    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read()
    tensors["w"].sum()
    assert "not read" not in repr(tensors["w"])


def test_copy_is_read_straight_into_its_memory(lazy: LazyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("made a tensor")

    with monkeypatch.context() as patched:
        patched.setattr(ShardFile, "tensor", never)
        for name, expected in TENSORS.items():
            target = torch.zeros_like(expected)
            assert target.copy_(lazy[name]) is target
            assert torch.equal(target, expected)
            assert target._version > 0
        parameter = torch.nn.Parameter(torch.zeros(8, 6))
        with torch.no_grad():
            parameter.copy_(lazy["w"])
    assert torch.equal(parameter, TENSORS["w"])


def test_copies_made_by_torch(lazy: LazyCheckpoint) -> None:
    w = TENSORS["w"]
    assert torch.equal(torch.zeros(8, 6, dtype=torch.float64).copy_(lazy["w"]), w.double())
    assert torch.equal(torch.zeros(2, 8, 6).copy_(lazy["w"]), w.expand(2, 8, 6))
    assert torch.equal(torch.zeros(6, 8).t().copy_(lazy["w"]), w)
    with torch.inference_mode():
        assert torch.equal(torch.zeros(8, 6).copy_(lazy["w"]), w)
    target = torch.zeros(8, 6, requires_grad=True) * 1
    assert target.copy_(lazy["w"]).grad_fn is not None
    conjugated = torch.zeros(4, dtype=torch.complex64).conj()
    assert torch.equal(conjugated.copy_(lazy["complex"]), TENSORS["complex"])
    with pytest.raises(RuntimeError, match="leaf Variable"):
        torch.zeros(8, 6, requires_grad=True).copy_(lazy["w"])
    with pytest.raises(RuntimeError, match="must match"):
        torch.zeros(7, 6).copy_(lazy["w"])
    saved_for_backward = torch.zeros(8, 6)
    result = (saved_for_backward * torch.ones(8, 6, requires_grad=True)).sum()
    saved_for_backward.copy_(lazy["w"])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_copy_has_written_values(path: Path) -> None:
    lazy = rabbitllm.lazy_load(path)
    kept = lazy["w"].zero_()
    target = torch.ones(8, 6).copy_(kept)
    assert not target.any()
    if kept._file.viewable(kept.spec):
        assert not torch.ones(8, 6).copy_(lazy["w"]).any()


def test_copies_and_pickles_are_ordinary_tensors(lazy: LazyCheckpoint) -> None:
    for copied in (pickle.loads(pickle.dumps(lazy["w"])), copy.deepcopy(lazy["w"]), copy.copy(lazy["w"])):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, TENSORS["w"])
    w = lazy["w"]
    first, second = copy.deepcopy([w, w])
    assert first is second
    first.zero_()
    assert torch.equal(w, TENSORS["w"])


def test_parameter_of_a_lazy_tensor(lazy: LazyCheckpoint) -> None:
    w = lazy["w"]
    parameter = torch.nn.Parameter(w)
    assert type(parameter) is torch.nn.Parameter
    assert parameter.requires_grad
    assert not w.requires_grad
    assert torch.equal(parameter, TENSORS["w"])
    parameter.data.zero_()
    assert not w.any()
    assert type(torch.nn.Parameter(lazy["count"], requires_grad=False)) is torch.nn.Parameter


def test_only_requested_rows_are_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    plain = PositionalFile.read_into

    def counted(file: PositionalFile, buffer: memoryview, offset: int) -> int:
        read.append(len(buffer))
        return plain(file, buffer, offset)

    lazy = rabbitllm.lazy_load(path, mapped=False)
    monkeypatch.setattr(PositionalFile, "read_into", counted)
    w = lazy["w"]
    assert torch.equal(w[3:5], TENSORS["w"][3:5])
    assert torch.equal(w[-2], TENSORS["w"][-2])
    assert torch.equal(w[6:99], TENSORS["w"][6:])
    assert read == [48, 24, 48]
    with pytest.raises(IndexError):
        w[8]
    assert torch.equal(w[1], TENSORS["w"][1])


@pytest.mark.long
def test_many_threads(path: Path) -> None:
    errors: list[BaseException] = []
    for mapped in (True, False):
        lazy = rabbitllm.lazy_load(path, mapped=mapped)
        shared = {name: lazy[name] for name in lazy}
        start = threading.Barrier(8)

        def work(lazy: LazyCheckpoint, shared: dict[str, LazyTensor], start: threading.Barrier) -> None:
            try:
                start.wait()
                for _ in range(50):
                    for name, tensor in TENSORS.items():
                        assert torch.equal(lazy[name], tensor)
                        assert torch.equal(shared[name].clone(), tensor)
                        assert torch.equal(shared[name].reshape(-1), tensor.reshape(-1))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(lazy, shared, start)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
