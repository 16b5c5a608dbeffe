"""Pickles that would run something, or make a reader work or hold more than any checkpoint needs.

The globals are those of published bypasses of pickle scanners (picklescan's and fickling's advisories; "Pickle in the
middle", arXiv 2508.19774) and of torch's own `weights_only` (CVE-2025-32434, CVE-2026-24747).
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch._utils

from tests.attacks.attack import Attack, unsafe
from tests.support.torch_files import Call, Member, StorageOf, pickled, storage, tensor, tensor_pickle

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


def call(marker: Path) -> bytes:
    """GLOBAL and REDUCE: the result of `os.system`, on the stack."""
    return b"cos\nsystem\n" + touch(marker) + b"\x85R"


def gadgets(module: str, name: str, live: bool) -> tuple[Attack, Attack]:
    """What `__reduce__` makes at protocol 2, and protocol 4's form, which dotted names reach further by."""

    def by_name(marker: Path) -> bytes:
        return b"\x80\x02c" + f"{module}\n{name}\n".encode() + touch(marker) + b"\x85R."

    def from_the_stack(marker: Path) -> bytes:
        return b"\x80\x04" + text(module) + text(name) + b"\x93" + touch(marker) + b"\x85R."

    named = f"names the global {module!r} {name!r}"
    return (
        unsafe(f"{module}.{name}", f"GLOBAL {named}", by_name, live=live),
        unsafe(f"{module}.{name} from the stack", f"STACK_GLOBAL {named}", from_the_stack, live=live),
    )


def call_in_a_frame_that_hides_it(marker: Path) -> bytes:
    framed = text("os") + text("system") + b"\x93" + touch(marker) + b"\x85R."
    return b"\x80\x04\x95" + struct.pack("<Q", len(framed)) + framed


def pickle_in_a_pickle(marker: Path) -> bytes:
    inner = b"\x80\x02" + call(marker) + b"."
    return b"\x80\x03cpickle\nloads\nC" + bytes([len(inner)]) + inner + b"\x85R."


def names_from_the_memo(marker: Path) -> bytes:
    names = text("system") + b"\x94" + text("os") + b"\x94"
    return b"\x80\x04" + names + b"h\x01h\x00\x93" + touch(marker) + b"\x85R\x85\x85\x85."


def with_dtype(dtype: Any, held: Any) -> bytes:
    """A tensor of a storage as torch writes it since 2.1: with its dtype."""
    rebuilt = Call(torch._utils._rebuild_tensor_v3, held, 0, (4,), (1,), False, OrderedDict(), dtype)
    return pickled({"w": rebuilt})


BYTES = storage(cls=torch.UntypedStorage, elements=16)
FROM_TYPE = torch._tensor._rebuild_from_type_v2
TENSOR = tensor()


def _laughs(folds: int) -> bytes:
    """Tuples of four references to the one before: 4**folds values in a few bytes."""
    steps = (b"q%c(h%ch%ch%ch%ct" % ((number,) + (number,) * 4) for number in range(1, folds + 1))
    return b"(K\x01" + b"".join(steps) + b"t"


def one_long_list_under_many_names(_: Path) -> bytes:
    long = b"](" + b"K\x01" * 5_000 + b"eq\x01"
    names = b"".join(text(f"n{number}") + b"h\x01" for number in range(2_000))
    return b"\x80\x02}(" + text("x") + long + names + b"u."


ATTACKS = [
    *(attack for pair, live in GADGETS.items() for attack in gadgets(*pair, live)),
    # other ways to make a call
    unsafe(
        "inst",
        "INST is not an opcode that is read",
        lambda marker: b"\x80\x02(" + touch(marker) + b"ios\nsystem\n.",
        live=True,
    ),
    unsafe(
        "obj",
        "names the global 'os' 'system'",
        lambda marker: b"\x80\x02(cos\nsystem\n" + touch(marker) + b"o.",
        live=True,
    ),
    unsafe("obj of a known global", "OBJ is not an opcode that is read", b"\x80\x02(ccollections\nOrderedDict\no."),
    unsafe(
        "newobj of a known global",
        "NEWOBJ is not an opcode that is read",
        b"\x80\x02ctorch.nn.parameter\nParameter\n)\x81.",
    ),
    unsafe("newobj ex", "NEWOBJ_EX is not an opcode that is read", b"\x80\x04ctorch\nSize\n)}\x92."),
    unsafe("ext1", "EXT1 is not an opcode that is read", b"\x80\x02\x82\x01."),
    unsafe("ext2", "EXT2 is not an opcode that is read", b"\x80\x02\x83\x01\x00."),
    unsafe("ext4", "EXT4 is not an opcode that is read", b"\x80\x02\x84\x01\x00\x00\x00."),
    unsafe(
        "call whose result is dropped",
        "GLOBAL names the global 'os' 'system'",
        lambda marker: b"\x80\x02" + call(marker) + b"0" + tensor_pickle()[2:],
        live=True,
    ),
    unsafe(
        "call among tensors",
        "GLOBAL names the global 'os' 'system'",
        lambda marker: b"\x80\x02}(" + text("x") + call(marker) + text("w") + pickled(TENSOR)[2:-1] + b"u.",
        live=True,
    ),
    unsafe(
        "names that end as on windows",
        r"names the global 'os\\r' 'system\\r'",
        lambda marker: b"\x80\x02cos\r\nsystem\r\n" + touch(marker) + b"\x85R.",
    ),
    unsafe(
        "name like a known one",
        "names the global 'torch._utils' 'rebuild_tensor_v2'",
        b"\x80\x02ctorch._utils\nrebuild_tensor_v2\n.",
    ),
    unsafe("call in a frame that hides it", "names the global 'os' 'system'", call_in_a_frame_that_hides_it, live=True),
    unsafe("pickle in a pickle", "names the global 'pickle' 'loads'", pickle_in_a_pickle, live=True),
    unsafe("names from the memo", "names the global 'os' 'system'", names_from_the_memo, live=True),
    unsafe(
        "values left on the stack", "leaves 2 values on the stack", b"\x80\x04" + text("os") + text("system") + b"N."
    ),
    unsafe(
        "build after reduce",
        "names the global 'os' 'system'",
        lambda marker: b"\x80\x02ccollections\nOrderedDict\n)R}" + text("x") + call(marker) + b"sb.",
        live=True,
    ),
    unsafe(
        "build on a class",
        "BUILD works on the global torch.Tensor; expected an OrderedDict",
        b"\x80\x02ctorch\nTensor\n}" + text("__setstate__") + b"Nsb.",
    ),
    unsafe("build on a tensor", "BUILD works on a PickledTensor", tensor_pickle()[:-2] + b"}b."),
    unsafe("build on a dict", "BUILD works on a dict of 0", b"\x80\x02}}b."),
    unsafe(
        "build with slots", "BUILD sets a tuple of 2 as attributes", b"\x80\x02ccollections\nOrderedDict\n)R}}\x86b."
    ),
    unsafe(
        "call of a storage type",
        "REDUCE calls the global torch.FloatStorage, which cannot be called",
        b"\x80\x02ctorch\nFloatStorage\n)R.",
    ),
    unsafe("call of a text", "REDUCE calls the text 'os.system'", b"\x80\x02" + text("os.system") + b")R."),
    unsafe(
        "call with a list",
        "calls torch._utils._rebuild_tensor_v2 with a list",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n]R.",
    ),
    unsafe(
        "rebuild from something else",
        "calls torch._tensor._rebuild_from_type_v2, which is given the global torch.Size",
        pickled(Call(FROM_TYPE, torch.Size, torch.Tensor, ((1,),), {})),
    ),
    unsafe(
        "rebuild as a class of its own",
        "names the global '.*' 'Member'",
        pickled(Call(FROM_TYPE, torch._utils._rebuild_tensor_v2, Member, (), {})),
    ),
    unsafe(
        "rebuild as a text",
        "is given the text 'x'; expected the class of a plain tensor",
        pickled(Call(FROM_TYPE, torch._utils._rebuild_tensor_v2, "x", (), {})),
    ),
    unsafe(
        "rebuild with a list",
        "is given a list of 0; expected a tuple",
        pickled(Call(FROM_TYPE, torch._utils._rebuild_tensor_v2, torch.Tensor, [], {})),
    ),
    unsafe(
        "parameter of a text",
        "_rebuild_parameter, which is given the text 'x'; expected a tensor",
        pickled(Call(torch._utils._rebuild_parameter, "x", False, OrderedDict())),
    ),
    unsafe(
        "dtype as a text",
        "is given the text 'float32' as a dtype|is given None as a dtype",
        with_dtype("float32", BYTES),
    ),
    unsafe(
        "dtype other than the storages",
        "is given a storage of F32; expected one of bytes",
        with_dtype(torch.int32, storage()),
    ),
    unsafe("storage of bytes without a dtype", "is given None as a dtype", tensor_pickle(BYTES)),
    unsafe(
        "metadata as a text",
        "is given the text 'conj' as metadata",
        tensor_pickle(None, 0, (4,), (1,), False, OrderedDict(), "conj"),
    ),
    unsafe(
        "device of a number",
        "torch.device, which is given the number 7; expected a device's name",
        b"\x80\x02ctorch\ndevice\nK\x07\x85R.",
    ),
    unsafe(
        "size of a text",
        "torch.Size, which is given the text 'x'; expected a tuple",
        b"\x80\x02ctorch\nSize\n" + text("x") + b"\x85R.",
    ),
    unsafe(
        "another codec",
        "_codecs.encode, which is given the text 'x' and the text 'rot13'",
        b"\x80\x02c_codecs\nencode\n" + text("x") + text("rot13") + b"\x86R.",
    ),
    unsafe(
        "bytes of no latin 1",
        "is given text that is not Latin-1",
        b"\x80\x02c_codecs\nencode\n" + text("😀") + text("latin1") + b"\x86R.",
    ),
    unsafe(
        "complex of texts",
        "builtins.complex, which is not given two numbers",
        b"\x80\x02c__builtin__\ncomplex\n" + text("1") + text("2") + b"\x86R.",
    ),
    unsafe("persistent id as a line", "PERSID is not an opcode that is read", b"\x80\x02P../../etc/passwd\n."),
    unsafe("out of band buffer", "NEXT_BUFFER is not an opcode that is read", b"\x80\x05\x97."),
    # the format itself
    unsafe("protocol 6", r"b'\\x80\\x06'; expected protocol 2, 3, 4 or 5", b"\x80\x06}."),
    unsafe("protocol 1", r"b'\\x80\\x01'; expected protocol", b"\x80\x01}."),
    unsafe("protocol 0", "expected protocol", b"(dp0\n."),
    unsafe("protocol twice", "PROTO is not an opcode that is read", b"\x80\x02\x80\x02}."),
    unsafe("bytes behind the end", "is followed by 4 bytes", b"\x80\x02}.evil"),
    unsafe("a second pickle behind the first", "is followed by", tensor_pickle() + tensor_pickle()),
    Attack("no stop", "its end comes before a STOP", b"\x80\x02}"),
    Attack("empty", "needs 2 bytes; 0 remain", b""),
    Attack("length cut off", "not enough data in stream to read uint4", b"\x80\x02X\x01\x00"),
    Attack("nothing but stop", "finds nothing on the stack", b"\x80\x02."),
    Attack("tuple across a mark", "TUPLE1 finds nothing on the stack", b"\x80\x02N(\x85."),
    Attack("tuple without a mark", "finds no mark", b"\x80\x02Nt."),
    Attack("memo that is not there", "asks for value 200 of the memo", b"\x80\x02h\xc8."),
    Attack("text of 4 gib", "BINUNICODE expected 4294967295 bytes", b"\x80\x02X\xff\xff\xff\xff."),
    Attack("text of 16 eib", "byte count > sys.maxsize", b"\x80\x04\x8d" + b"\xff" * 8 + b"."),
    Attack("bytes of 8 eib", "expected 9223372036854775807 bytes", b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f."),
    Attack("bytearray of 2 gib", "expected 2147483647 bytes", b"\x80\x05\x96\xff\xff\xff\x7f\0\0\0\0."),
    Attack("number of 2 gib", "LONG4 not enough data", b"\x80\x02\x8b\xff\xff\xff\x7f."),
    Attack("number of negative length", "LONG4 long4 byte count < 0", b"\x80\x02\x8b\xff\xff\xff\xff."),
    Attack("frame beyond the end", "FRAME needs", b"\x80\x04\x95" + b"\xff" * 7 + b"\x00}."),
    Attack("text that is no utf8", "can't decode|invalid", b"\x80\x02X\x01\x00\x00\x00\xff."),
    unsafe(
        "global without end", "name that does not end within 200 bytes", lambda _: b"\x80\x02c" + b"a" * 10_000 + b"\n."
    ),
    unsafe("global of numbers", "names a global by the number 1 and the number 2", b"\x80\x04K\x01K\x02\x93."),
    unsafe("set item of a list", "SETITEM works on a list", b"\x80\x02]K\x00K\x01s."),
    unsafe("set items of a tuple", "SETITEMS works on a tuple", b"\x80\x02)(K\x00K\x01u."),
    unsafe("append to a dict", "APPEND works on a dict", b"\x80\x02}K\x01a."),
    unsafe("key without a value", "SETITEMS has a key without a value", b"\x80\x02}(K\x00u."),
    unsafe("list as a key", "a list of 0 as a key", b"\x80\x02}]K\x01s."),
    unsafe(
        "key that takes for ever to hash", "a tuple of 51 as a key", lambda _: b"\x80\x02}" + _laughs(50) + b"K\x01s."
    ),
    unsafe("key of a wide number", "number .* as a key", b"\x80\x02}\x8a\x0a" + b"\x01" * 10 + b"Ns."),
    unsafe("one name twice", "has the key 'w' twice", b"\x80\x02}" + text("w") + b"K\x01s" + text("w") + b"K\x02s."),
    # more than any checkpoint needs
    unsafe(
        "billion laughs", "holds more than 1,000,000 values", lambda _: b"\x80\x02}" + text("x") + _laughs(25) + b"s."
    ),
    unsafe("one long list under many names", "holds more than 1,000,000 values", one_long_list_under_many_names),
    unsafe("list that contains itself", "contains itself", b"\x80\x02}" + text("x") + b"]q\x00h\x00as."),
    unsafe("dict that contains itself", "contains itself", b"\x80\x02}q\x00" + text("x") + b"h\x00s."),
    unsafe(
        "a hundred thousand tuples in one another",
        "nested more than 32 deep",
        lambda _: b"\x80\x02}" + text("x") + b")" + b"\x85" * 100_000 + b"s.",
    ),
    unsafe(
        "a hundred thousand marks",
        "opens more than 1,000 structures in one another",
        lambda _: b"\x80\x02" + b"(" * 100_000,
    ),
    unsafe("stack without end", "puts more than 200,000 values on the stack", lambda _: b"\x80\x02" + b"}" * 3_000_000),
    unsafe(
        "memo without end", "more than 500,000 values in the memo", lambda _: b"\x80\x04]" + b"\x94" * 3_000_000 + b"."
    ),
    unsafe(
        "opcodes without end",
        "exceeds the limit of 1,000,000 opcodes",
        lambda _: b"\x80\x04]" + b"]a" * 2_000_000 + b".",
    ),
    unsafe(
        "pickle of 40 mib",
        "bytes; at most 33,554,432 are read",
        lambda _: b"\x80\x02X" + struct.pack("<I", 40 << 20) + bytes(40 << 20) + b".",
    ),
    # tensors that are not there
    unsafe(
        "stride 0 giant",
        "calls torch._utils._rebuild_tensor_v2, which makes 1,099,511,627,776 elements of a storage that has 4",
        tensor_pickle(None, 0, (1 << 40,), (0,)),
    ),
    unsafe("shape that overflows", "no tensor is that large", tensor_pickle(None, 0, (1 << 32, 1 << 32), (0, 0))),
    unsafe(
        "empty shape that overflows",
        "no tensor is that large",
        tensor_pickle(None, 0, (0, 1 << 62, 1 << 62), (1, 1, 1)),
    ),
    unsafe("size beyond the storage", "makes 8 elements of a storage that has 4", tensor_pickle(None, 0, (8,), (1,))),
    unsafe(
        "offset beyond the storage", "reaches element 6 of a storage that has 4", tensor_pickle(None, 3, (4,), (1,))
    ),
    unsafe(
        "stride beyond the storage",
        "reaches element 1,099,511,627,776 of a storage that has 4",
        tensor_pickle(None, 0, (2,), (1 << 40,)),
    ),
    unsafe("negative offset", "the number -1 as its first element", tensor_pickle(None, -1, (4,), (1,))),
    unsafe("negative stride", "the number -1 as strides", tensor_pickle(None, 3, (4,), (-1,))),
    unsafe("negative size", "the number -4 as a shape", tensor_pickle(None, 0, (-4,), (1,))),
    unsafe("size that is a truth", "True as a shape", tensor_pickle(None, 0, (True,), (1,))),
    unsafe(
        "very many dimensions",
        "a tuple of 10,000 as a shape",
        lambda _: tensor_pickle(None, 0, (1,) * 10_000, (1,) * 10_000),
    ),
    unsafe("fewer strides than sizes", "has 2 sizes and 1 strides", tensor_pickle(None, 0, (2, 2), (1,))),
    unsafe(
        "too few arguments",
        "is given 3 arguments; expected 6 to 7",
        pickled({"w": Call(torch._utils._rebuild_tensor_v2, storage(), 0, (4,))}),
    ),
    unsafe("text as a storage", "is given the text 'x' as a storage", tensor_pickle("x")),
    unsafe(
        "conjugated view",
        "conjugated or negated",
        tensor_pickle(None, 0, (4,), (1,), False, OrderedDict(), {"conj": True}),
    ),
    unsafe(
        "storage key that climbs", "the text '../data.pkl'; expected digits", tensor_pickle(storage(key="../data.pkl"))
    ),
    unsafe("storage key of other digits", "expected digits", tensor_pickle(storage(key="٣"))),
    unsafe("storage on a number", "on the number 7; expected a device's name", tensor_pickle(storage(place=7))),
    unsafe(
        "storage type as text", "a storage of type the text 'FloatStorage'", tensor_pickle(storage(cls="FloatStorage"))
    ),
    unsafe(
        "persistent id of another kind",
        "refers to the text 'module'|refers to a tuple of 2",
        tensor_pickle(StorageOf("module", "os")),
    ),
    unsafe(
        "one storage as two types",
        "names storage 0 again, with another type or size",
        pickled({"a": TENSOR, "b": tensor(storage(elements=2, cls=torch.DoubleStorage), 0, (2,), (1,))}),
    ),
    # names
    Attack("list as the root", "holds a list of 1; expected a dict of tensors", pickled([tensor()])),
    Attack("tensor as the root", "holds a PickledTensor; expected a dict", pickled(tensor())),
    Attack("empty name", "not plain text", pickled({"": tensor()})),
    Attack("name with a nul", "not plain text", pickled({"a\0b": tensor()})),
    Attack("name without end", "not plain text", lambda _: pickled({"a" * 5000: tensor()})),
    Attack("one name by two ways", "two tensors named 'a.b'", pickled({"a.b": TENSOR, "a": {"b": TENSOR}})),
    Attack("one name as text and number", "two tensors named '1'", pickled({"1": TENSOR, 1: TENSOR})),
    Attack("no tensor", "has no named tensor", pickled({"epoch": 3})),
    # what is sound all the same, and stays readable
]

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
