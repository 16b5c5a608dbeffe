"""Whether the hub can be reached: one request of a few seconds at most; a token is detected and never shown."""

from __future__ import annotations

import time
from urllib.parse import urlsplit, urlunsplit

from rabbitllm.estimate.doctor.records import Hub

SECONDS = 3.0


def hub(seconds: float = SECONDS) -> Hub:
    """Send a request to the hub, unless that is forbidden; any answer means that it is reachable."""
    from huggingface_hub import constants, get_token

    endpoint, token = _harmless(constants.ENDPOINT), get_token() is not None
    if constants.is_offline_mode() if hasattr(constants, "is_offline_mode") else constants.HF_HUB_OFFLINE:
        return Hub(endpoint, True, None, None, token)
    from huggingface_hub.utils import get_session

    start = time.perf_counter()
    try:
        get_session().head(constants.ENDPOINT, timeout=seconds)
    except Exception as error:  # depends on huggingface_hub's HTTP library, and on proxies
        return Hub(endpoint, False, False, None, token, f"{type(error).__name__}: {error}".split("\n")[0])
    return Hub(endpoint, False, True, time.perf_counter() - start, token)


def _harmless(address: str) -> str:
    """Return an address without a possible password."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
