"""A server from its address to its end: what is said at the start, what is given back."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import shlex
import socket
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console

from rabbitllm.errors import OptionError
from rabbitllm.server import server
from rabbitllm.server._guards import name_of
from rabbitllm.server.server import put_greeting
from rabbitllm.server.settings import bound, check_guarded, hosts_of, is_local
from tests.server.serving import Running


def said(served: Running, split: tuple[bool, Path] | None, *, is_local: bool = True) -> str:
    output = io.StringIO()
    service = copy.copy(served.service)
    service.split = split
    put_greeting(Console(file=output), service, served.address, is_local=is_local)
    return output.getvalue()


def test_greeting_has_address_split_and_a_curl_command(served: Running, split_folder: Path) -> None:
    lines = said(served, (True, split_folder)).splitlines()
    assert lines[0] == f"tiny at {served.address}"
    assert lines[1].split() == ["split", "existed,", "in", str(split_folder)]
    assert "read for each pass" in lines[2]
    command = shlex.split(lines[-1].removeprefix("try").strip())
    assert command[0] == "curl"
    answer = served.post(command[1].removeprefix(served.address), json.loads(command[-1]))
    assert answer.status_code == 200, answer.text


def test_greeting_warns_of_a_public_address_without_a_key(served: Running) -> None:
    assert "Every machine that reaches this address" not in said(served, None)
    assert "Every machine that reaches this address" in said(served, None, is_local=False)
    guarded = replace(served.service.settings, api_key="k")
    before, served.service.settings = served.service.settings, guarded
    try:
        output = said(served, None, is_local=False)
    finally:
        served.service.settings = before
    assert "Every machine that reaches this address" not in output
    assert "$RABBITLLM_API_KEY" in output


def test_bound_addresses_and_host_names() -> None:
    with bound("127.0.0.1", 0) as local, bound("0.0.0.0", 0) as everywhere:
        assert is_local(local)
        assert not is_local(everywhere)
        assert set(hosts_of(local, "localhost") or ()) == {"localhost", "127.0.0.1", "::1"}
        named = hosts_of(everywhere, "0.0.0.0", ["LLM.example"]) or ()
        assert {"localhost", "llm.example", socket.gethostname().lower()} <= set(named)
        assert hosts_of(everywhere, "0.0.0.0", ["*"]) is None
        local.listen()
        with pytest.raises(OptionError, match="Nothing can listen"):
            bound("127.0.0.1", local.getsockname()[1])
    with pytest.raises(OptionError, match="no address"):
        bound("nowhere.invalid", 0)


def test_public_address_needs_a_key_or_insecure() -> None:
    with bound("127.0.0.1", 0) as local, bound("0.0.0.0", 0) as everywhere:
        check_guarded(local, None, insecure=False)
        check_guarded(everywhere, "key", insecure=False)
        check_guarded(everywhere, None, insecure=True)
        for key in (None, ""):
            with pytest.raises(OptionError, match=r"Other machines reach the server at 0\.0\.0\.0, port"):
                check_guarded(everywhere, key, insecure=False)


@pytest.mark.parametrize(
    ("host", "name"),
    [("localhost:8000", "localhost"), ("[::1]:80", "::1"), ("LOCALHOST", "localhost"), ("[::1", ""), ("a@b", "b")],
)
def test_names_of_hosts(host: str, name: str) -> None:
    assert name_of(host) == name


BLOCK, COUNT = 16 << 10, 12_000

needs_glibc = pytest.mark.skipif(server.trimming() is None, reason="no glibc here")


@needs_glibc
def test_trimming_returns_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TRIM_SECONDS", 0.01)
    process = psutil.Process()
    blocks = [torch.ones(BLOCK, dtype=torch.uint8) for _ in range(COUNT)]
    stays = blocks[::2]
    del blocks
    before = process.memory_info().rss

    async def for_a_moment() -> None:
        trimmer = asyncio.ensure_future(server.trim_periodically())
        for _ in range(200):
            await asyncio.sleep(0.02)
            if process.memory_info().rss < before - BLOCK * COUNT // 4:
                break
        trimmer.cancel()

    asyncio.run(for_a_moment())
    assert process.memory_info().rss < before - BLOCK * COUNT // 4
    assert all(bool(block.all()) for block in stays)


@needs_glibc
def test_without_glibc_trimming_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "trimming", lambda: None)
    asyncio.run(asyncio.wait_for(server.trim_periodically(), 1))
