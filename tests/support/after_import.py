"""Settings of a library that are made when it is imported, so that tests that do not use it need not import it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
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


def leave_bitsandbytes_as_it_is(torch: Any) -> None:
    """Have torch return functions of bitsandbytes that it is to compile, with the same bits; others it compiles.

    Compiling one takes seconds for each odd shape; and the first mention of it has torch import its compiler, in a
    second and a half of each process that imports bitsandbytes.
    """
    compile_another = torch.compile

    def compiled(model: Any = None, **options: Any) -> Any:
        if getattr(model, "__module__", "").startswith("bitsandbytes."):
            return model
        return compile_another(model, **options)

    torch.compile = compiled


def read_certificates_once(config: Any) -> None:
    """Have a module of httpx make each of its contexts for TLS once, as long as the environment is the same."""
    make = config.create_ssl_context

    @cache
    def context(environment: tuple[str | None, ...], *arguments: Any, **named: Any) -> Any:
        return make(*arguments, **named)

    def kept(*arguments: Any, **named: Any) -> Any:
        return context((os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")), *arguments, **named)

    config.create_ssl_context = kept


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
