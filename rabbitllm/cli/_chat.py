"""`rabbitllm chat`: a conversation at the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from rabbitllm.cli import exit_codes
from rabbitllm.cli.arguments import (
    NO_ANSWER_OPTIONS,
    NO_OPTIONS,
    AddressOption,
    AnswerOptions,
    DraftOption,
    ModelArgument,
    ModelOptions,
    StatsOption,
    SystemOption,
    WorkersOption,
    command_draft,
    with_model_options,
)
from rabbitllm.cli.help import answer_option


@with_model_options()
def chat_command(
    model: ModelArgument,
    system: SystemOption = None,
    max_new_tokens: Annotated[
        int | None, answer_option(help="Maximum tokens per answer; by default no limit but the context.", min=1)
    ] = None,
    answers: AnswerOptions = NO_ANSWER_OPTIONS,
    draft: DraftOption = "auto",
    options: ModelOptions = NO_OPTIONS,
    workers: WorkersOption = 0,
    address: AddressOption = None,
    verbose: StatsOption = False,
) -> None:
    """Chat with a model in the terminal.

    A model without a split is split first, as pull does. Tokens are sampled as the model's generation_config
    recommends, else chosen greedily. Each answer computes only its new tokens; the KV cache of earlier ones is kept.
    /help lists the commands of a chat. Ctrl-C stops an answer, Ctrl-D exits. When stdin is a pipe, each line is a
    message, and stdout holds the answers only.

    Examples:
      rabbitllm chat Qwen/Qwen2.5-7B-Instruct --compression 4bit
      rabbitllm chat my-checkpoint --system "Answer in one sentence."
    """
    from rich.console import Console

    from rabbitllm.auto_model import load_with_draft
    from rabbitllm.generation.request import recommended_sampling
    from rabbitllm.run import decode_argument, hosts_for

    requested = answers.sampling
    errors = Console(stderr=True, highlight=False)
    request = options.request(model, hosts_for(workers, address, options.for_workers(model), errors))
    with contextlib.redirect_stdout(sys.stderr):  # output while loading is not part of the answer
        loaded, drafting = load_with_draft(request, command_draft(draft, request), errors)
    loaded.profiler.enabled = True  # only now: no profile of a split, no timers at resident layers

    from transformers import logging

    from rabbitllm.chat.conversation import Conversation
    from rabbitllm.chat.loop import ChatLoop, standard_streams
    from rabbitllm.generation.session import Session

    logging.set_verbosity_error()  # no warnings about missing kernels amid an answer
    recommended = recommended_sampling(loaded)
    sampling = requested.over(recommended)
    chat = ChatLoop(
        Session(loaded, max_new_tokens, sampling, drafting, answers.stops, answers.context, answers.thoughts),
        standard_streams(),
        model,
        Conversation().with_system(decode_argument(system)),
        sampling.words(recommended),
        with_stats=verbose,
    )
    if not chat.run(dict(loaded.profiler.in_place)):
        raise typer.Exit(exit_codes.ERROR)
