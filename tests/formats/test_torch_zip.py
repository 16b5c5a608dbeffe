"""torch.save's own files, read without torch, every tensor as torch loads it; and files that are refused."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rabbitllm.errors import CheckpointError, CorruptShardError, UnsafePickleError
from rabbitllm.formats.pickle_reader import list_opcodes
from rabbitllm.formats.safetensors_file import view_bytes
from rabbitllm.formats.tensor_spec import LeftOut, TensorSpec, torch_dtype
from rabbitllm.formats.torch_file import TorchFile, TorchTensor, parse_torch_zip, pickle_of, read_torch_zip
from rabbitllm.storage.files import PositionalFile
from tests.attacks import pickles, torch_zips
from tests.attacks.attack import Attack
from tests.support.draws import draws
from tests.support.fresh_process import python
from tests.support.torch_files import (
    FOUR,
    archive,
    bits,
    changed,
    chunks_of,
    every_dtype,
    pack,
    pickled,
    storage,
    tensor,
    views,
)

PROTOCOLS = (2, 3, 4, 5)


def bytes_of(path: Path, record: TorchTensor, chunk: int = 1 << 20) -> bytes:
    with PositionalFile(path) as file:
        return b"".join(bytes(piece) for piece in chunks_of(file, record, chunk))


def saved(path: Path, value: Any, protocol: int = 2, **options: Any) -> TorchFile:
    torch.save(value, path, pickle_protocol=protocol, **options)
    return read_torch_zip(path)


def assert_equal(path: Path, read: TorchFile, tensors: Mapping[str, torch.Tensor]) -> None:
    """The records are exactly these tensors, down to the bits, the strides, and which share a storage."""
    assert [record.name for record in read.tensors] == list(tensors)
    for record in read.tensors:
        expected = tensors[record.name]
        assert torch_dtype(record.dtype) is expected.dtype
        assert (record.shape, record.strides) == (tuple(expected.shape), expected.stride())
        assert (record.elements, record.nbytes) == (expected.numel(), expected.numel() * expected.element_size())
        assert record.contiguous == expected.is_contiguous()
        assert record.storage_end - record.storage_begin == expected.untyped_storage().nbytes()
        assert record.offset - record.storage_begin == expected.storage_offset() * expected.element_size()
        assert bytes_of(path, record) == bits(expected)
    starts = {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items() if tensor.numel()}
    keys = {record.name: record.storage for record in read.tensors if record.elements}
    assert len(set(keys.values())) == len(set(starts.values())) == len({(keys[name], starts[name]) for name in keys})


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 3")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_dtype(tmp_path: Path, protocol: int) -> None:
    tensors = every_dtype()
    read = saved(tmp_path / "x.bin", tensors, protocol)
    assert_equal(tmp_path / "x.bin", read, tensors)
    if protocol <= 3:  # torch refuses the others there
        loaded = torch.load(tmp_path / "x.bin", weights_only=True)
        assert {name: bits(value) for name, value in loaded.items()} == {n: bits(v) for n, v in tensors.items()}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 3")
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_views_and_shared_storages(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "x.pth"
    read = saved(path, views(), protocol)
    assert_equal(path, read, views() if protocol > 3 else torch.load(path, weights_only=True))
    kinds = {record.name: record.contiguous for record in read.tensors}
    assert not any(kinds[name] for name in ("transposed", "column", "steps", "reshaped", "diagonal", "overlapping"))
    by_name = {record.name: record for record in read.tensors}
    assert by_name["whole"] == by_name["again"].__class__(**{**_fields(by_name["again"]), "name": "whole"})


def _fields(record: TorchTensor) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


@pytest.mark.parametrize("chunk", [8, 64, 4096])
def test_chunks_of_any_size(tmp_path: Path, chunk: int) -> None:
    path = tmp_path / "x.pth"
    for record in saved(path, views()).tensors:
        assert bytes_of(path, record, chunk) == bits(views()[record.name])


def test_specs_equal_those_of_safetensors_except_strides(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    tensors = every_dtype() | views()
    read = saved(path, tensors)
    content = path.read_bytes()
    for record in read.tensors:
        spec = record.spec()
        assert isinstance(spec, TensorSpec)
        assert (spec.name, spec.file, spec.nbytes) == (record.name, "x.bin", record.nbytes)
        assert record.storage_begin <= spec.offset <= spec.offset + spec.extent <= record.storage_end
        if not record.contiguous:
            assert (spec.shape, spec.strides) == (record.shape, record.strides)
            continue
        assert spec.strides is None
        data = memoryview(bytearray(content[spec.offset : spec.offset + spec.nbytes]))
        tensor = view_bytes(data, spec)
        assert tensor.shape == tensors[record.name].shape
        assert bits(tensor) == bits(tensors[record.name])


def test_module_with_parameters_and_metadata(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    assert hasattr(module.state_dict(), "_metadata")
    read = saved(tmp_path / "x.pt", module.state_dict())
    assert_equal(tmp_path / "x.pt", read, module.state_dict())
    parameters = dict(module.named_parameters())
    assert_equal(tmp_path / "y.pt", saved(tmp_path / "y.pt", parameters), parameters)


def test_tensors_with_attributes(tmp_path: Path) -> None:
    plain, parameter = torch.ones(3), torch.nn.Parameter(torch.ones(2))
    plain.note = "x"  # type: ignore[attr-defined]
    parameter.tag = {"a": 1}  # type: ignore[attr-defined]
    read = saved(tmp_path / "x.pt", {"plain": plain, "parameter": parameter})
    assert_equal(tmp_path / "x.pt", read, {"plain": plain, "parameter": parameter})


STATE = {"a.weight": torch.ones(2), "b.weight": torch.zeros(3)}
OPTIMIZER = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}


@pytest.mark.parametrize(
    ("value", "names", "left_out"),
    [
        (STATE, ["a.weight", "b.weight"], ()),
        ({"state_dict": STATE}, ["a.weight", "b.weight"], ()),
        ({"model": STATE, "optimizer": OPTIMIZER, "epoch": 3}, ["a.weight", "b.weight"], ("optimizer", "epoch")),
        ({"module": {"model": STATE}, "lr_scheduler": None}, ["a.weight", "b.weight"], ("lr_scheduler",)),
        ({"model": STATE, "rng_state": torch.ones(5)}, ["a.weight", "b.weight"], ("rng_state",)),
        ({"model": STATE, "ema": STATE}, ["model.a.weight", "model.b.weight", "ema.a.weight", "ema.b.weight"], ()),
        ({"model": STATE, "lm_head.weight": torch.ones(1)}, ["model.a.weight", "model.b.weight", "lm_head.weight"], ()),
        ({"encoder": STATE, "step": 3}, ["encoder.a.weight", "encoder.b.weight"], ()),
        ({"model": torch.ones(1)}, ["model"], ()),
        ({"layers": [torch.ones(1), {"w": torch.ones(1)}], 7: torch.ones(1)}, ["layers.0", "layers.1.w", "7"], ()),
        ({**STATE, "_metadata": {"": {"version": 1}}, "note": "x"}, ["a.weight", "b.weight"], ()),
        ({"module.a.weight": torch.ones(1)}, ["module.a.weight"], ()),
    ],
)
def test_names(tmp_path: Path, value: Any, names: list[str], left_out: tuple[str, ...]) -> None:
    read = saved(tmp_path / "x.ckpt", value)
    assert [record.name for record in read.tensors] == names
    assert read.left_out == left_out


def test_other_saved_values(tmp_path: Path) -> None:
    content = {
        "size": torch.Size([1, 2]),
        "device": torch.device("cuda:1"),
        "dtype": torch.bfloat16,
        "storage": torch.ones(3).untyped_storage(),
        "set": {1},
        "bytes": b"x",
        "big": 10**30,
        "w": torch.ones(2),
    }
    assert [record.name for record in saved(tmp_path / "x.pt", content).tensors] == ["w"]


def test_files_without_checksums(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        read = saved(tmp_path / "x.pt", STATE)
    finally:
        torch.serialization.set_crc32_options(before)
    assert_equal(tmp_path / "x.pt", read, STATE)


def test_nan_and_infinite_weights_are_legal(tmp_path: Path) -> None:
    tensors = {"w": torch.tensor([float("nan"), float("inf"), -0.0])}
    assert_equal(tmp_path / "x.pt", saved(tmp_path / "x.pt", tensors), tensors)


def test_file_name_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    assert_equal(path, saved(path, STATE), STATE)


def test_listing_of_a_file(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "x.pt")
    names = [op.argument for op in list_opcodes(pickle_of(tmp_path / "x.pt"), "x.pt") if op.name == "GLOBAL"]
    assert names == ["'torch._utils _rebuild_tensor_v2'", "'torch FloatStorage'", "'collections OrderedDict'"]


def test_local_headers_left_out(tmp_path: Path) -> None:
    """As a repository would be asked: the end, the directory, the byte order and the pickle."""
    path = tmp_path / "x.bin"
    with_them = saved(path, {f"t{index}": torch.ones(index) for index in range(100)})
    reads = []

    def read(offset: int, length: int) -> bytes:
        reads.append((offset, length))
        return path.read_bytes()[offset : offset + length]

    assert parse_torch_zip(read, path.stat().st_size, "x.bin", local_headers=False) == with_them
    assert len(reads) == 4


def test_file_that_ends_inside_its_pickle(tmp_path: Path) -> None:
    """Seen by its size as whole, and cut off when it is read."""
    content = pack(archive())
    begin = content.index(b"\x80\x02")

    def read(offset: int, length: int) -> bytes:
        return content[offset : offset + length][: 10 if offset == begin else None]

    with pytest.raises(CorruptShardError, match=r"it ended inside its data\.pkl"):
        parse_torch_zip(read, len(content), "x.bin", local_headers=False)


def test_scalar_and_strided_4_bit_tensors_are_refused(tmp_path: Path) -> None:
    pairs = torch.zeros(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    for value, form in ((pairs[0], "a scalar"), (pairs.view(2, 3).t(), "strided")):
        (record,) = saved(tmp_path / "x.bin", {"w": value}).tensors
        with pytest.raises(CorruptShardError, match=rf"x\.bin has a tensor 'w' of F4 that is {form}"):
            record.spec()


GIANT = """
import resource, sys
from pathlib import Path
from rabbitllm.formats import torch_file
idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read = torch_file.read_torch_zip(Path(sys.argv[1]))
opened = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert "torch" not in sys.modules
import torch
from rabbitllm.storage.files import PositionalFile
from tests.support.torch_files import chunks_of
torch.zeros(4).view(2, 2).t().contiguous()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
record = read.tensors[-1]
with PositionalFile(Path(sys.argv[1])) as file:
    done = sum(len(piece) for piece in chunks_of(file, record))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(len(read.tensors), opened - idle, done, after - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sparse files, ru_maxrss in kilobytes")
@pytest.mark.long
def test_file_of_13_gb(tmp_path: Path) -> None:
    """torch's own writer, leaving holes for the data: beyond 4 GiB entries and offsets are zip64's."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.serialization import skip_data

    path = tmp_path / "consolidated.00.pth"
    with FakeTensorMode():
        tensors = {f"layers.{n // 9}.{n % 9}.weight": torch.empty(5120, 4096, dtype=torch.bfloat16) for n in range(196)}
        tensors |= {"embed.weight": torch.empty(1 << 20, 2300, dtype=torch.bfloat16)}  # an entry above 4 GiB itself
        tensors |= {"transposed": torch.empty(4096, 16384, dtype=torch.bfloat16).t()}
    with skip_data(materialize_fake_tensors=True):
        torch.save(tensors, path)
    size = path.stat().st_size
    assert size > 13_000_000_000
    assert path.stat().st_blocks * 512 < 10_000_000
    with path.open("r+b") as file:  # marks where a record says that the last tensor lies
        record = read_torch_zip(path).tensors[-1]
        file.seek(record.offset + (7 * 16384 + 3) * 2)
        file.write(b"\x12\x34")
    with PositionalFile(path) as opened:
        flat = b"".join(bytes(piece) for piece in chunks_of(opened, record))
    assert flat.index(b"\x12\x34") == (3 * 4096 + 7) * 2
    ran = python(GIANT, path)
    count, opening, copying, reading = map(float, ran.stdout.split())
    path.unlink()
    assert (count, copying) == (198, 16384 * 4096 * 2)
    assert opening < 50_000
    assert reading < 50_000


def test_entry_above_4_gib(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.serialization import skip_data

    with FakeTensorMode():
        tensors = {"a": torch.empty((1 << 32) + 5, dtype=torch.uint8), "b": torch.empty(3), "c": torch.empty(0)}
    with skip_data(materialize_fake_tensors=True):
        torch.save(tensors, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", map_location="meta", weights_only=True)
    offsets = {name: value.untyped_storage()._checkpoint_offset for name, value in loaded.items()}  # type: ignore[attr-defined]
    read = read_torch_zip(tmp_path / "x.pt")
    assert {record.name: record.storage_begin for record in read.tensors if record.elements} == {
        name: offsets[name] for name in ("a", "b")
    }


@pytest.mark.parametrize("case", torch_zips.LEGAL)
def test_sound_inputs_that_resemble_attacks(tmp_path: Path, case: str) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(torch_zips.LEGAL[case]())
    assert_equal(path, read_torch_zip(path), torch.load(path, weights_only=True))


@pytest.mark.parametrize("attack", torch_zips.ATTACKS, ids=lambda attack: attack.name)
def test_zip_attack(tmp_path: Path, attack: Attack) -> None:
    (tmp_path / "x.bin").write_bytes(attack.build(tmp_path / "marker"))
    with pytest.raises(attack.error, match=attack.message) as caught:
        read_torch_zip(tmp_path / "x.bin")
    assert type(caught.value) is attack.error
    assert caught.value.remedy
    assert "x.bin" in caught.value.problem


def test_zip_attacks_take_no_memory(tmp_path: Path) -> None:
    import tracemalloc

    for attack in torch_zips.ATTACKS:
        (tmp_path / "x.bin").write_bytes(attack.build(tmp_path / "marker"))
        tracemalloc.start()
        with pytest.raises(CheckpointError):
            read_torch_zip(tmp_path / "x.bin")
        assert tracemalloc.get_traced_memory()[1] < 2 << 20, attack.name
        tracemalloc.stop()


def test_pickle_attacks_in_a_file(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for attack in pickles.ATTACKS:
        data = attack.build(marker)
        if len(data) > 10_000:  # what takes long is tried without a file
            continue
        (tmp_path / "x.bin").write_bytes(pack(archive(data)))
        with pytest.raises((CorruptShardError, UnsafePickleError)):
            read_torch_zip(tmp_path / "x.bin")
        assert not marker.exists(), attack.name


def test_built_files_are_loaded_by_torch(tmp_path: Path) -> None:
    """The control of the attacks: without its one change, each file is sound."""
    path = tmp_path / "x.bin"
    of_torch_1 = [member for member in archive() if not member.name.endswith("byteorder")]
    for members in (archive(), changed(archive(), "data/0", described=True), archive(root="model"), of_torch_1):
        for zip64 in (None, {}):
            path.write_bytes(pack(members, zip64=zip64))
            loaded = torch.load(path, weights_only=True)
            assert_equal(path, read_torch_zip(path), loaded)
            assert loaded["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.skipif(not torch.__version__.startswith(("2.13.", "2.14.")), reason="claims are of torch 2.13, 2.14")
def test_attacks_that_torch_refuses(tmp_path: Path) -> None:
    accepted: dict[str, set[str]] = {"zips": set(), "pickles": set()}
    for attack in torch_zips.ATTACKS:
        if _torch_takes(attack.build(tmp_path / "marker")):
            accepted["zips"].add(attack.name)
    for attack in pickles.ATTACKS:
        data = attack.build(tmp_path / "marker")
        endless = attack.name in pickles.ENDLESS_IN_TORCH
        if len(data) < 10_000 and not endless and _torch_takes(pack(archive(data))):
            accepted["pickles"].add(attack.name)
    for_gpus = pickles.ACCEPTED_BY_TORCH_WITH_CUDA if torch.version.cuda else set()
    assert accepted == {"zips": torch_zips.ACCEPTED_BY_TORCH, "pickles": pickles.ACCEPTED_BY_TORCH | for_gpus}
    assert not (tmp_path / "marker").exists()


def _torch_takes(content: bytes) -> bool:
    try:
        torch.load(io.BytesIO(content), weights_only=True)
    except Exception:  # of many kinds
        return False
    return True


def sample() -> list[bytes]:
    shared = storage(elements=4)
    root = pickled({"w": tensor(shared), "v": tensor(shared, 1, (3,), (1,))})
    return [pack(archive()), pack(archive(root)), pack(changed(archive(root), "0", described=True), zip64={})]


@settings(max_examples=draws(800), deadline=3000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sample()),
    st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 4), st.binary(max_size=4)), min_size=1, max_size=3),
)
def test_only_our_errors(tmp_path: Path, content: bytes, changes: list[tuple[int, int, bytes]]) -> None:
    """And whatever is accepted is what torch itself makes of it."""
    data = bytearray(content)
    for start, cut, new in changes:
        data[start % len(data) : start % len(data) + cut] = new.ljust(cut, b"\0")  # mostly in place, so some are sound
    try:
        read = parse_torch_zip(lambda offset, length: bytes(data[offset : offset + length]), len(data), "x.bin")
    except CheckpointError:
        return
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(data))
    read_bits = {record.name: bytes_of(path, record) for record in read.tensors}
    with contextlib.suppress(pickle.UnpicklingError, RuntimeError, ValueError):
        loaded = torch.load(path, weights_only=True)
        assert read_bits == {str(name): bits(value) for name, value in loaded.items()}


def test_equal_bytes_only(tmp_path: Path) -> None:
    """The control of `assert_equal`: one bit of difference shows."""
    path = tmp_path / "x.bin"
    path.write_bytes(pack(archive()))
    content = bytearray(path.read_bytes())
    content[content.index(FOUR) + 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(AssertionError):
        assert_equal(path, read_torch_zip(path), {"w": torch.tensor([0.0, 1.0, 2.0, 3.0])})


def test_tensors_left_out_are_counted(tmp_path: Path) -> None:
    """By key, as are other values; not those that are weights too, but also the bytes of a storage without a tensor."""
    weight, moment = torch.ones(4), torch.ones(6)
    value = {
        "model": {"w": weight, "tied": weight},
        "optimizer": {"state": {0: {"exp_avg": moment, "again": [moment, weight]}}, "lr": 0.1},
        "rng_state": torch.zeros(5, dtype=torch.uint8),
        "epoch": 3,
        "args": torch.ones(3).untyped_storage(),
    }
    read = saved(tmp_path / "x.ckpt", value)
    assert read.left_tensors == (
        LeftOut("optimizer", 24),
        LeftOut("rng_state", 5),
        LeftOut("epoch", 0, 0),
        LeftOut("args", 0, 0),
        LeftOut("tensors without a name", 12),
    )
    assert read.header().left_out == read.left_tensors
    assert str(LeftOut("a\x1b" + "b" * 200, 200_000, 2)).endswith("b… (2 tensors, 0.20 MB)")
    assert saved(tmp_path / "y.ckpt", {"model": {"w": weight}, "optimizer": {"lr": 0.1}}).left_tensors == (
        LeftOut("optimizer", 0, 0),
    )
