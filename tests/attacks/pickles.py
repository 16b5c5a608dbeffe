"""Pickles that would run something, or make a reader work or hold more than any checkpoint needs.

The globals are those of published bypasses of pickle scanners (picklescan's and fickling's advisories; "Pickle in the
middle", arXiv 2508.19774) and of torch's own `weights_only` (CVE-2025-32434, CVE-2026-24747).
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
import torch._utils

from rabbitllm.errors import CorruptShardError, UnsafePickleError
from tests.attacks.attack import Attack
from tests.support.torch_files import Call, StorageOf, pickled, storage, tensor, tensor_pickle

ATTACKS: list[Attack] = []

GADGETS: dict[tuple[str, str], bool] = {
    # global -> whether calling it with a shell command touches the marker
    ("os", "system"): True,
    ("posix", "system"): True,
    ("subprocess", "getoutput"): True,
    ("subprocess", "Popen"): False,
    ("pty", "spawn"): False,
    ("builtins", "eval"): False,
    ("builtins", "exec"): False,
    ("builtins", "getattr"): False,
    ("builtins", "__import__"): False,
    ("builtins", "open"): False,
    ("builtins", "compile"): False,
    ("__builtin__", "eval"): False,
    ("io", "open"): False,
    ("importlib", "import_module"): False,
    ("pkgutil", "resolve_name"): False,
    ("pydoc", "locate"): False,
    ("pydoc", "pipepager"): False,
    ("ctypes", "CDLL"): False,
    ("pip", "main"): False,
    ("pip._internal.cli.main", "main"): False,
    ("runpy", "_run_code"): False,
    ("code", "InteractiveInterpreter"): False,
    ("timeit", "timeit"): False,
    ("cProfile", "runctx"): False,
    ("trace", "Trace"): False,
    ("bdb", "Bdb"): False,
    ("operator", "attrgetter"): False,
    ("operator", "methodcaller"): False,
    ("functools", "partial"): False,
    ("functools", "reduce"): False,
    ("marshal", "loads"): False,
    ("pickle", "loads"): False,
    ("types", "CodeType"): False,
    ("types", "FunctionType"): False,
    ("shutil", "rmtree"): False,
    ("os", "remove"): False,
    ("os", "execv"): False,
    ("pathlib", "Path"): False,
    ("socket", "create_connection"): False,
    ("urllib.request", "urlopen"): False,
    ("webbrowser", "open"): False,
    ("smtplib", "SMTP"): False,
    ("venv", "create"): False,
    ("asyncio.unix_events", "_UnixSubprocessTransport"): False,
    ("idlelib.pyshell", "ModifiedInterpreter"): False,
    ("lib2to3.pgen2.pgen", "ParserGenerator"): False,
    ("numpy.testing._private.utils", "runstring"): False,
    ("numpy.f2py.crackfortran", "getlincoef"): False,
    ("numpy.core.multiarray", "_reconstruct"): False,
    ("torch.hub", "load"): False,
    ("torch", "load"): False,
    ("torch.serialization", "load"): False,
    ("torch.serialization.os", "system"): False,
    ("torch._utils", "_rebuild_tensor_v2.__globals__"): False,
    ("torch", "_utils.os.system"): False,
    ("torch.utils.collect_env", "run"): False,
    ("torch._dynamo.guards", "GuardBuilder.get"): False,
    ("torch.fx.experimental.symbolic_shapes", "ShapeEnv.evaluate_guards_expression"): False,
    ("torch.jit.unsupported_tensor_ops", "execWrapper"): False,
    ("torch.utils.bottleneck.__main__", "run_cprofile"): False,
    ("torch._inductor.codecache", "compile_file"): False,
    ("torch._utils", "_rebuild_sparse_tensor"): False,
    ("torch._utils", "_rebuild_qtensor"): False,
    ("torch._utils", "_rebuild_wrapper_subclass"): False,
    ("torch", "QInt8Storage"): False,
    ("torch", "ComplexDoubleStorage"): False,
    ("collections", "defaultdict"): False,
    ("copyreg", "_reconstructor"): False,
    ("transformers.training_args", "TrainingArguments"): False,
    ("argparse", "Namespace"): False,
}


def text(value: str) -> bytes:
    """BINUNICODE."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def touch(marker: Path) -> bytes:
    return text(f"touch {marker}")


def gadget_by_name(module: str, name: str, live: bool) -> Attack:
    """GLOBAL and REDUCE: what `__reduce__` makes at protocol 2."""

    def build(marker: Path) -> bytes:
        return b"\x80\x02c" + f"{module}\n{name}\n".encode() + touch(marker) + b"\x85R."

    build.__name__ = f"{module}.{name}"
    return Attack(build, UnsafePickleError, f"GLOBAL names the global {module!r} {name!r}", live)


def gadget_from_the_stack(module: str, name: str, live: bool) -> Attack:
    """STACK_GLOBAL and REDUCE: protocol 4's form, which dotted names reach further by."""

    def build(marker: Path) -> bytes:
        return b"\x80\x04" + text(module) + text(name) + b"\x93" + touch(marker) + b"\x85R."

    build.__name__ = f"{module}.{name} from the stack"
    return Attack(build, UnsafePickleError, f"STACK_GLOBAL names the global {module!r} {name!r}", live)


ATTACKS += [gadget_by_name(*pair, live) for pair, live in GADGETS.items()]
ATTACKS += [gadget_from_the_stack(*pair, live) for pair, live in GADGETS.items()]


def attack(
    message: str, error: type[Exception] = UnsafePickleError, *, live: bool = False
) -> Callable[[Callable[[Path], bytes]], None]:
    """Put a builder on the list."""

    def add(build: Callable[[Path], bytes]) -> None:
        ATTACKS.append(Attack(build, error, message, live))

    return add


# other ways to make a call


@attack("INST is not an opcode that is read", live=True)
def inst(marker: Path) -> bytes:
    return b"\x80\x02(" + touch(marker) + b"ios\nsystem\n."


@attack("names the global 'os' 'system'", live=True)
def obj(marker: Path) -> bytes:
    return b"\x80\x02(cos\nsystem\n" + touch(marker) + b"o."


@attack("OBJ is not an opcode that is read")
def obj_of_a_known_global(_: Path) -> bytes:
    return b"\x80\x02(ccollections\nOrderedDict\no."


@attack("NEWOBJ is not an opcode that is read")
def newobj_of_a_known_global(_: Path) -> bytes:
    return b"\x80\x02ctorch.nn.parameter\nParameter\n)\x81."


@attack("NEWOBJ_EX is not an opcode that is read")
def newobj_ex(_: Path) -> bytes:
    return b"\x80\x04ctorch\nSize\n)}\x92."


@attack("EXT1 is not an opcode that is read")
def ext1(_: Path) -> bytes:
    return b"\x80\x02\x82\x01."


@attack("EXT2 is not an opcode that is read")
def ext2(_: Path) -> bytes:
    return b"\x80\x02\x83\x01\x00."


@attack("EXT4 is not an opcode that is read")
def ext4(_: Path) -> bytes:
    return b"\x80\x02\x84\x01\x00\x00\x00."


@attack("GLOBAL names the global 'os' 'system'", live=True)
def call_whose_result_is_dropped(marker: Path) -> bytes:
    return b"\x80\x02cos\nsystem\n" + touch(marker) + b"\x85R0" + tensor_pickle()[2:]


@attack("GLOBAL names the global 'os' 'system'", live=True)
def call_among_tensors(marker: Path) -> bytes:
    call = b"cos\nsystem\n" + touch(marker) + b"\x85R"
    return b"\x80\x02}(" + text("x") + call + text("w") + pickled(tensor())[2:-1] + b"u."


@attack(r"names the global 'os\\r' 'system\\r'")
def names_that_end_as_on_windows(marker: Path) -> bytes:
    return b"\x80\x02cos\r\nsystem\r\n" + touch(marker) + b"\x85R."


@attack("names the global 'torch._utils' 'rebuild_tensor_v2'")
def name_like_a_known_one(_: Path) -> bytes:
    return b"\x80\x02ctorch._utils\nrebuild_tensor_v2\n."


@attack("names the global 'os' 'system'", live=True)
def call_in_a_frame_that_hides_it(marker: Path) -> bytes:
    call = text("os") + text("system") + b"\x93" + touch(marker) + b"\x85R."
    return b"\x80\x04\x95" + struct.pack("<Q", len(call)) + call


@attack("names the global 'pickle' 'loads'", live=True)
def pickle_in_a_pickle(marker: Path) -> bytes:
    inner = b"\x80\x02cos\nsystem\n" + touch(marker) + b"\x85R."
    return b"\x80\x03cpickle\nloads\nC" + bytes([len(inner)]) + inner + b"\x85R."


@attack("names the global 'os' 'system'", live=True)
def names_from_the_memo(marker: Path) -> bytes:
    names = text("system") + b"\x94" + text("os") + b"\x94"
    return b"\x80\x04" + names + b"h\x01h\x00\x93" + touch(marker) + b"\x85R\x85\x85\x85."


@attack("leaves 2 values on the stack")
def values_left_on_the_stack(_: Path) -> bytes:
    return b"\x80\x04" + text("os") + text("system") + b"N."


@attack("names the global 'os' 'system'", live=True)
def build_after_reduce(marker: Path) -> bytes:
    return b"\x80\x02ccollections\nOrderedDict\n)R}" + text("x") + b"cos\nsystem\n" + touch(marker) + b"\x85Rsb."


@attack("BUILD works on the global torch.Tensor; expected an OrderedDict")
def build_on_a_class(_: Path) -> bytes:
    return b"\x80\x02ctorch\nTensor\n}" + text("__setstate__") + b"Nsb."


@attack("BUILD works on a PickledTensor")
def build_on_a_tensor(_: Path) -> bytes:
    return tensor_pickle()[:-2] + b"}b."


@attack("BUILD works on a dict of 0")
def build_on_a_dict(_: Path) -> bytes:
    return b"\x80\x02}}b."


@attack("BUILD sets a tuple of 2 as attributes")
def build_with_slots(_: Path) -> bytes:
    return b"\x80\x02ccollections\nOrderedDict\n)R}}\x86b."


@attack("REDUCE calls the global torch.FloatStorage, which cannot be called")
def call_of_a_storage_type(_: Path) -> bytes:
    return b"\x80\x02ctorch\nFloatStorage\n)R."


@attack("REDUCE calls the text 'os.system'")
def call_of_a_text(_: Path) -> bytes:
    return b"\x80\x02" + text("os.system") + b")R."


@attack("calls torch._utils._rebuild_tensor_v2 with a list")
def call_with_a_list(_: Path) -> bytes:
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n]R."


@attack("calls torch._tensor._rebuild_from_type_v2, which is given the global torch.Size")
def rebuild_from_something_else(_: Path) -> bytes:
    return pickled(Call(torch._tensor._rebuild_from_type_v2, torch.Size, torch.Tensor, ((1,),), {}))


@attack("names the global '.*' 'Member'")
def rebuild_as_a_class_of_its_own(_: Path) -> bytes:
    from tests.support.torch_files import Member

    return pickled(Call(torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_tensor_v2, Member, (), {}))


@attack("is given the text 'x'; expected the class of a plain tensor")
def rebuild_as_a_text(_: Path) -> bytes:
    return pickled(Call(torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_tensor_v2, "x", (), {}))


@attack("is given a list of 0; expected a tuple")
def rebuild_with_a_list(_: Path) -> bytes:
    return pickled(Call(torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_tensor_v2, torch.Tensor, [], {}))


@attack("_rebuild_parameter, which is given the text 'x'; expected a tensor")
def parameter_of_a_text(_: Path) -> bytes:
    return pickled(Call(torch._utils._rebuild_parameter, "x", False, OrderedDict()))


@attack("is given the text 'float32' as a dtype|is given None as a dtype")
def dtype_as_a_text(_: Path) -> bytes:
    held = storage(kind=torch.UntypedStorage, elements=16)
    call = Call(torch._utils._rebuild_tensor_v3, held, 0, (4,), (1,), False, OrderedDict(), "float32")
    return pickled({"w": call})


@attack("is given a storage of F32; expected one of bytes")
def dtype_other_than_the_storages(_: Path) -> bytes:
    call = Call(torch._utils._rebuild_tensor_v3, storage(), 0, (4,), (1,), False, OrderedDict(), torch.int32)
    return pickled({"w": call})


@attack("is given None as a dtype")
def storage_of_bytes_without_a_dtype(_: Path) -> bytes:
    return tensor_pickle(storage(kind=torch.UntypedStorage, elements=16))


@attack("is given the text 'conj' as metadata")
def metadata_as_a_text(_: Path) -> bytes:
    return tensor_pickle(None, 0, (4,), (1,), False, OrderedDict(), "conj")


@attack("torch.device, which is given the number 7; expected a device's name")
def device_of_a_number(_: Path) -> bytes:
    return b"\x80\x02ctorch\ndevice\nK\x07\x85R."


@attack("torch.Size, which is given the text 'x'; expected a tuple")
def size_of_a_text(_: Path) -> bytes:
    return b"\x80\x02ctorch\nSize\n" + text("x") + b"\x85R."


@attack("_codecs.encode, which is given the text 'x' and the text 'rot13'")
def another_codec(_: Path) -> bytes:
    return b"\x80\x02c_codecs\nencode\n" + text("x") + text("rot13") + b"\x86R."


@attack("is given text that is not Latin-1")
def bytes_of_no_latin_1(_: Path) -> bytes:
    return b"\x80\x02c_codecs\nencode\n" + text("😀") + text("latin1") + b"\x86R."


@attack("builtins.complex, which is not given two numbers")
def complex_of_texts(_: Path) -> bytes:
    return b"\x80\x02c__builtin__\ncomplex\n" + text("1") + text("2") + b"\x86R."


@attack("PERSID is not an opcode that is read")
def persistent_id_as_a_line(_: Path) -> bytes:
    return b"\x80\x02P../../etc/passwd\n."


@attack("NEXT_BUFFER is not an opcode that is read")
def out_of_band_buffer(_: Path) -> bytes:
    return b"\x80\x05\x97."


# the format itself


@attack(r"b'\\x80\\x06'; expected protocol 2, 3, 4 or 5")
def protocol_6(_: Path) -> bytes:
    return b"\x80\x06}."


@attack(r"b'\\x80\\x01'; expected protocol")
def protocol_1(_: Path) -> bytes:
    return b"\x80\x01}."


@attack("expected protocol")
def protocol_0(_: Path) -> bytes:
    return b"(dp0\n."


@attack("PROTO is not an opcode that is read")
def protocol_twice(_: Path) -> bytes:
    return b"\x80\x02\x80\x02}."


@attack("is followed by 4 bytes")
def bytes_behind_the_end(_: Path) -> bytes:
    return b"\x80\x02}.evil"


@attack("is followed by")
def a_second_pickle_behind_the_first(_: Path) -> bytes:
    return tensor_pickle() + tensor_pickle()


@attack("its end comes before a STOP", CorruptShardError)
def no_stop(_: Path) -> bytes:
    return b"\x80\x02}"


@attack("needs 2 bytes; 0 remain", CorruptShardError)
def empty(_: Path) -> bytes:
    return b""


@attack("not enough data in stream to read uint4", CorruptShardError)
def length_cut_off(_: Path) -> bytes:
    return b"\x80\x02X\x01\x00"


@attack("finds nothing on the stack", CorruptShardError)
def nothing_but_stop(_: Path) -> bytes:
    return b"\x80\x02."


@attack("TUPLE1 finds nothing on the stack", CorruptShardError)
def tuple_across_a_mark(_: Path) -> bytes:
    return b"\x80\x02N(\x85."


@attack("finds no mark", CorruptShardError)
def tuple_without_a_mark(_: Path) -> bytes:
    return b"\x80\x02Nt."


@attack("asks for value 200 of the memo", CorruptShardError)
def memo_that_is_not_there(_: Path) -> bytes:
    return b"\x80\x02h\xc8."


@attack("BINUNICODE expected 4294967295 bytes", CorruptShardError)
def text_of_4_gib(_: Path) -> bytes:
    return b"\x80\x02X\xff\xff\xff\xff."


@attack("byte count > sys.maxsize", CorruptShardError)
def text_of_16_eib(_: Path) -> bytes:
    return b"\x80\x04\x8d" + b"\xff" * 8 + b"."


@attack("expected 9223372036854775807 bytes", CorruptShardError)
def bytes_of_8_eib(_: Path) -> bytes:
    return b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f."


@attack("expected 2147483647 bytes", CorruptShardError)
def bytearray_of_2_gib(_: Path) -> bytes:
    return b"\x80\x05\x96\xff\xff\xff\x7f\0\0\0\0."


@attack("LONG4 not enough data", CorruptShardError)
def number_of_2_gib(_: Path) -> bytes:
    return b"\x80\x02\x8b\xff\xff\xff\x7f."


@attack("LONG4 long4 byte count < 0", CorruptShardError)
def number_of_negative_length(_: Path) -> bytes:
    return b"\x80\x02\x8b\xff\xff\xff\xff."


@attack("FRAME needs", CorruptShardError)
def frame_beyond_the_end(_: Path) -> bytes:
    return b"\x80\x04\x95" + b"\xff" * 7 + b"\x00}."


@attack("can't decode|invalid", CorruptShardError)
def text_that_is_no_utf8(_: Path) -> bytes:
    return b"\x80\x02X\x01\x00\x00\x00\xff."


@attack("name that does not end within 200 bytes")
def global_without_end(_: Path) -> bytes:
    return b"\x80\x02c" + b"a" * 10_000 + b"\n."


@attack("names a global by the number 1 and the number 2")
def global_of_numbers(_: Path) -> bytes:
    return b"\x80\x04K\x01K\x02\x93."


@attack("SETITEM works on a list")
def set_item_of_a_list(_: Path) -> bytes:
    return b"\x80\x02]K\x00K\x01s."


@attack("SETITEMS works on a tuple")
def set_items_of_a_tuple(_: Path) -> bytes:
    return b"\x80\x02)(K\x00K\x01u."


@attack("APPEND works on a dict")
def append_to_a_dict(_: Path) -> bytes:
    return b"\x80\x02}K\x01a."


@attack("SETITEMS has a key without a value")
def key_without_a_value(_: Path) -> bytes:
    return b"\x80\x02}(K\x00u."


@attack("a list of 0 as a key")
def list_as_a_key(_: Path) -> bytes:
    return b"\x80\x02}]K\x01s."


@attack("a tuple of 51 as a key")
def key_that_takes_for_ever_to_hash(_: Path) -> bytes:
    return b"\x80\x02}" + _laughs(50) + b"K\x01s."


@attack("number .* as a key")
def key_of_a_wide_number(_: Path) -> bytes:
    return b"\x80\x02}\x8a\x0a" + b"\x01" * 10 + b"Ns."


@attack("has the key 'w' twice")
def one_name_twice(_: Path) -> bytes:
    return b"\x80\x02}" + text("w") + b"K\x01s" + text("w") + b"K\x02s."


# more than any checkpoint needs


def _laughs(folds: int) -> bytes:
    """Tuples of four references to the one before: 4**folds values in a few bytes."""
    steps = (b"q%c(h%ch%ch%ch%ct" % ((number,) + (number,) * 4) for number in range(1, folds + 1))
    return b"(K\x01" + b"".join(steps) + b"t"


@attack("holds more than 1,000,000 values")
def billion_laughs(_: Path) -> bytes:
    return b"\x80\x02}" + text("x") + _laughs(25) + b"s."


@attack("holds more than 1,000,000 values")
def one_long_list_under_many_names(_: Path) -> bytes:
    long = b"](" + b"K\x01" * 5_000 + b"eq\x01"
    names = b"".join(text(f"n{number}") + b"h\x01" for number in range(2_000))
    return b"\x80\x02}(" + text("x") + long + names + b"u."


@attack("contains itself")
def list_that_contains_itself(_: Path) -> bytes:
    return b"\x80\x02}" + text("x") + b"]q\x00h\x00as."


@attack("contains itself")
def dict_that_contains_itself(_: Path) -> bytes:
    return b"\x80\x02}q\x00" + text("x") + b"h\x00s."


@attack("nested more than 32 deep")
def a_hundred_thousand_tuples_in_one_another(_: Path) -> bytes:
    return b"\x80\x02}" + text("x") + b")" + b"\x85" * 100_000 + b"s."


@attack("opens more than 1,000 structures in one another")
def a_hundred_thousand_marks(_: Path) -> bytes:
    return b"\x80\x02" + b"(" * 100_000


@attack("puts more than 200,000 values on the stack")
def stack_without_end(_: Path) -> bytes:
    return b"\x80\x02" + b"}" * 3_000_000


@attack("more than 500,000 values in the memo")
def memo_without_end(_: Path) -> bytes:
    return b"\x80\x04]" + b"\x94" * 3_000_000 + b"."


@attack("exceeds the limit of 1,000,000 opcodes")
def opcodes_without_end(_: Path) -> bytes:
    return b"\x80\x04]" + b"]a" * 2_000_000 + b"."


@attack("bytes; at most 33,554,432 are read")
def pickle_of_40_mib(_: Path) -> bytes:
    return b"\x80\x02X" + struct.pack("<I", 40 << 20) + bytes(40 << 20) + b"."


# tensors that are not there


@attack("calls torch._utils._rebuild_tensor_v2, which makes 1,099,511,627,776 elements of a storage that has 4")
def stride_0_giant(_: Path) -> bytes:
    return tensor_pickle(None, 0, (1 << 40,), (0,))


@attack("no tensor is that large")
def shape_that_overflows(_: Path) -> bytes:
    return tensor_pickle(None, 0, (1 << 32, 1 << 32), (0, 0))


@attack("no tensor is that large")
def empty_shape_that_overflows(_: Path) -> bytes:
    return tensor_pickle(None, 0, (0, 1 << 62, 1 << 62), (1, 1, 1))


@attack("makes 8 elements of a storage that has 4")
def size_beyond_the_storage(_: Path) -> bytes:
    return tensor_pickle(None, 0, (8,), (1,))


@attack("reaches element 6 of a storage that has 4")
def offset_beyond_the_storage(_: Path) -> bytes:
    return tensor_pickle(None, 3, (4,), (1,))


@attack("reaches element 1,099,511,627,776 of a storage that has 4")
def stride_beyond_the_storage(_: Path) -> bytes:
    return tensor_pickle(None, 0, (2,), (1 << 40,))


@attack("the number -1 as its first element")
def negative_offset(_: Path) -> bytes:
    return tensor_pickle(None, -1, (4,), (1,))


@attack("the number -1 as strides")
def negative_stride(_: Path) -> bytes:
    return tensor_pickle(None, 3, (4,), (-1,))


@attack("the number -4 as a shape")
def negative_size(_: Path) -> bytes:
    return tensor_pickle(None, 0, (-4,), (1,))


@attack("True as a shape")
def size_that_is_a_truth(_: Path) -> bytes:
    return tensor_pickle(None, 0, (True,), (1,))


@attack("a tuple of 10,000 as a shape")
def very_many_dimensions(_: Path) -> bytes:
    return tensor_pickle(None, 0, (1,) * 10_000, (1,) * 10_000)


@attack("has 2 sizes and 1 strides")
def fewer_strides_than_sizes(_: Path) -> bytes:
    return tensor_pickle(None, 0, (2, 2), (1,))


@attack("is given 3 arguments; expected 6 to 7")
def too_few_arguments(_: Path) -> bytes:
    return pickled({"w": Call(torch._utils._rebuild_tensor_v2, storage(), 0, (4,))})


@attack("is given the text 'x' as a storage")
def text_as_a_storage(_: Path) -> bytes:
    return tensor_pickle("x")


@attack("conjugated or negated")
def conjugated_view(_: Path) -> bytes:
    return tensor_pickle(None, 0, (4,), (1,), False, OrderedDict(), {"conj": True})


@attack("the text '../data.pkl'; expected digits")
def storage_key_that_climbs(_: Path) -> bytes:
    return tensor_pickle(storage(key="../data.pkl"))


@attack("expected digits")
def storage_key_of_other_digits(_: Path) -> bytes:
    return tensor_pickle(storage(key="٣"))


@attack("on the number 7; expected a device's name")
def storage_on_a_number(_: Path) -> bytes:
    return tensor_pickle(storage(place=7))


@attack("a storage of type the text 'FloatStorage'")
def storage_type_as_text(_: Path) -> bytes:
    return tensor_pickle(storage(kind="FloatStorage"))


@attack("refers to the text 'module'|refers to a tuple of 2")
def persistent_id_of_another_kind(_: Path) -> bytes:
    return tensor_pickle(StorageOf("module", "os"))


@attack("names storage 0 again, with another type or size")
def one_storage_as_two_types(_: Path) -> bytes:
    other = tensor(storage(elements=2, kind=torch.DoubleStorage), 0, (2,), (1,))
    return pickled({"a": tensor(), "b": other})


# names


@attack("holds a list of 1; expected a dict of tensors", CorruptShardError)
def list_as_the_root(_: Path) -> bytes:
    return pickled([tensor()])


@attack("holds a PickledTensor; expected a dict", CorruptShardError)
def tensor_as_the_root(_: Path) -> bytes:
    return pickled(tensor())


@attack("not plain text", CorruptShardError)
def empty_name(_: Path) -> bytes:
    return pickled({"": tensor()})


@attack("not plain text", CorruptShardError)
def name_with_a_nul(_: Path) -> bytes:
    return pickled({"a\0b": tensor()})


@attack("not plain text", CorruptShardError)
def name_without_end(_: Path) -> bytes:
    return pickled({"a" * 5000: tensor()})


@attack("two tensors named 'a.b'", CorruptShardError)
def one_name_by_two_ways(_: Path) -> bytes:
    held = tensor()
    return pickled({"a.b": held, "a": {"b": held}})


@attack("two tensors named '1'", CorruptShardError)
def one_name_as_text_and_number(_: Path) -> bytes:
    held = tensor()
    return pickled({"1": held, 1: held})


@attack("has no named tensor", CorruptShardError)
def no_tensor(_: Path) -> bytes:
    return pickled({"epoch": 3})


# what is sound all the same, and stays readable

LEGAL: dict[str, bytes] = {
    "pickle that lies in a pickle as bytes": pickled({"w": tensor(), "x": b"\x80\x02cos\nsystem\n)R."}, 3),
    "names of globals as texts": pickled({"w": tensor(), "os": "system", "builtins": "eval"}),
    "memo at a far number": b"\x80\x02}r\xff\xff\xff\xff" + tensor_pickle()[3:],
    "frame over the rest": b"\x80\x04\x95" + struct.pack("<Q", len(tensor_pickle()) - 2) + tensor_pickle()[2:],
    "NaN and infinities": pickled({"w": tensor(), "x": [float("nan"), float("inf"), -float("inf")]}),
    "name that looks like a path": pickled({"../../w": tensor()}),
    "empty tensor": tensor_pickle(storage(elements=0), 0, (0, 3), (3, 1)),
    "32 bytes of a number": pickled({"w": tensor(), "x": 1 << 254}),
}
"""Each holds one tensor; nothing in them is called but what makes it."""

ACCEPTED_BY_TORCH = {
    "newobj of a known global",
    "values left on the stack",
    "build on a tensor",
    "dtype other than the storages",
    "storage of bytes without a dtype",
    "another codec",
    "protocol 6",
    "protocol 1",
    "protocol twice",
    "bytes behind the end",
    "a second pickle behind the first",
    "key of a wide number",
    "one name twice",
    "billion laughs",
    "list that contains itself",
    "dict that contains itself",
    "stride 0 giant",
    "empty shape that overflows",
    "one storage as two types",
    "list as the root",
    "tensor as the root",
    "empty name",
    "name with a nul",
    "name without end",
    "one name by two ways",
    "one name as text and number",
    "no tensor",
}
"""What `torch.load(weights_only=True)` of torch 2.13 and 2.14 loads, of those under 10,000 bytes; stricter here on
purpose."""
ACCEPTED_BY_TORCH_WITH_CUDA = {"device of a number"}
"""What builds of torch for GPUs load besides."""
ENDLESS_IN_TORCH = {"key that takes for ever to hash"}
"""What the same call does not come back from."""
