"""llama.cpp: its file of a checkpoint, as `rabbitllm convert --to gguf` writes it, and its own programs.

The programs are built for this processor from the source package of llama-cpp-python, without web page, TLS and tests,
which need a download. llama.cpp's own server batches requests; that package's Python server does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from benchmarks.lib.peers import LLAMA_SERVER, THIS, interpreter
from benchmarks.lib.process import Cap, PeerError, run_tool
from benchmarks.lib.server_process import START_LIMIT_SECONDS, served
from rabbitllm.checkpoints.hub import HubAccess
from rabbitllm.errors import CorruptVocabularyError
from rabbitllm.models.gguf_output import convert_to_gguf

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
_OFF = (
    "BUILD_SHARED_LIBS",
    "LLAMA_BUILD_APP",
    "LLAMA_BUILD_UI",
    "LLAMA_USE_PREBUILT_UI",
    "LLAMA_OPENSSL",
    "LLAMA_BUILD_TESTS",
    "LLAMA_BUILD_EXAMPLES",
)


def built(work: Path, name: str) -> Path:
    """The path of a program of llama.cpp, which is built unless an earlier run did.

    Args:
        work: folder of environments.
        name: of the program, and of its build target.

    Raises:
        PeerError: it cannot be built here.
    """
    python = interpreter(LLAMA_SERVER, work.absolute())
    folder = python.parent.parent / name
    program = folder / name
    if program.exists():
        return program
    print(f"Building {name} …", file=sys.stderr, flush=True)
    source = _unpacked(python, folder)
    cmake, ninja = (str(python.with_name(tool)) for tool in ("cmake", "ninja"))
    build = folder / "build"
    chosen = ["-DGGML_NATIVE=ON", *(f"-D{option}=OFF" for option in _OFF)]
    chosen += ["-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    run_tool([cmake, "-S", str(source), "-B", str(build), "-G", "Ninja", *chosen], "cannot be built")
    jobs = str(max(len(os.sched_getaffinity(0)) // 2, 1))
    run_tool([cmake, "--build", str(build), "--target", name, "--parallel", jobs], "cannot be built")
    shutil.copy((build / "bin" / name).resolve(), program)
    for leftover in (build, source.parent.parent):
        shutil.rmtree(leftover)
    return program


def _unpacked(python: Path, folder: Path) -> Path:
    """The source of llama.cpp, in a new folder.

    Raises:
        PeerError: it cannot be downloaded.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    download = ["download", "--quiet", "--no-deps", "--no-binary", PACKAGE, f"{PACKAGE}=={VERSION}"]
    run_tool([str(python), "-m", "pip", *download, "--dest", str(folder)], "cannot be downloaded")
    (package,) = folder.glob("*.tar.gz")
    with tarfile.open(package) as archive:
        archive.extractall(folder, filter="data")
    package.unlink()
    (source,) = folder.glob("llama_cpp_python-*/vendor/llama.cpp")
    return source


@contextlib.contextmanager
def serving(
    program: Path,
    arguments: Sequence[str],
    work: Path,
    label: str,
    *,
    cap: Cap | None = None,
    seconds: float = 1800.0,
    start_seconds: float = START_LIMIT_SECONDS,
) -> Iterator[Callable[..., Any]]:
    """Run `llama-server`: a function that posts a body of JSON to a route and returns the answer.

    Args:
        program: its path.
        arguments: of its command line.
        work: for environments and logs.
        label: name of the log.
        cap: limits its memory.
        seconds: that an answer may take.
        start_seconds: in which it must be ready.

    Raises:
        PeerError: the program failed.
    """
    job = {"how": "program", "package": None, "program": str(program), "arguments": [*arguments]}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with served(THIS, job, work, label, [], cap=cap, start_limit_seconds=start_seconds) as server:

        def ask(route: str, **body: Any) -> Any:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{server.url}{route}", json.dumps(body).encode(), headers)
            try:
                with opener.open(request, timeout=seconds) as answer:
                    return json.load(answer)
            except OSError as error:  # of urllib, too
                server.check()
                raise PeerError(f"llama-server gave no answer: {error}") from error

        yield ask


def write_file(checkpoint: Path, path: Path, ggml_type: str) -> Path:
    """Write the file, and return its path.

    llama.cpp loads no file without a vocabulary, and lacks the tokenizers of random models and of the bundled one. All
    requests are token ids, so such a file gets made-up words.

    Args:
        checkpoint: folder of safetensors, or a split directory.
        path: of the file.
        ggml_type: as "BF16".
    """
    try:
        _convert(checkpoint, path, ggml_type)
        has_vocabulary = GGUFReader(path).get_field("tokenizer.ggml.model") is not None
    except CorruptVocabularyError:
        has_vocabulary = False
    if not has_vocabulary:
        path.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
            _convert(with_vocabulary(checkpoint, Path(temporary)), path, ggml_type)
    return path


_CONVERT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import convert_hf_to_gguf
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
convert_hf_to_gguf.main()
"""
"""llama.cpp's converter, which knows pre-tokenizers by what they make of a text: none of made-up words."""


def write_by_llama_cpp(checkpoint: Path, path: Path, work: Path, more: Sequence[str] = ()) -> None:
    """Write the file by llama.cpp's converter, which knows families that this project does not export.

    Weights are bfloat16, or what the checkpoint has of 4 bits; words are made up.

    Args:
        checkpoint: folder of safetensors.
        path: of the file.
        work: folder of environments.
        more: arguments of the converter.

    Raises:
        PeerError: it failed.
    """
    python = interpreter(LLAMA_SERVER, work.absolute())
    folder = python.parent.parent / "source"
    source = next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"), None) or _unpacked(python, folder)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        model = str(with_vocabulary(checkpoint, Path(temporary)))
        arguments = [model, "--outfile", str(path), "--outtype", "bf16", *more]
        run_tool([sys.executable, "-c", _CONVERT, str(source), *arguments], "llama.cpp's converter failed")


def with_vocabulary(checkpoint: Path, folder: Path) -> Path:
    """Link a checkpoint's files into an empty folder, with a vocabulary of made-up words; return it."""
    for file in checkpoint.absolute().iterdir():
        if file.is_file() and not file.name.startswith("tokenizer"):
            _link(file, folder / file.name)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    (folder / "tokenizer.json").write_text(_tokenizer(size))
    return folder


def _link(file: Path, link: Path) -> None:
    """A hard link, since this project refuses links that lead out of a folder."""
    try:
        link.hardlink_to(file)
    except OSError:  # on another disk
        shutil.copy(file, link)


def _convert(checkpoint: Path, path: Path, ggml_type: str) -> None:
    convert_to_gguf(str(checkpoint), path, ggml_type.lower(), HubAccess(), max_disk=None, min_free=0)


def _tokenizer(size: int) -> str:
    """A tokenizer.json of bytes and made-up words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ([*letters, "<|endoftext|>", "w0"] + [f"w{number}" for number in range(1, size)])[:size]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [("w", "0")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return str(tokenizer.to_str())
