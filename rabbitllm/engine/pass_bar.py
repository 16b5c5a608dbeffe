"""A bar over the layers of a slow pass, on stderr; a fast pass shows nothing. Knows nothing but modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from tqdm.auto import tqdm

SLOW_SECONDS = 2.0
"""A pass that is over sooner needs no bar."""


class PassBar:
    """Counts the units of a pass as they finish.

    Args:
        model: its forward is the pass.
        modules: its units.
    """

    def __init__(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        self._total = len(modules)
        self._bar: Any = None
        self._passes = 0
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)
        for module in modules:
            module.register_forward_hook(self._step, always_call=True)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._passes += 1
        self._bar = tqdm(total=self._total, desc=f"pass {self._passes}", unit="layer", leave=False, delay=SLOW_SECONDS)

    def _step(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._bar is not None:
            self._bar.update()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
