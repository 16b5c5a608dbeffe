"""Whether the hub can be reached: one request of a few seconds at most; a token is looked for and never shown."""

from __future__ import annotations

import time
from urllib.parse import urlsplit, urlunsplit

from rabbitllm.estimate.doctor.records import Hub

SECONDS = 3.0


def hub(seconds: float = SECONDS) -> Hub:
    """Ask it, unless that is forbidden; whatever it answers, it is there."""
    from huggingface_hub import constants, get_token

    endpoint, token = _harmless(constants.ENDPOINT), get_token() is not None
    if constants.is_offline_mode() if hasattr(constants, "is_offline_mode") else constants.HF_HUB_OFFLINE:
        return Hub(endpoint, True, None, None, token)
    from huggingface_hub.utils import get_session

    start = time.perf_counter()
    try:
        get_session().head(constants.ENDPOINT, timeout=seconds)
    except Exception as error:  # of whichever HTTP library it uses, and of proxies
        return Hub(endpoint, False, False, None, token, f"{type(error).__name__}: {error}".split("\n")[0])
    return Hub(endpoint, False, True, time.perf_counter() - start, token)


def _harmless(address: str) -> str:
    """An address without what may be a password."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
