"""Writes `golden/families.json`: digests of tiny checkpoints and of the layer files that are made of them.

    python -m tests.frozen.make_families

It was run once, by the code before the refactoring. No test runs it: what it writes is what later code is held to.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.frozen.support.families import FAMILIES, build, weights_digest
from tests.frozen.test_families import GOLDEN, compressions, layer_digests, load, split_folder


def main() -> None:
    golden = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as made:
            folder = build(Path(made) / "model", family)
            golden[family] = {"weights": weights_digest(folder)}
            for compression in compressions(family):
                load(folder, compression)
                golden[family][compression] = layer_digests(split_folder(folder, compression))
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
