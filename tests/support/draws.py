"""How many examples property tests draw: all in the long run, and a quarter of them where long tests are left out.

They are the same ones each time.
"""

from __future__ import annotations

SHARE = 1
"""One in so many; `tests/conftest.py` sets it before tests are imported."""


def draws(count: int) -> int:
    """As many of `count` examples as this run draws."""
    return max(count // SHARE, 1)
