"""Fuzz the readers: `python -m fuzz --seconds 600`, every target or those that are named.

Prints for each how many inputs were tried, how many of them were believed, crashes and hangs. Exits with 1 if there was
any crash or hang; the inputs are then under build/fuzz.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGETS = ("gguf", "safetensors", "torch_zip", "torch_legacy", "pickle", "sentencepiece")
GRACE_SECONDS = 120
"""For starting and for the longest input."""


def fuzz(name: str, seconds: float, folder: Path) -> dict[str, int]:
    """Run one target; its figures, with a process that died or did not end counted as a crash or a hang."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tally.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "fuzz.one", name, str(seconds), str(folder)]
    with (folder / "log.txt").open("wb") as log:
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=log, timeout=seconds + GRACE_SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    path = folder / "tally.json"
    tally: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    figures = {key: tally.get(key, 0) for key in ("inputs", "believed", "refused", "crashes", "hangs")}
    if code is None:
        figures["hangs"] += 1
    elif code or not figures["inputs"]:
        figures["crashes"] += 1
        print(f"{name}: the process ended with {code}; see {folder / 'log.txt'}")
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the readers of files that come from strangers.")
    parser.add_argument("targets", nargs="*", metavar="target", help=f"any of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--seconds", type=float, default=60, help="for each target (60)")
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time (1)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "fuzz", help="for corpora and findings")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(TARGETS):
        parser.error(f"there is no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    names = given.targets or TARGETS
    with ThreadPoolExecutor(given.jobs) as pool:
        runs = {name: pool.submit(fuzz, name, given.seconds, given.folder.resolve() / name) for name in names}
        found = 0
        for name, run in runs.items():
            figures = run.result()
            found += figures["crashes"] + figures["hangs"]
            print(f"{name}:", ", ".join(f"{value:,} {key}" for key, value in figures.items()), flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
