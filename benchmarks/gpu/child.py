"""One step in a process of its own; each row is written to a file at once, and so is an error.

python -m benchmarks.gpu.child JOB
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.errors import MissingPackageError

ERROR = "error of the step"
"""The only key of the line with the error of a step."""


@dataclass(frozen=True)
class Place:
    """The place of a step: the folder of its files, and whether it runs on the device of the tests at tiny sizes."""

    work: Path
    is_rehearsal: bool


def main(job: dict[str, Any]) -> int:
    """Run the step; 1 if it failed."""
    with open(job["rows"], "w", encoding="utf-8") as rows:

        def write(row: dict[str, Any]) -> None:
            rows.write(json.dumps(row) + "\n")
            rows.flush()

        try:
            module, _, name = job["function"].partition(":")
            for row in getattr(importlib.import_module(module), name)(Place(Path(job["work"]), job["is_rehearsal"])):
                write(row)
        except ModuleNotFoundError as error:
            write({ERROR: f"This step needs the package {error.name}, which is not installed."})
        except MissingPackageError as error:
            write({ERROR: str(error)})
        except Exception:
            write({ERROR: traceback.format_exc()})
        else:
            return 0
    return 1


def _end_with_the_caller() -> None:
    os.read(0, 1)  # not sys.stdin, whose lock a thread may not hold at the end
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    sys.exit(main(json.loads(sys.argv[1])))
