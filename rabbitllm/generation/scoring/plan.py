"""Plans scoring before it starts: its memory, the layout of micro-batches, and the passes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rabbitllm.engine.free_memory import available_ram
from rabbitllm.errors import OptionError
from rabbitllm.generation.memory import cost_of_a_pass
from rabbitllm.generation.packed_batch import PACKABLE, can_be_packed, depends_on_longest, grouped
from rabbitllm.generation.scoring.forward import LOGITS_BYTES
from rabbitllm.generation.scoring.micro_batches import MicroBatch, TextLayout, chains, linked, micro_batches
from rabbitllm.generation.scoring.tasks import Room, Task
from rabbitllm.storage.durable import NamelessFile

if TYPE_CHECKING:
    from rabbitllm.engine.streamed_model import StreamedModel

# Models whose results do not change if sequences are padded at the end, as tests have shown.
#
# In such a model no token depends on later ones, by attention or by a state, and no result depends on the length of the
# longest sequence in the batch.

FILLABLE = PACKABLE | frozenset(
    {
        *("axk2", "bailing_hybrid", "bamba", "biogpt", "bloom", "codegen", "ctrl", "deepseek_v4"),
        *("diffllama", "doge", "dots3_note_text", "falcon", "falcon_h1", "falcon_mamba", "fuyu", "gpt_neo"),
        *("gpt_neox_japanese", "gptj", "granitemoehybrid", "hrm_text", "hy_v4", "inkling2_text", "inkling_text"),
        *("jamba", "jetmoe", "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "llama4_text", "mamba", "mamba2"),
        *("minimax", "minimax_m3_vl_text", "moshi", "mpt", "nemotron_h", "olmo_hybrid", "openai-gpt", "opt"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "xglm", "xlm"),
        *("xlstm", "zamba", "zamba2", "zaya"),
    }
)
"""Model types (transformers 5.23 and 5.24), tested in `tests/generation/scoring/test_every_family.py`."""


WAITING_SHARE, COMPUTING_SHARE = 2, 4
"""1 / `WAITING_SHARE` of free memory is for waiting micro-batches, 1 / `COMPUTING_SHARE` for the current one."""
LEAST_TOKENS, MAX_TOKENS = 512, 8192
"""Default bounds of the tokens of a micro-batch. With fewer, shared prefixes are computed several times and products
are slow. More gain little for their memory, and on a CPU even lose time if tensors become too large for the allocator's
heaps (`memory.HEAP_BLOCK_BYTES`)."""
RESIDENT_BATCHES = 8
"""Most micro-batches in a pass of a model with resident weights: a shared prefix is computed once for so many, and an
interruption loses only these."""
LOGITS_SHARE = 4
"""1 / `LOGITS_SHARE` of a micro-batch's memory is for logits, whose peak is a few times that."""
LEAST_WAITING = 16 << 20
"""Minimum of the default bytes in memory for waiting micro-batches."""


@dataclass(frozen=True, slots=True)
class ScoringLimits:
    """Memory and disk space that scoring may take.

    Attributes:
        near: bytes of waiting micro-batches on the computing device.
        host: bytes of offloaded micro-batches in host memory; 0 if the model computes there.
        disk: bytes of offloaded micro-batches in a file.
        folder: folder of the file.
        tokens: maximum tokens of a micro-batch.
        token_bytes: approximate bytes of a waiting token.
        experts_rows: maximum rows that go through streamed experts at a time.
        logits_bytes: maximum size of the float32 logits that are computed at a time.
    """

    near: int
    host: int
    disk: int
    folder: Path
    tokens: int
    token_bytes: int
    experts_rows: int
    logits_bytes: int

    @property
    def total(self) -> int:
        """Bytes for all waiting micro-batches."""
        return self.near + self.host + self.disk


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """The plan of scoring.

    Attributes:
        passes: the micro-batches of each pass over the weights.
        form: layout of the micro-batches.
        tokens: number of tokens of all tasks.
    """

    passes: tuple[tuple[MicroBatch, ...], ...]
    form: TextLayout
    tokens: int

    @property
    def computed(self) -> int:
        """Number of tokens that are computed: fewer with shared prefixes, more with padding."""
        return sum(batch.tokens for one in self.passes for batch in one)

    def __str__(self) -> str:
        batches = sum(map(len, self.passes))
        return (
            f"{self.tokens:,} tokens, of which {self.computed:,} are computed ({self.form.value}), in {batches:,} "
            f"micro-batches and {len(self.passes):,} {'pass' if len(self.passes) == 1 else 'passes'} over the weights"
        )


def check_scores(model: StreamedModel) -> None:
    """Refuse a model that cannot score.

    Raises:
        OptionError: it was not loaded by this package, or has an encoder.
    """
    if not hasattr(model, "placement") or not hasattr(model, "streamer"):
        raise OptionError(
            f"Scoring needs a model loaded by this package; found {type(model).__name__}.",
            "Load it with rabbitllm.AutoModel.from_pretrained.",
        )
    if model.config.is_encoder_decoder:
        raise OptionError(f"{type(model).__name__} has an encoder; scoring needs a decoder-only model.")


def form_of(model: StreamedModel, *, exact: bool) -> TextLayout:
    """The layout of micro-batches in which the sequences do not change each other's results."""
    if exact:
        return TextLayout.ALONE
    config = model.config.get_text_config(decoder=True)
    # in some models it is "vision", which concerns images
    looks_ahead = getattr(config, "use_bidirectional_attention", False) in (True, "all") or any(
        getattr(module, "is_causal", True) is False for module in (model.get_decoder() or model).modules()
    )
    if looks_ahead:
        return TextLayout.EQUAL
    if can_be_packed(model):
        return TextLayout.PACKED
    fills = config.model_type in FILLABLE and not depends_on_longest(config)
    return TextLayout.FILLED if fills else TextLayout.EQUAL


def limits_of(model: StreamedModel, room: Room) -> ScoringLimits:
    """The memory and disk space that scoring may take, with the weights of the model loaded.

    Raises:
        OptionError: a number in `room` is out of its range, or its folder does not exist.
    """
    for name in ("memory_bytes", "disk_bytes", "tokens"):
        value = getattr(room, name)
        if value is not None and value < (name == "tokens"):
            raise OptionError(f"{name}={value}; expected a positive number.", "Use a positive number.")
    devices = [executor.device for executor in model.streamer.executors.values()]
    on_host = all(device.shares_host_memory for device in devices)
    free = min(device.free_bytes() for device in devices)
    config, itemsize = model.config.get_text_config(decoder=True), model.dtype.itemsize
    near = max(free // WAITING_SHARE, LEAST_WAITING)
    if on_host:
        near, host = (near if room.memory_bytes is None else room.memory_bytes), 0
    else:
        memory = near + available_ram() // WAITING_SHARE if room.memory_bytes is None else room.memory_bytes
        near = min(near, memory)
        host = memory - near
    folder = _folder(model, room)
    disk = room.disk_bytes if room.disk_bytes is not None else shutil.disk_usage(folder).free // WAITING_SHARE
    if not NamelessFile.READS_AT_PLACES:  # one offset cannot be read while another is written
        disk = 0
    computing = free // COMPUTING_SHARE
    cost = cost_of_a_pass(config, itemsize)
    most = min(cost.max_tokens, MAX_TOKENS) if on_host else MAX_TOKENS
    tokens = room.tokens or min(max(cost.tokens_in(computing), LEAST_TOKENS), most)
    token_bytes = itemsize * config.hidden_size * 5 // 2  # hidden states, the input of the layer, and rotary angles
    rows = max(computing // (8 * itemsize * config.hidden_size), tokens)
    logits = min(computing // LOGITS_SHARE, LOGITS_BYTES)
    return ScoringLimits(near, host, disk, folder, tokens, token_bytes, rows, logits)


def _folder(model: StreamedModel, room: Room) -> Path:
    """The folder of the file: by default that of the weights, whose disk is large, or the system's temporary one."""
    if room.scratch is not None:
        if not room.scratch.is_dir():
            raise OptionError(f"{room.scratch} is not a folder.", "Use an existing folder.")
        return room.scratch
    own = Path(model.name_or_path)
    return own if own.is_dir() and os.access(own, os.W_OK) else Path(tempfile.gettempdir())


def planned(
    tasks: Sequence[Task], form: TextLayout, limits: ScoringLimits, *, streamed: bool, hands_on: bool = True
) -> ScoringPlan:
    """Plan the micro-batches and passes.

    Args:
        tasks: see `tasks_of`.
        form: layout of the micro-batches.
        limits: memory and disk limits.
        streamed: whether weights are streamed. If all are resident, a pass has only a few micro-batches, linked by
            prefixes, so that results are yielded early, and nothing is offloaded to a file.
        hands_on: whether a micro-batch may use the KV cache of a prefix from the one before.
    """
    batches = micro_batches(tasks, form, limits.tokens)
    sizes = [batch.tokens * limits.token_bytes for batch in batches]
    passes = [batches[one] for one in grouped(sizes, limits.total if streamed else limits.near + limits.host)]
    if not streamed:
        passes = [chain for one in passes for chain in chains(one, RESIDENT_BATCHES if hands_on else 1)]
    elif hands_on:
        passes = [linked(one) for one in passes]
    tokens = sum(len(task.ids) for task in tasks)
    return ScoringPlan(tuple(map(tuple, passes)), form, tokens)
