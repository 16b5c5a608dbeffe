"""`rabbitllm serve`: a model behind OpenAI's interface."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rabbitllm.base.options import expand
from rabbitllm.cli import exit_codes
from rabbitllm.cli.arguments import (
    NO_OPTIONS,
    ExactOption,
    ModelArgument,
    ModelOptions,
    with_model_options,
)


@with_model_options("verify_source", "fast_bfloat16")
def serve_command(
    model: ModelArgument,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 for every address of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that requests must send; better in the environment, where no process list shows it.",
            envvar="RABBITLLM_API_KEY",
            show_default=False,
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other machines use the model without a key.", show_default=False)
    ] = False,
    served_name: Annotated[str | None, typer.Option(help="Name of the model in requests.")] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin of web pages that may send requests, as https://example.org; may be repeated; * for all."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name that requests may use, as llm.example.org; may be repeated; * for all."),
    ] = None,
    max_running: Annotated[int, typer.Option(help="Most requests in one pass.", min=1)] = 64,
    max_waiting: Annotated[
        int, typer.Option(help="Most waiting requests; further ones are refused (429).", min=1)
    ] = 256,
    max_new_tokens: Annotated[
        int,
        typer.Option(help="Most tokens of an answer whose request does not say; or what the context leaves.", min=1),
    ] = 4096,
    cache_memory: Annotated[
        str | None,
        typer.Option(help="Memory for the KV cache, as 4GiB; by default half of what the weights leave."),
    ] = None,
    aside: Annotated[
        str | None,
        typer.Option(help="RAM or disk for swapped-out KV caches, as 8GiB; with 0 they are computed again."),
    ] = None,
    aside_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the file of swapped-out KV caches; by default that of temporary files.", show_default=False
        ),
    ] = None,
    chunk: Annotated[int, typer.Option(help="Most tokens of a prompt in one pass.", min=1)] = 512,
    exact: ExactOption = False,
    timeout: Annotated[
        float | None, typer.Option(help="Most seconds for a request; by default no limit.", min=0.001)
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds for running requests to finish at the end.", min=0)] = 30.0,
    max_body: Annotated[str, typer.Option(help="Most bytes of a request.")] = "4MiB",
    options: ModelOptions = NO_OPTIONS,
) -> None:
    """Answer requests over HTTP as OpenAI's interface has them; one pass over the weights answers all of them.

    A model that is not split yet is split first, as pull does it. Ctrl-C takes on nothing more and finishes what runs,
    for --grace seconds; once more ends at once (exit code 130).

    Example: rabbitllm serve Qwen/Qwen2.5-7B-Instruct --compression 4bit --port 8000
    """
    from rabbitllm.server.settings import check_installed

    check_installed()

    from rabbitllm.server.settings import bound, check_guarded, hosts_of

    listening = bound(host, port)  # now, not after an hour of splitting
    check_guarded(listening, api_key, insecure=insecure)

    from huggingface_hub.utils import disable_progress_bars
    from rich.console import Console

    from rabbitllm.base import logs
    from rabbitllm.base.options import parse_size

    body_bytes = parse_size(max_body, "--max-body")
    cache_bytes = None if cache_memory is None else parse_size(cache_memory, "--cache-memory")
    aside_bytes = None if aside is None else parse_size(aside, "--aside")
    aside_folder = None if aside_dir is None else expand(str(aside_dir))
    request = options.request(model)
    disable_progress_bars()  # shards have our own bar, and other files are small
    logs.show("rabbitllm.server")
    console = Console(stderr=True, highlight=False)

    from rabbitllm.generation.request import Limits
    from rabbitllm.server.server import serve_model
    from rabbitllm.server.service import served_name as name_of
    from rabbitllm.server.settings import Settings

    limits = Limits(max_running, max_waiting, cache_bytes, chunk, exact, aside_bytes, aside_folder)
    settings = Settings(
        name=served_name or name_of(model),
        api_key=api_key or None,
        origins=tuple(allow_origin or ()),
        hosts=hosts_of(listening, host, allow_host or ()),
        body_bytes=body_bytes,
        seconds=timeout,
        max_new_tokens=max_new_tokens,
    )
    if serve_model(request, limits, settings, listening, console, grace):
        sys.stderr.flush()
        os._exit(exit_codes.INTERRUPTED)
