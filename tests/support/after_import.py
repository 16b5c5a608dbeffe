"""Settings of a library that are made when it is imported, so that tests that do not use it need not import it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[Any], None]) -> None:
    """Call `action` with a module as soon as it is imported: now, or at the end of its first import."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watch(name, action))


class _Watch(MetaPathFinder, Loader):
    """Finds and loads one module by what would find and load it otherwise."""

    def __init__(self, name: str, action: Callable[[Any], None]) -> None:
        self._name, self._action = name, action
        self._loader: Loader | None = None
        self._is_looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = find_spec(fullname)
        finally:
            self._is_looking = False
        if spec is not None:  # whether it is loaded is another matter: some only ask if it is there
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec) if self._loader else None

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        assert module.__spec__ is not None
        sys.meta_path.remove(self)
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action(module)
