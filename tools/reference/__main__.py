"""Write the pages of docs/reference that are made from the code.

python -m tools.reference          write them
python -m tools.reference --check  exit with 1 if a page differs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from tools.reference import api, cli, errors

MADE = "\n---\n\nThis page is made from {} by `python -m tools.reference`. Do not edit it.\n"
FOLDER = Path(__file__).parents[2] / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "cli.md": lambda: cli.page() + MADE.format("the commands"),
    "api.md": lambda: api.page() + MADE.format("the docstrings"),
    "errors.md": lambda: errors.page() + MADE.format("`rabbitllm/errors.py`"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    parser.add_argument("--into", type=Path, default=FOLDER, help="folder of the pages (docs/reference)")
    options = parser.parse_args()
    differing = []
    for name, page in PAGES.items():
        path, text = options.into / name, page()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        differing.append(name)
        if not options.check:
            path.write_text(text, encoding="utf-8")
    print(("differs" if options.check else "written") + ": " + (", ".join(differing) or "nothing"))
    return 1 if options.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
