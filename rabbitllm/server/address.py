"""The listening address of a server, checked before anything slow: whether it is free, and which machines reach it."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from rabbitllm.errors import OptionError

LOCAL = ("localhost", "127.0.0.1", "::1")


def bound(host: str, port: int) -> socket.socket:
    """A socket bound to an address, not listening yet.

    Args:
        host: a name or an address.
        port: 0 for any free port.

    Raises:
        OptionError: the address is not available.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = next((one for one in found if one[0] == socket.AF_INET), found[0])
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OptionError(
            f"There is no address {host} here ({error.strerror}).", "Give --host an address of this machine."
        ) from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        raise _taken(host, port, error) from None
    return made


def listen(made: socket.socket, backlog: int) -> None:
    """Start listening.

    Raises:
        OptionError: another program bound to the same address listens already.
    """
    try:
        made.listen(backlog)
    except OSError as error:
        host, port = made.getsockname()[:2]
        raise _taken(host, port, error) from None


def _taken(host: str, port: int, error: OSError) -> OptionError:
    return OptionError(
        f"Nothing can listen at {host}, port {port} ({error.strerror}).",
        "Something else may listen there: stop it, or give another --port.",
    )


def address_of(made: socket.socket) -> str:
    """The URL that reaches a socket from this machine: `http://127.0.0.1:8000`."""
    host, port = made.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"


def is_local(made: socket.socket) -> bool:
    """Whether the socket is reachable from this machine only."""
    return str(made.getsockname()[0]) in LOCAL or str(made.getsockname()[0]).startswith("127.")


def hosts_of(made: socket.socket, host: str, allowed: Sequence[str] = ()) -> tuple[str, ...] | None:
    """Names by which requests may call a server, in addition to every address; None for any name.

    Args:
        made: the bound socket.
        host: as the user wrote it.
        allowed: further names; "*" allows all.
    """
    if "*" in allowed:
        return None
    own = socket.gethostname()
    names = (*LOCAL, host, *allowed, *(() if is_local(made) else (own, own.partition(".")[0], f"{own}.local")))
    return tuple({name.lower() for name in names})


def check_guarded(made: socket.socket, api_key: str | None, *, insecure: bool) -> None:
    """Refuse to listen where other machines reach the server, unless there is a key or the user accepts that.

    Raises:
        OptionError: neither is the case.
    """
    if is_local(made) or api_key or insecure:
        return
    host, port = made.getsockname()[:2]
    raise OptionError(
        f"Other machines reach the server at {host}, port {port}, and it has no API key.",
        "Give --api-key KEY, better as RABBITLLM_API_KEY in the environment; or --insecure, and everyone who reaches "
        "this machine can use the model. --host 127.0.0.1 is for this machine only.",
    )
