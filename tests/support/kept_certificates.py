"""The certificates that clients of HTTP trust are read once in a process, as long as the environment is the same."""

from __future__ import annotations

import os
from functools import cache
from typing import Any


def read_certificates_once(config: Any) -> None:
    """Have a module of httpx make each of its contexts for TLS once."""
    make = config.create_ssl_context

    @cache
    def context(environment: tuple[str | None, ...], *arguments: Any, **named: Any) -> Any:
        return make(*arguments, **named)

    def kept(*arguments: Any, **named: Any) -> Any:
        return context((os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")), *arguments, **named)

    config.create_ssl_context = kept
