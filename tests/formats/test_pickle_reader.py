"""Pickles that are read, pickles that are refused with a name and a place, and that nothing in them is ever run."""

from __future__ import annotations

import collections
import contextlib
import pickle
import pickletools
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rabbitllm.errors import CheckpointError, CorruptShardError, UnsafePickleError
from rabbitllm.formats import pickle_reader
from rabbitllm.formats._torch_pickle import name_tensors, read_torch_pickle
from rabbitllm.formats.pickle_reader import (
    MAX_PICKLE_BYTES,
    STEPS,
    Global,
    ListedOpcode,
    RefusedValueError,
    list_opcodes,
    read_pickle,
)
from tests.attacks.attack import Attack
from tests.attacks.pickles import ATTACKS, LEGAL
from tests.support.draws import draws
from tests.support.fresh_process import python
from tests.support.torch_files import pickled, tensor_pickle

PROTOCOLS = (2, 3, 4, 5)


def read(data: bytes) -> Any:
    """A pickle as torch's would be read, with its tensors named."""
    root, _ = read_torch_pickle(data, "data.pkl")
    return name_tensors(root, "data.pkl")[0]


def value_of(data: bytes) -> Any:
    return read_torch_pickle(data, "data.pkl")[0]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack(tmp_path: Path, attack: Attack) -> None:
    marker = tmp_path / "marker"
    data = attack.build(marker)
    modules = set(sys.modules)
    with pytest.raises(attack.error, match=attack.message) as caught:
        read(data)
    assert type(caught.value) is attack.error
    assert caught.value.remedy
    assert not marker.exists()
    assert set(sys.modules) == modules, "a module was imported"


@pytest.mark.parametrize("case", LEGAL)
def test_sound_inputs_that_resemble_attacks(case: str) -> None:
    assert len(read(LEGAL[case])) == 1


@pytest.mark.parametrize("attack", [a for a in ATTACKS if a.live], ids=lambda attack: attack.name)
def test_attacks_run_in_an_ordinary_unpickler(tmp_path: Path, attack: Attack) -> None:
    """The control: `pickle` itself does what our reader refuses to."""
    marker = tmp_path / "marker"
    with contextlib.suppress(pickle.UnpicklingError, TypeError, AttributeError):  # some run their payload and then fail
        pickle.loads(attack.build(marker))
    assert marker.exists()


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss in kilobytes")
def test_memory_of_attacks(tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from rabbitllm.errors import CheckpointError
from tests.attacks.pickles import ATTACKS, LEGAL
from tests.formats.test_pickle_reader import read
idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
refused = 0
for attack in ATTACKS:
    try:
        read(attack.build(Path(sys.argv[1])))
    except CheckpointError:
        refused += 1
print(refused, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle) * 1024)
"""
    ran = python(code, tmp_path / "marker")
    refused, peak = map(int, ran.stdout.split())
    assert refused == len(ATTACKS)
    assert peak < 256_000_000


def test_refusal_names_the_global_the_opcode_and_the_byte() -> None:
    data = b"\x80\x02}X\x01\x00\x00\x00xcos\nsystem\n)Rs."
    with pytest.raises(UnsafePickleError) as caught:
        value_of(data)
    offset = data.index(b"cos")
    assert f"at byte {offset}: GLOBAL names the global 'os' 'system'" in caught.value.problem
    assert "Nothing of it was run" in str(caught.value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values(protocol: int) -> None:
    value = {
        "none": None,
        "truths": [True, False],
        "numbers": [0, 255, 256, 65_536, -1, -(1 << 31), 1 << 31, 10**30, -(10**30)],
        "floats": [0.0, -1.5, float("inf")],
        "text": ["", "ä", "😀", "x" * 300, "x" * 70_000],
        "bytes": [b"", b"\x00\xff", b"x" * 300, b"x" * 70_000],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "deep": [[[[{}]]]],
        7: {"x": 1, -7: 2},
    }
    assert value_of(pickled(value, protocol)) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_other_containers(protocol: int) -> None:
    ordered: Any = collections.OrderedDict(a=1, b=2)
    ordered._metadata = collections.OrderedDict({"": {"version": 1}})
    value = {
        "ordered": ordered,
        "counter": collections.Counter("aab"),
        "set": {5},
        "bytearray": bytearray(b"xyz"),
        "complex": 1 + 2j,
    }
    read = value_of(pickled(value, protocol))
    assert read == {
        "ordered": {"a": 1, "b": 2},
        "counter": {"a": 2, "b": 1},
        "set": [5],
        "bytearray": b"xyz",
        "complex": 1 + 2j,
    }


def test_shared_value_is_one_object() -> None:
    shared: list[int] = [1]
    read = value_of(pickled({"a": shared, "b": shared}))
    assert read["a"] is read["b"]


def test_python_2_text() -> None:
    assert value_of(b"\x80\x02U\x03abc.") == "abc"


def test_only_globals_of_the_table_are_called() -> None:
    calls = []

    def call(arguments: tuple[Any, ...]) -> str:
        calls.append(arguments)
        if arguments == (3,):
            raise RefusedValueError("does not take 3")
        return "made"

    table = {("shop", "bread"): Global("shop.bread", call), ("shop", "sign"): Global("shop.sign")}
    value = read_pickle(b"\x80\x02cshop\nbread\nK\x02\x85R.", table, lambda _: None, "x")
    assert (value, calls) == ("made", [(2,)])
    with pytest.raises(UnsafePickleError, match=r"at byte 17: REDUCE calls shop.bread, which does not take 3"):
        read_pickle(b"\x80\x02cshop\nbread\nK\x03\x85R.", table, lambda _: None, "x")
    with pytest.raises(UnsafePickleError, match=r"calls the global shop.sign, which cannot be called"):
        read_pickle(b"\x80\x02cshop\nsign\n)R.", table, lambda _: None, "x")


def test_every_opcode_is_read_or_refused_by_name() -> None:
    assert len(STEPS) == 42
    for opcode in pickletools.opcodes:
        if opcode.name in ("PROTO", "STOP") or ord(opcode.code) in STEPS:
            continue
        with pytest.raises(UnsafePickleError, match=f"at byte 2: {opcode.name} is not an opcode that is read"):
            value_of(b"\x80\x02" + opcode.code.encode("latin-1") + b"\0" * 16)
    unknown = set(range(256)) - {ord(opcode.code) for opcode in pickletools.opcodes}
    assert len(unknown) > 100
    for code in unknown:
        with pytest.raises(UnsafePickleError, match=f"opcode {code:#04x} is not an opcode"):
            value_of(bytes([0x80, 2, code]))


def test_all_opcodes_of_picklers_are_covered() -> None:
    """So that a slip in one step of the table cannot hide: what is on the list and never written is named here."""
    written = set()
    for protocol in PROTOCOLS:
        large = {f"n{index}": [index] for index in range(300)}
        value = [None, True, False, (), {}, set(), {1}, 1.5, large, "x" * 300, b"x", b"x" * 300, bytearray(b"x"), 10**9]
        value += [300, 70_000, 10**30, 1 << 31, tuple("ab"), tuple("abc"), tuple("abcd"), [1, 2], ["z"], {"z": 1}]
        ordered: Any = collections.OrderedDict(a=1)
        ordered._metadata = 1
        data = pickled({"value": value, "ordered": ordered}, protocol)
        assert len(value_of(data)["value"]) == len(value)
        written |= {opcode.name for opcode, _, _ in pickletools.genops(data)}
        written |= {opcode.name for opcode, _, _ in pickletools.genops(tensor_pickle())}
    reads = {opcode.name for opcode in pickletools.opcodes if ord(opcode.code) in STEPS}
    assert reads - written == {"LONG4", "BINUNICODE8", "BINBYTES8", "SHORT_BINSTRING"}


def test_opcodes_of_very_large_values() -> None:
    assert value_of(b"\x80\x04\x8d\x01\0\0\0\0\0\0\0x.") == "x"
    assert value_of(b"\x80\x04\x8e\x01\0\0\0\0\0\0\0x.") == b"x"
    assert value_of(b"\x80\x02\x8b\x01\0\0\0\xff.") == -1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_listing(protocol: int) -> None:
    data = tensor_pickle() if protocol == 2 else pickled({"w": [1, "x" * 200, 10**100]}, protocol)
    listed = list(list_opcodes(data, "x"))
    expected = list(pickletools.genops(data))
    assert [(op.position, op.name) for op in listed] == [(offset, op.name) for op, _, offset in expected]
    assert listed[0] == ListedOpcode(0, 0, "PROTO", str(protocol))
    assert listed[-1] == ListedOpcode(len(data) - 1, 0, "STOP", "")
    assert max(len(op.argument) for op in listed) <= 80


def test_listing_shows_refused_opcodes() -> None:
    listed = list(list_opcodes(b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85R.", "x"))
    assert ("GLOBAL", "'os system'") in [(op.name, op.argument) for op in listed]
    assert "REDUCE" in [op.name for op in listed]


def test_listing_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_reader, "MAX_LISTED", 10)
    assert len(list(list_opcodes(b"\x80\x02" + b"]" * 100 + b".", "x"))) == 10
    with pytest.raises(UnsafePickleError, match="at most 33,554,432 are read"):
        next(list_opcodes(bytes(MAX_PICKLE_BYTES + 1), "x"))
    huge = b"\x80\x02\x8b" + (1 << 20).to_bytes(4, "little") + b"\x01" * (1 << 20) + b"."
    assert next(op for op in list_opcodes(huge, "x") if op.name == "LONG4").argument == "a number of 8,388,601 bits"


def test_oversized_pickle_is_not_read() -> None:
    with pytest.raises(UnsafePickleError, match="at most 33,554,432 are read"):
        value_of(bytes(MAX_PICKLE_BYTES + 1))


def test_listing_of_a_damaged_pickle() -> None:
    listing = list_opcodes(b"\x80\x02]\xff", "x")
    assert [next(listing).name, next(listing).name] == ["PROTO", "EMPTY_LIST"]
    with pytest.raises(CorruptShardError, match="cannot be listed beyond byte 2"):
        next(listing)


GOOD = [tensor_pickle(), *(pickled({"a": [1, (2, "x")], "b": {"c": b"y", 4: 1.5}}, p) for p in PROTOCOLS)]
CODES = bytes(STEPS) + b"\x80.0125iob\x81\x82\x92\x97\x98"


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good pickle with some bytes changed, taken out or put in."""
    data = bytearray(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.integers(1, 6))):
        offset = draw(st.integers(0, len(data)))
        cut = draw(st.integers(0, 4))
        data[offset : offset + cut] = draw(st.binary(max_size=4) | st.sampled_from([bytes([code]) for code in CODES]))
    return bytes(data)


made_up = st.lists(st.sampled_from([bytes([code]) for code in CODES]) | st.binary(max_size=3), max_size=60)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Python's own listing, at a strange text
@settings(max_examples=draws(800), deadline=2000, suppress_health_check=[HealthCheck.too_slow])
@given(mutated() | made_up.map(lambda parts: b"\x80\x04" + b"".join(parts) + b"."))
@pytest.mark.long
def test_only_our_errors(data: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        read(data)
    with contextlib.suppress(CorruptShardError):
        for _ in list_opcodes(data, "x"):
            pass
