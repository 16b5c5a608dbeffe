"""`rabbitllm serve`: models behind OpenAI's interface."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument

from rabbitllm.base.options import expand
from rabbitllm.cli.arguments import (
    NO_ANSWER_OPTIONS,
    NO_OPTIONS,
    AnswerOptions,
    BatchDraftOption,
    ExactOption,
    ModelOptions,
    command_draft,
    complete_model,
    with_model_options,
)
from rabbitllm.cli.help import cache_option, limits_option, network_option


@with_model_options("verify_source", "fast_bfloat16", "seed", "stop")
def serve_command(
    models: Annotated[
        list[str],
        Argument(
            metavar="MODEL",
            help="A repository, a folder, a file of weights, or a split directory. NAME=MODEL sets the name in "
            "requests. Gated repositories need HF_TOKEN.",
            autocompletion=complete_model,
        ),
    ],
    host: Annotated[
        str, network_option(metavar="HOST", help="Address to listen on; 0.0.0.0 for all addresses of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, network_option(help="Port; 0 picks a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        network_option(
            metavar="KEY",
            help="Required API key, or several with commas between them, which take turns; prefer the environment "
            "variable, which process lists do not show.",
            envvar="RABBITLLM_API_KEY",
            show_default=False,
        ),
    ] = None,
    insecure: Annotated[
        bool, network_option("--insecure", help="Allow requests from other machines without a key.")
    ] = False,
    served_name: Annotated[
        str | None, network_option(metavar="NAME", help="Model name in requests and responses.")
    ] = None,
    keep_alive: Annotated[
        float | None,
        limits_option(
            metavar="SECONDS",
            help="Time without a request after which a model is unloaded; by default 300 if there are several models, "
            "no limit for one.",
            min=0,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        network_option(
            metavar="ORIGIN", help="Allowed origin of web pages, e.g. https://example.org; * for all; repeatable."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        network_option(metavar="HOST", help="Allowed Host header, e.g. llm.example.org; * for all; repeatable."),
    ] = None,
    max_running: Annotated[int, limits_option(help="Maximum requests in one pass.", min=1)] = 64,
    max_waiting: Annotated[
        int,
        limits_option(
            "--max-waiting", "--max-queue", help="Maximum waiting requests; further ones get status 429.", min=1
        ),
    ] = 256,
    key_running: Annotated[
        int | None, limits_option(help="Maximum requests of one API key in a pass; others of it wait.", min=1)
    ] = None,
    key_waiting: Annotated[
        int | None, limits_option(help="Maximum waiting requests of one API key; further ones get status 429.", min=1)
    ] = None,
    max_new_tokens: Annotated[
        int,
        limits_option(help="Maximum tokens per answer, unless the request sets its own; within the context.", min=1),
    ] = 4096,
    cache_memory: Annotated[
        str | None,
        cache_option(
            metavar="SIZE", help="Memory for the KV cache, e.g. 4GB; by default half of what the weights leave."
        ),
    ] = None,
    aside: Annotated[
        str | None,
        cache_option(
            metavar="SIZE",
            help="Swap space for KV caches of preempted requests, e.g. 8GB; 0 recomputes them; by default four times "
            "--cache-memory.",
        ),
    ] = None,
    aside_dir: Annotated[
        Path | None, cache_option(metavar="FOLDER", help="Folder of the swap file; by default that of temporary files.")
    ] = None,
    prompt_cache: Annotated[
        str | None,
        cache_option(
            metavar="SIZE",
            help="Keep the KV cache of prompts on disk, e.g. 10GB, in the folder prompts of RABBITLLM_HOME: "
            "it survives restarts; by default none.",
        ),
    ] = None,
    chunk: Annotated[
        int, limits_option(help="Maximum prompt tokens of a request in one pass (chunked prefill).", min=1)
    ] = 512,
    exact: ExactOption = False,
    draft: BatchDraftOption = "auto",
    timeout: Annotated[
        float | None,
        limits_option(metavar="SECONDS", help="Maximum time of a request; by default no limit.", min=0.001),
    ] = None,
    grace: Annotated[
        float, limits_option(metavar="SECONDS", help="Time that running requests get to finish at shutdown.", min=0)
    ] = 30.0,
    max_body: Annotated[str, limits_option(metavar="SIZE", help="Maximum size of a request body.")] = "5MB",
    media_dir: Annotated[
        Path | None, network_option(metavar="FOLDER", help="Folder that file: URLs may read; by default none.")
    ] = None,
    answers: AnswerOptions = NO_ANSWER_OPTIONS,
    options: ModelOptions = NO_OPTIONS,
) -> None:
    """Serve models over an OpenAI-compatible HTTP API.

    Running requests share each pass over the weights. Several models are loaded when requests name them; those whose
    weights do not fit in memory together take turns. A model without a split is split first, as pull does. Requests
    without sampling options get those given here, else what the model's generation_config recommends, else greedy
    answers. The first Ctrl-C refuses new requests and finishes running ones within --grace seconds; the second exits
    at once (exit code 130).

    Examples:
      rabbitllm serve Qwen/Qwen2.5-7B-Instruct --compression 4bit
      rabbitllm serve rabbit=my-checkpoint Qwen/Qwen2.5-7B-Instruct
    """
    from rabbitllm.server.settings import bound, check_guarded, hosts_of

    listening = bound(host, port)  # now, not after an hour of splitting
    check_guarded(listening, api_key, insecure=insecure)

    from rich.console import Console

    from rabbitllm.base import logs
    from rabbitllm.base.options import parse_size
    from rabbitllm.errors import OptionError
    from rabbitllm.generation.request import Limits
    from rabbitllm.store import locations

    body_bytes = parse_size(max_body, "--max-body")
    if not body_bytes:
        raise OptionError(f"--max-body={max_body}; expected at least 1.", "Use a size such as 5MB.")
    cache_bytes = None if cache_memory is None else parse_size(cache_memory, "--cache-memory")
    aside_bytes = None if aside is None else parse_size(aside, "--aside")
    swap_folder = None if aside_dir is None else expand(str(aside_dir))
    media_folder = None if media_dir is None else expand(str(media_dir))
    if media_folder is not None and not media_folder.is_dir():
        raise OptionError(f"--media-dir: {media_folder} is not a folder.", "Use an existing folder.")
    if (key_running or key_waiting) and not api_key:
        raise OptionError("--key-running and --key-waiting need API keys.", "Set --api-key KEY,KEY.")
    prompt_bytes = 0 if prompt_cache is None else parse_size(prompt_cache, "--prompt-cache")
    named = {name or locations.served_name(model): model for name, model in map(name_and_model, models)}
    if len(named) < len(models):
        raise OptionError(f"Two models have one name ({', '.join(named)}).", "Name them: NAME=MODEL.")
    if served_name is not None:
        named = {served_name: next(iter(named.values()))}
    _refuse_for_several(models, {"--served-name": served_name, "--dir": options.folder, "--revision": options.revision})
    limits = Limits(
        *(max_running, max_waiting, cache_bytes, chunk, exact, aside_bytes, swap_folder),
        prompt_bytes=prompt_bytes,
        running_of_key=key_running,
        waiting_of_key=key_waiting,
    )
    sampling = answers.sampling
    requests = {name: options.request(model) for name, model in named.items()}
    proposing = command_draft(draft, next(iter(requests.values())))
    _refuse_for_several(models, {f"--draft {draft}": None if isinstance(proposing, str) else proposing})
    logs.show("rabbitllm.server")
    console = Console(stderr=True, highlight=False)

    from rabbitllm.server.server import serve_models
    from rabbitllm.server.settings import Settings

    settings = Settings(
        name=next(iter(named)),
        api_key=api_key or None,
        origins=tuple(allow_origin or ()),
        hosts=hosts_of(listening, host, allow_host or ()),
        body_bytes=body_bytes,
        seconds=timeout,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        context=answers.context,
        media_folder=media_folder,
        thinking=answers.thoughts,
    )
    code = serve_models(requests, proposing, limits, settings, listening, console, grace, keep_alive)
    if code is not None:
        sys.stderr.flush()
        os._exit(code)


def name_and_model(word: str) -> tuple[str, str]:
    """`NAME=MODEL` or `MODEL` -> the name in requests, "" for the model's own, and the model."""
    name, equals, model = word.partition("=")
    return (name, model) if equals and name and model and "/" not in name and not expand(word).exists() else ("", word)


def _refuse_for_several(models: Sequence[str], values: Mapping[str, Any]) -> None:
    """Refuse options that are of one model.

    Raises:
        OptionError: there are several models, and one of these options has a value.
    """
    from rabbitllm.errors import OptionError

    if len(models) > 1 and (wrong := [name for name, value in values.items() if value is not None]):
        raise OptionError(
            f"{wrong[0]} is for one model, and {len(models)} are to be served.",
            "Leave it out: names are set by NAME=MODEL, drafts of several models are mtp, ngram, self, auto or none.",
        )
