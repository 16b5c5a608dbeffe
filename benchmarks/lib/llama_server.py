"""llama.cpp's own programs, its server above all, built from the source package of llama-cpp-python, which holds them.

That package's Python server answers one request after the other; this one puts all of them into one batch. A program is
built for this processor, without web page, TLS and tests, since those would have to be fetched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.lib.idle_process import PeerError
from benchmarks.lib.peers import LLAMA_SERVER, interpreter

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


def program(work: Path) -> Path:
    """`llama-server`, built unless an earlier run did.

    Raises:
        PeerError: it cannot be built here.
    """
    return built(work, "llama-server")


def built(work: Path, name: str) -> Path:
    """A program of llama.cpp's, in a folder of its own, built unless an earlier run did.

    Args:
        work: for environments.
        name: of the program, and of its target.

    Raises:
        PeerError: it cannot be built here.
    """
    python = interpreter(LLAMA_SERVER, work.absolute())
    folder = python.parent.parent / name
    made = folder / name
    if made.exists():
        return made
    print(f"Building {name} …", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    download = ["download", "--quiet", "--no-deps", "--no-binary", PACKAGE, f"{PACKAGE}=={VERSION}"]
    run([str(python), "-m", "pip", *download, "--dest", str(folder)])
    (package,) = folder.glob("*.tar.gz")
    with tarfile.open(package) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.glob("llama_cpp_python-*/vendor/llama.cpp")
    cmake, ninja = (str(python.with_name(tool)) for tool in ("cmake", "ninja"))
    build = folder / "build"
    chosen = ["-DGGML_NATIVE=ON", *(f"-D{option}=OFF" for option in _OFF)]
    chosen += ["-DCMAKE_BUILD_TYPE=Release", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    run([cmake, "-S", str(source), "-B", str(build), "-G", "Ninja", *chosen])
    jobs = str(max(len(os.sched_getaffinity(0)) // 2, 1))
    run([cmake, "--build", str(build), "--target", name, "--parallel", jobs])
    shutil.copy((build / "bin" / name).resolve(), made)
    for leftover in (package, build, source.parent.parent):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    return made


def run(command: list[str]) -> None:
    """Carry out what building takes.

    Raises:
        PeerError: with the last line that it said.
    """
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        lines = (made.stderr or made.stdout).strip().splitlines()
        raise PeerError(f"cannot be built: {lines[-1] if lines else f'exit status {made.returncode}'}")
