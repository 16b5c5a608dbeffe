"""How much memory scoring takes, and what goes through the model together, before anything does."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rabbitllm.engine.free_memory import available_ram
from rabbitllm.errors import OptionError
from rabbitllm.generation.answer import context_of
from rabbitllm.generation.packed_families import PACKABLE, can_be_packed, depends_on_longest
from rabbitllm.generation.pass_cost import cost_of_a_pass
from rabbitllm.generation.scoring.activation_offload import HAS_FILES
from rabbitllm.generation.scoring.forward import LOGITS_BYTES
from rabbitllm.generation.scoring.micro_batches import MicroBatch, TextLayout, chains, linked, micro_batches, passes
from rabbitllm.generation.scoring.records import Room
from rabbitllm.generation.scoring.tasks import Ability, Task

# Which models can have sequences padded at the end without a change of their results: those tested for it.
#
# In such a model no token depends on later ones, by attention or by a state, and nothing depends on the length of the
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
"""Model types (transformers 5.23); their test is `tests/generation/scoring/test_every_family.py`."""


def can_be_filled_up(model: Any) -> bool:
    """Whether sequences of different lengths can go through a model in one padded batch."""
    text = model.config.get_text_config(decoder=True)
    return text.model_type in FILLABLE and not depends_on_longest(text)


WAITING_SHARE, COMPUTING_SHARE = 2, 4
"""One part in so many of free memory is for micro-batches that wait, and for the activations of the current one."""
LEAST_TOKENS, MAX_TOKENS = 512, 8192
"""Default bounds of the tokens of a micro-batch. With fewer, shared prefixes are computed several times and products
are slow. More of them gain little for the memory that they take. On a CPU they even lose time where tensors become too
large for the allocator's heaps (`pass_cost.HEAP_BLOCK_BYTES`)."""
RESIDENT_BATCHES = 8
"""Micro-batches that share a pass of a model with resident weights. A shared prefix is computed once for so many, and
an interruption loses no more than these."""
LOGITS_SHARE = 4
"""One part in so many of a micro-batch's memory is for logits, which take a few times that for a moment."""
LEAST_WAITING = 16 << 20
"""Default bytes in memory for micro-batches that wait, where little is free."""


@dataclass(frozen=True, slots=True)
class ScoringLimits:
    """Memory and disk space that scoring may take.

    Attributes:
        near: bytes of waiting micro-batches where the model computes.
        host: bytes of offloaded ones in host memory; 0 where the model computes there.
        disk: bytes of offloaded ones in a file.
        folder: for the file.
        tokens: of a micro-batch.
        token_bytes: that a token of a text takes while it waits, about.
        experts_rows: that go through streamed experts at a time.
        logits_bytes: of the logits that are computed at a time, as float32.
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
        """Bytes of what waits."""
        return self.near + self.host + self.disk


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """What goes through the model together.

    Attributes:
        passes: over the weights, each with its micro-batches.
        form: how texts lie in them.
        tokens: of all distinct texts.
        waiting_bytes: what the largest pass holds between turns, about.
    """

    passes: tuple[tuple[MicroBatch, ...], ...]
    form: TextLayout
    tokens: int
    waiting_bytes: int

    @property
    def computed(self) -> int:
        """Tokens that go through the layers: fewer where prefixes are shared, more where texts are padded."""
        return sum(batch.tokens for one in self.passes for batch in one)

    def __str__(self) -> str:
        batches = sum(map(len, self.passes))
        return (
            f"{self.tokens:,} tokens, of which {self.computed:,} are computed ({self.form.value}), in {batches:,} "
            f"micro-batches and {len(self.passes):,} {'pass' if len(self.passes) == 1 else 'passes'} over the weights"
        )


def ability_of(model: Any) -> Ability:
    """What a model can be asked.

    Raises:
        OptionError: nothing: it is no model of this package, or has an encoder too.
    """
    if not hasattr(model, "placement") or not hasattr(model, "streamer"):
        raise OptionError(
            f"Texts are to be scored by a {type(model).__name__} that was not loaded by this package.",
            "Load it with rabbitllm.AutoModel.from_pretrained.",
        )
    if model.config.is_encoder_decoder:
        raise OptionError(f"{type(model).__name__} has an encoder too; only models that continue a text can score.")
    vocabulary = model.get_input_embeddings().num_embeddings
    return Ability(vocabulary, context_of(model), model.get_output_embeddings() is not None)


def form_of(model: Any, *, exact: bool) -> TextLayout:
    """How texts may lie in a micro-batch of a model, so that none of them changes another."""
    if exact:
        return TextLayout.ALONE
    config = model.config.get_text_config(decoder=True)
    # of some it is "vision", and concerns images
    looks_ahead = getattr(config, "use_bidirectional_attention", False) in (True, "all") or any(
        getattr(module, "is_causal", True) is False for module in (model.get_decoder() or model).modules()
    )
    if looks_ahead:
        return TextLayout.EQUAL
    if can_be_packed(model):
        return TextLayout.PACKED
    return TextLayout.FILLED if can_be_filled_up(model) else TextLayout.EQUAL


def limits_of(model: Any, room: Room) -> ScoringLimits:
    """The memory and disk space that scoring may take, with the weights of the model loaded.

    Raises:
        OptionError: an impossible number.
    """
    for name in ("memory_bytes", "disk_bytes", "tokens"):
        value = getattr(room, name)
        if value is not None and value < (name == "tokens"):
            raise OptionError(f"{name}={value}, which cannot be.", "Give a positive number.")
    devices = [lane.device for lane in model.streamer.lanes.values()]
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
    computing = free // COMPUTING_SHARE
    cost = cost_of_a_pass(config, itemsize)
    most = min(cost.max_tokens, MAX_TOKENS) if on_host else MAX_TOKENS
    tokens = room.tokens or min(max(cost.tokens_in(computing), LEAST_TOKENS), most)
    token_bytes = itemsize * config.hidden_size * 5 // 2  # hidden states, what went in, and angles
    rows = max(computing // (8 * itemsize * config.hidden_size), tokens)
    logits = min(computing // LOGITS_SHARE, LOGITS_BYTES)
    return ScoringLimits(near, host, disk if HAS_FILES else 0, folder, tokens, token_bytes, rows, logits)


def _folder(model: Any, room: Room) -> Path:
    """For the file: the folder of the weights, whose disk is large, or the system's for temporary files."""
    if room.scratch is not None:
        if not room.scratch.is_dir():
            raise OptionError(f"{room.scratch} is no folder.", "Give one that is there.")
        return room.scratch
    own = Path(model.name_or_path)
    return own if own.is_dir() and os.access(own, os.W_OK) else Path(tempfile.gettempdir())


def planned(
    tasks: Sequence[Task], form: TextLayout, limits: ScoringLimits, *, streamed: bool, hands_on: bool = True
) -> ScoringPlan:
    """What goes through the model together.

    Args:
        tasks: see `tasks_of`.
        form: how texts lie in micro-batches.
        limits: what may be taken.
        streamed: whether a pass brings weights; where it brings none, only micro-batches that hand something on to the
            next share one, few enough for results to come now and then, and nothing waits in a file.
        hands_on: whether a micro-batch may need what the one before has computed.
    """
    batches = micro_batches(tasks, form, limits.tokens)
    grouped = passes(batches, limits.token_bytes, limits.total if streamed else limits.near + limits.host)
    if not streamed:
        grouped = [chain for one in grouped for chain in chains(one, RESIDENT_BATCHES if hands_on else 1)]
    elif hands_on:
        grouped = [linked(one) for one in grouped]
    waiting = [sum(batch.tokens for batch in one) * limits.token_bytes for one in grouped if len(one) > 1]
    tokens = sum(len(task.ids) for task in tasks)
    return ScoringPlan(tuple(map(tuple, grouped)), form, tokens, max(waiting, default=0))
