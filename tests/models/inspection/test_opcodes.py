"""Opcodes of pickles of every kind of file, as `pickletools` lists them, where nothing may be run."""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from pathlib import Path

import pytest
import torch

from rabbitllm.formats.shard_header import Weights, recognise_file
from rabbitllm.formats.torch_file import pickle_of
from rabbitllm.models.inspection.files import list_pickles
from rabbitllm.models.inspection.records import Pickles
from tests.formats.test_torch_zip import views
from tests.support.torch_files import Member, archive, changed, pack, tensor_pickle


def listed(path: Path) -> Pickles:
    return list_pickles(path, recognise_file(path))


def test_a_torch_zip(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    torch.save(views(), path)
    (found,) = listed(path).pickles
    data = pickle_of(path)
    expected = [(opcode.name, at) for opcode, _, at in pickletools.genops(data)]
    assert [(opcode.name, opcode.position) for opcode in found.opcodes] == expected
    assert (found.name, found.nbytes, found.stopped) == ("data.pkl", len(data), None)
    assert found.opcodes[4].argument == "'whole'"
    depths = {opcode.name: opcode.depth for opcode in found.opcodes}
    assert (depths["STOP"], depths["SETITEMS"]) == (0, 0)
    assert max(opcode.depth for opcode in found.opcodes) == 3


def test_a_file_from_before_torch_1_6(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    torch.save({"w": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    assert recognise_file(path) is Weights.TORCH_LEGACY
    found = listed(path).pickles
    content = path.read_bytes()
    assert len(found) == 5
    for one in found:
        assert (one.opcodes[0].name, one.opcodes[-1].name, one.stopped) == ("PROTO", "STOP", None)
        begin, end = one.opcodes[0].position, one.opcodes[-1].position
        assert content[begin : begin + 2] == b"\x80\x02"
        assert content[end : end + 1] == b"."
    assert "'torch._utils _rebuild_tensor_v2'" in [opcode.argument for opcode in found[3].opcodes]


@pytest.mark.parametrize("protocol", range(6))
def test_a_bare_pickle_of_any_protocol(tmp_path: Path, protocol: int) -> None:
    value = {"a": [1, 2.5, (None, True)], "b": b"\0\1", "c": {"d"}}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(value, protocol))
    (found,) = list_pickles(tmp_path / "x.pkl", Weights.PICKLE).pickles
    assert [o.name for o in found.opcodes] == [o.name for o, _, _ in pickletools.genops(pickle.dumps(value, protocol))]


def test_a_pickle_that_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(b"\x80\x02}X\x05\x00\x00\x00abcdeX\xff\xff\xff\xff.")
    (found,) = listed(tmp_path / "x.pkl").pickles
    assert [opcode.name for opcode in found.opcodes] == ["PROTO", "EMPTY_DICT", "BINUNICODE"]
    assert found.stopped is not None
    assert "cannot be listed beyond byte 3" in found.stopped


def test_a_zip_that_is_refused_is_listed_by_pythons_reader(tmp_path: Path) -> None:
    """Two pickles of one name, one more of another, one compressed."""
    other = [Member("archive/data.pkl", b"\x80\x02cos\nsystem\n."), Member("archive/constants.pkl", b"\x80\x02).")]
    (tmp_path / "x.pth").write_bytes(pack([*archive(), *other]))
    found = listed(tmp_path / "x.pth").pickles
    assert [one.name for one in found] == ["archive/data.pkl", "archive/data.pkl", "archive/constants.pkl"]
    assert "'os system'" in [opcode.argument for opcode in found[1].opcodes]
    with zipfile.ZipFile(tmp_path / "y.pth", "w", zipfile.ZIP_DEFLATED) as archived:
        archived.writestr("archive/data.pkl", tensor_pickle())
    (one,) = listed(tmp_path / "y.pth").pickles
    assert one.opcodes[-1].name == "STOP"


def test_what_no_reader_understands_lists_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.pth").write_bytes(pack(archive())[:-30])
    assert listed(tmp_path / "x.pth").pickles == ()
    (tmp_path / "y.pth").write_bytes(pack(changed(archive(), "data.pkl", central={"method": 99})))
    assert listed(tmp_path / "y.pth").pickles == ()
