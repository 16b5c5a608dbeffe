"""numba compares the options of compilations faster, which it does ten thousand times for a kernel."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def _defaults(options: type) -> dict[str, Any]:
    return {name: option.default for name, option in options.options.items()}  # type: ignore[attr-defined]


def compare_quickly(module: Any) -> None:
    """Have the values of options by one update of the defaults, not by a property each."""

    def values(self: Any) -> dict[str, Any]:
        return {**_defaults(type(self)), **self._values}

    module.TargetConfig.values = values
