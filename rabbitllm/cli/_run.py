"""`rabbitllm run`: one prompt, and its answer as it is generated."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rabbitllm.cli import exit_codes
from rabbitllm.cli._start import import_torch
from rabbitllm.cli.arguments import (
    NO_ANSWER_OPTIONS,
    NO_OPTIONS,
    AddressOption,
    AnswerOptions,
    DraftOption,
    JsonOption,
    ModelArgument,
    ModelOptions,
    StatsOption,
    SystemOption,
    WorkersOption,
    command_draft,
    put_json,
    with_model_options,
)
from rabbitllm.cli.help import answer_option


@with_model_options()
def run_command(
    model: ModelArgument,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Prompt; words are joined; text from a pipe is put before it.")
    ] = None,
    system: SystemOption = None,
    max_new_tokens: Annotated[
        int | None, answer_option(help="Maximum tokens to generate; by default 512, within the context.", min=1)
    ] = None,
    answers: AnswerOptions = NO_ANSWER_OPTIONS,
    raw: Annotated[bool, answer_option("--raw", help="Continue the prompt without the chat template.")] = False,
    image: Annotated[
        list[Path] | None, answer_option(metavar="FILE", help="Picture that comes before the prompt; repeatable.")
    ] = None,
    audio: Annotated[
        list[Path] | None, answer_option(metavar="FILE", help="WAV file that comes before the prompt; repeatable.")
    ] = None,
    schema: Annotated[
        Path | None, answer_option(metavar="FILE", help="JSON schema; the answer is JSON that it describes.")
    ] = None,
    draft: DraftOption = "auto",
    options: ModelOptions = NO_OPTIONS,
    workers: WorkersOption = 0,
    address: AddressOption = None,
    verbose: StatsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt; tokens are printed as they are generated.

    A model without a split is split first, as pull does. The prompt goes through the model's chat template, if there
    is one. Tokens are sampled as the model's generation_config recommends, else chosen greedily. Ctrl-C stops the
    answer (exit code 130). Under torchrun, each process computes a span of layers, and the first one answers.

    Examples:
      rabbitllm run Qwen/Qwen2.5-7B-Instruct "What is a rabbit?"
      cat report.txt | rabbitllm run my-checkpoint "Sum up" --max-new-tokens 200
    """
    from rabbitllm.run import join_prompt, piped_text

    try:
        text = join_prompt(" ".join(prompt or ()), piped_text())
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="PROMPT") from None
    import_torch()

    from rich.console import Console
    from transformers import logging

    from rabbitllm.auto_model import load_with_draft
    from rabbitllm.base.options import expand
    from rabbitllm.display.answer_printer import AnswerPrinter
    from rabbitllm.display.wait_status import waiting
    from rabbitllm.errors import OptionError
    from rabbitllm.generation.grammar import Grammar
    from rabbitllm.generation.media import media_files
    from rabbitllm.generation.request import FinishReason, ModelLimits, Request, recommended_sampling
    from rabbitllm.generation.session import answer
    from rabbitllm.generation.template import ChatTemplate
    from rabbitllm.run import (
        answer_record,
        decode_argument,
        finish_note,
        hosts_for,
        local_device,
        prompt_of,
        put_statistics,
        work,
    )

    requested = answers.sampling
    files = media_files(image or (), audio or ())  # now, not after an hour of splitting
    grammar = None if schema is None else Grammar.of_schema(expand(schema).read_text(encoding="utf-8"))
    if files and draft.lower() not in ("auto", "none"):
        raise OptionError(f"--draft {draft} cannot be used with pictures and sounds.", "Leave --draft out.")
    errors = Console(stderr=True, highlight=False)
    hosts = hosts_for(workers, address, options.for_workers(model), errors)
    request = replace(options, device=local_device(options.device, hosts)).request(model, hosts, profiling=verbose)
    if hosts is not None and not hosts.is_first:
        work(request, Console(stderr=True, quiet=True))
        return
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # output while loading is not part of the answer
        loaded, drafting = load_with_draft(request, command_draft(draft, request), errors)
    load_seconds = time.perf_counter() - start
    encoded, thoughts = prompt_of(loaded, text, decode_argument(system), files, answers.thoughts, raw=raw)
    limits = ModelLimits.of(loaded, answers.context)
    limits.check_bias(requested)
    max_tokens = limits.new_tokens(len(encoded.ids), max_new_tokens)
    recommended = recommended_sampling(loaded)
    sampling = requested.over(recommended)
    if grammar is not None:
        grammar = grammar.after(thoughts, loaded.tokenizer)
    generation = Request(
        encoded.ids, max_tokens, sampling, answers.stops, media=encoded.media, thoughts=thoughts, grammar=grammar
    )
    logging.set_verbosity_error()  # no warnings about missing kernels amid an answer
    printer = AnswerPrinter(errors)
    with waiting(errors, "reading the prompt …") as status:
        stop = status.spinner.stop
        result = (
            answer(loaded, generation, lambda text: None, stop, drafting)
            if as_json
            else answer(loaded, generation, printer.write, stop, drafting, printer.think)
        )
    printer.end()
    if as_json:
        device, dtype = str(loaded.device), str(loaded.dtype).removeprefix("torch.")
        where = {"compression": request.spec.compression, "folder": loaded.name_or_path}
        put_json(answer_record(model, result, load_seconds, {"device": device, "dtype": dtype, **where}))
    template = ChatTemplate(loaded)
    ended = finish_note(result, max_tokens, limits, raw=raw and template.is_there, less_thinking=template.less_thinking)
    if ended is not None and not as_json:
        errors.print(ended)
    if verbose:
        put_statistics(errors, result, load_seconds, loaded.profiler.sums, sampling.words(recommended))
    if result.finish is FinishReason.CANCELLED:
        raise typer.Exit(exit_codes.INTERRUPTED)
