"""Writes golden data, by the code of the day: `python -m tests.frozen.make test_public_names ...`.

Each module of tests that has golden data has a function `make`, which is given an empty folder to work in. No test
calls it: golden data are written once, and again only where a change is meant and
docs/guides/from-rabbitllm-1.1.md says so.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from pathlib import Path

import torch

from tests.frozen.support import golden


def main(arguments: list[str]) -> None:
    """Write the golden data of these modules; without names, of all that have any."""
    parser = argparse.ArgumentParser(prog="python -m tests.frozen.make")
    parser.add_argument("names", nargs="*", metavar="MODULE")
    parser.add_argument("--into", type=Path, default=golden.FOLDER, help="a folder to write them to")
    asked = parser.parse_args(arguments)
    golden.FOLDER = asked.into
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    found = asked.names or [path.stem for path in sorted(Path(__file__).parent.glob("test_*.py"))]
    for name in found:
        module = importlib.import_module(f"tests.frozen.{name}")
        if hasattr(module, "make"):
            with tempfile.TemporaryDirectory(prefix="frozen-") as folder:
                module.make(Path(folder))
            print(f"{name}: written")


if __name__ == "__main__":
    main(sys.argv[1:])
