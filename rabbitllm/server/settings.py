"""Settings of a server, and checks before the model is loaded: its packages, its address, and who reaches it."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rabbitllm.errors import OptionError
from rabbitllm.generation.reasoning import Thinking
from rabbitllm.generation.request import Sampling


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits and defaults of requests, and who may send them.

    Attributes:
        name: the model's name in answers; requests that name another one are refused.
        api_key: the key that requests must carry, or several, separated by commas; None for none.
        origins: origins of other hosts that may send requests; "*" for all.
        hosts: names in lower case by which the server may be called, in addition to addresses; None for any.
        body_bytes: limit of a request's body.
        body_seconds: time limit for receiving a body.
        seconds: time limit from a request's submission to its end; None for no limit.
        max_new_tokens: default limit of new tokens.
        completion_new_tokens: likewise in `/v1/completions`, where OpenAI has its own default.
        sampling: how tokens are chosen if a request does not say; where this says nothing, as the model recommends.
        context: limit of the tokens of a prompt and its answer; None for the model's.
        thinking: whether the model thinks in chats, and how much, unless the request says so.
        of_the_model: options by which the model chooses tokens in every request; see `request.options_of`.
        heartbeat_seconds: an idle stream sends a comment or an event after this time.
        stall_seconds: a client that reads nothing for this time is disconnected.
        media_folder: folder whose pictures and sounds requests may name by `file:` URLs; None for none.
    """

    name: str
    api_key: str | None = None
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    body_bytes: int = 5_000_000
    body_seconds: float = 30.0
    seconds: float | None = None
    max_new_tokens: int = 4096
    completion_new_tokens: int = 16
    sampling: Sampling = Sampling()  # noqa: RUF009  immutable
    context: int | None = None
    thinking: Thinking = Thinking()  # noqa: RUF009  immutable
    of_the_model: Mapping[str, float] = field(default_factory=dict)
    heartbeat_seconds: float = 15.0
    stall_seconds: float = 60.0
    media_folder: Path | None = None


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
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, type_, protocol, _, address = next((info for info in infos if info[0] == socket.AF_INET), infos[0])
        listener = socket.socket(family, type_, protocol)
    except OSError as error:
        raise OptionError(
            f"There is no address {host} here ({error.strerror}).", "Set --host to an address of this machine."
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _unavailable(host, port, error) from None
    return listener


def listen(listener: socket.socket, backlog: int) -> None:
    """Start listening.

    Raises:
        OptionError: another program bound to the same address listens already.
    """
    try:
        listener.listen(backlog)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _unavailable(host, port, error) from None


def _unavailable(host: str, port: int, error: OSError) -> OptionError:
    return OptionError(
        f"Nothing can listen at {host}, port {port} ({error.strerror}).",
        "Another program may use the port: stop it, or use another --port.",
    )


def address_of(listener: socket.socket) -> str:
    """The URL that reaches a socket from this machine: `http://127.0.0.1:8000`."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{shown}]' if ':' in shown else shown}:{port}"


def is_local(listener: socket.socket) -> bool:
    """Whether the socket is reachable from this machine only."""
    return str(listener.getsockname()[0]) in LOCAL or str(listener.getsockname()[0]).startswith("127.")


def hosts_of(listener: socket.socket, host: str, allowed: Sequence[str] = ()) -> tuple[str, ...] | None:
    """Names by which requests may call a server, in addition to every address; None for any name.

    Args:
        listener: the bound socket.
        host: as the user wrote it.
        allowed: further names; "*" allows all.
    """
    if "*" in allowed:
        return None
    node = socket.gethostname()
    names = (*LOCAL, host, *allowed, *(() if is_local(listener) else (node, node.partition(".")[0], f"{node}.local")))
    return tuple({name.lower() for name in names})


def check_guarded(listener: socket.socket, api_key: str | None, *, insecure: bool) -> None:
    """Refuse to listen where other machines reach the server, unless there is a key or the user accepts that.

    Raises:
        OptionError: neither is the case.
    """
    if is_local(listener) or api_key or insecure:
        return
    host, port = listener.getsockname()[:2]
    raise OptionError(
        f"Other machines reach the server at {host}, port {port}, and no API key is set.",
        "Set an API key (RABBITLLM_API_KEY in the environment, or --api-key KEY). Or pass --insecure: every machine "
        "that reaches this address can use the model. --host 127.0.0.1 serves this machine only.",
    )
