"""`rabbitllm.batch`: any number of prompts through one model, from a program or a notebook."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rabbitllm.base.options import arguments_checked, expand, is_named, parse_size
from rabbitllm.batch_jobs.inputs import STDIN
from rabbitllm.batch_jobs.items import Defaults, JobLimits, pooling_of
from rabbitllm.errors import system_errors_by_name
from rabbitllm.generation.reasoning import Effort, Thinking
from rabbitllm.generation.request import Pooling, Sampling, check_counts
from rabbitllm.storage.durable import ScratchFolder

if TYPE_CHECKING:
    from rabbitllm.batch_jobs.display import Progress
    from rabbitllm.engine.streamed_model import StreamedModel


@arguments_checked()
@system_errors_by_name()
def batch(
    model: StreamedModel | str | os.PathLike[str],
    inputs: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    out: str | os.PathLike[str] | None = None,
    *,
    max_new_tokens: int = 512,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    pooling: Pooling = "last",
    normalise: bool = False,
    thinking: bool | None = None,
    effort: Effort | None = None,
    columns: Mapping[str, str] | None = None,
    sequences: int = 256,
    cache_memory: int | str | None = None,
    cache_disk: int | str | None = None,
    exact: bool = False,
    overwrite: bool = False,
    compression: str | None = None,
    device: str | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> list[dict[str, Any]] | Progress:
    """Answer any number of lines in few passes over the weights: text, scores, choices, embeddings.

    Args:
        model: a loaded model; or a repository or folder, which is then loaded so that memory has room for as many lines
            at a time as possible.
        inputs: path of a file of JSON lines or of Parquet, or any iterable of records: a list, a `datasets.Dataset`.
        out: file for the answers, which a call after a kill resumes; None to return them as a list.
        max_new_tokens: maximum tokens of an answer, unless the record says otherwise.
        temperature: sampling temperature, unless the record says otherwise; None or 0 is greedy.
        top_p: nucleus sampling threshold, unless the record says otherwise; above 0 and up to 1.
        top_k: number of the most likely tokens to choose from, unless the record says otherwise; 0 for all.
        min_p: least probability of a token, relative to the most likely one, unless the record says otherwise.
        repetition_penalty: divides the scores of tokens that occurred, unless the record says otherwise; 1 for none.
        seed: random seed, unless the record says otherwise; each line combines it with its index.
        stop: text or texts at which an answer ends, unless the record says otherwise.
        pooling: "last" (hidden state of the last token) or "mean", for embeddings.
        normalise: scale embeddings to length 1.
        thinking: whether a model that can think before it answers `messages` does; None leaves it to the model.
        effort: how much it thinks.
        columns: expected name -> name in the records, such as `{"prompt": "question"}`.
        sequences: maximum sequences in one pass.
        cache_memory: maximum bytes of the KV cache; the default is what the lines need, up to half of the free memory.
        cache_disk: maximum bytes of swapped-out KV caches in a temporary file; 0 for none; the default is a quarter of
            the free disk.
        exact: compute each line separately: bits as if it ran alone; slower.
        overwrite: replace an existing output.
        compression: as in `AutoModel.from_pretrained`; the default is that of a split on this machine. This and the
            arguments that follow are for a model that is not loaded yet.
        device: as in `AutoModel.from_pretrained`.
        max_memory: as in `AutoModel.from_pretrained`.
        dtype: as in `AutoModel.from_pretrained`.
        revision: as in `AutoModel.from_pretrained`.
        trust_remote_code: as in `AutoModel.from_pretrained`.

    Returns:
        One dict for each line, in the order of the input; with `out`, the final progress.

    Raises:
        InputError: the input cannot be read, or contains an id twice.
        ResultsError: the output exists already, belongs to another input, or cannot be written.
        MissingPackageError: a Parquet file, and pyarrow (`pip install ".[batch]"`) is missing.
        OptionError: the chat template does not read `thinking` or `effort`.
        RabbitLLMError: see `AutoModel.from_pretrained`.
    """
    from rabbitllm.batch_jobs.job import BatchJob, work

    texts = tuple(filter(None, (stop,) if isinstance(stop, str) else stop))
    cache_bytes = None if cache_memory is None else parse_size(cache_memory, "cache_memory")
    sampling = Sampling(temperature, top_p, seed, top_k, min_p, repetition_penalty)
    defaults = Defaults(max_new_tokens, sampling, texts, pooling_of(pooling), normalise, Thinking(thinking, effort))
    check_counts(defaults, "max_new_tokens")
    disk_bytes = None if cache_disk is None else parse_size(cache_disk, "cache_disk")
    limits = JobLimits(sequences, cache_bytes, exact, disk_bytes)
    to_run: StreamedModel | LoadRequest
    if is_named(model):
        from rabbitllm.auto_model import LoadRequest
        from rabbitllm.models.library import compression_to_run
        from rabbitllm.models.pull import shard_policy

        to_run = LoadRequest.of(
            str(model),
            compression_to_run(str(model), compression),
            revision=revision,
            shards=shard_policy(),
            device=device,
            dtype=dtype,
            max_memory=max_memory,
            trust_remote_code=trust_remote_code,
        )
    else:
        to_run = cast("StreamedModel", model)
    if isinstance(inputs, str | os.PathLike) and str(inputs) != STDIN:
        inputs = expand(Path(inputs))

    def run_job(path: Path) -> Progress:
        return work(BatchJob(inputs, path, to_run, defaults, limits, columns, overwrite))

    if out is not None:
        return run_job(expand(Path(out)))
    with ScratchFolder() as folder:
        path = folder / "answers.jsonl"
        run_job(path)
        with path.open("rb") as file:
            return [json.loads(line) for line in file]
