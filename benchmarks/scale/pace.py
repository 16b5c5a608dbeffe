"""Seconds of a pass on a machine of which only rates are known, and its bottleneck, computed from sizes and rates.

    computing a unit     the longer of reading its weights with the sequences' KV caches, and of its operations; plus
                         Python's seconds of a layer
    meanwhile            streamed units come; the slowest decides: computing, the disk, or the busiest link
    experts              come on demand, so no computation hides them; they are chosen evenly
    4bit, 8bit on a GPU  are dequantized to 16 bits for each use, except for a single row

This is how `rabbitllm.estimate` computes, too. Activations and attention's own operations are left out, and the
GPUs of a machine compute one after the other, as in the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.scale.facts import Host
from benchmarks.scale.shape import TWO_BYTES, Drawn, Shape, Unit, fits_disk
from rabbitllm.estimate.cost_model import RoutedWork

PROMPT, ANSWER = 512, 32
"""Tokens of each sequence, in and out."""
MAX_SEQUENCES = 4096
DISK, LINK, MEMORY, COMPUTE, PYTHON, NETWORK = "disk", "link", "memory", "compute", "Python", "network"


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass, and of each part alone."""

    seconds: float
    parts: dict[str, float]

    @property
    def bound(self) -> str:
        """The longest part."""
        return max(self.parts, key=lambda name: self.parts[name])


@dataclass(frozen=True)
class Outcome:
    """A batch on one machine, or on a group of them.

    Attributes:
        hosts: number of machines.
        sequences: in the batch, on all of them.
        prompt, step: a pass over the prompts, and one for a token of each sequence.
        tokens_a_second: of the answers; the time includes prompts.
    """

    hosts: int
    sequences: int
    prompt: Pass
    step: Pass
    tokens_a_second: float

    @property
    def waited(self) -> float:
        """The share of the time that a micro-batch spends between machines."""
        sent = self.prompt.parts.get(NETWORK, 0.0) + (ANSWER - 1) * self.step.parts.get(NETWORK, 0.0)
        return sent / (self.prompt.seconds + (ANSWER - 1) * self.step.seconds)

    @property
    def bound(self) -> str:
        """The bottleneck of prompts or of steps, whichever take longer."""
        return (self.prompt if self.prompt.seconds > (ANSWER - 1) * self.step.seconds else self.step).bound


def pass_over(units: Sequence[Unit], shape: Shape, host: Host, sequences: int, each: int, context: int) -> Pass:
    """One pass.

    Args:
        units: the model where it was placed.
        shape: the model.
        host: the machine.
        sequences: at once.
        each: tokens of each in the pass.
        context: tokens of each in its KV cache.
    """
    rows = sequences * each
    parts = dict.fromkeys((DISK, LINK, MEMORY, COMPUTE, PYTHON), 0.0)
    cached = sequences * shape.cache.bytes_for(context) / shape.layers
    computing = stalls = reading = 0.0
    copying = dict.fromkeys((unit.device for unit in units), 0.0)
    for unit in units:
        routed = [_asked_for(module, shape, rows) for module in unit.experts]
        memory = _reading(unit.stored, unit.made, shape, host, rows)
        memory += sum(_reading(of.stored, of.made, shape, host, rows) for of in routed)
        memory += cached / host.memory.value if unit.is_layer else 0.0
        compute = (unit.made + sum(of.used for of in routed)) * rows / host.flops.value
        python = (host.routed_layer if routed else host.layer).value if unit.is_layer else 0.0
        on_demand = sum(of.read for of in routed) / host.disk.value, _over(sum(of.copied for of in routed), host)
        computing += max(memory, compute) + python
        stalls += max(on_demand)
        reading += unit.read / host.disk.value
        copying[unit.device] += _over(unit.copied, host)
        seconds = {DISK: unit.read / host.disk.value + on_demand[0], LINK: _over(unit.copied, host) + on_demand[1]}
        seconds |= {MEMORY: memory, COMPUTE: compute, PYTHON: python}
        parts = {name: total + seconds[name] for name, total in parts.items()}
    if host.reads_in_turn:
        computing, reading = computing + reading, 0.0
    return Pass(max(computing, reading, *copying.values()) + stalls, parts)


@dataclass(frozen=True)
class _Asked:
    """Bytes of one module's experts that some rows need; `used` counts an expert for each row that uses it."""

    stored: float
    made: float
    used: float
    read: float
    copied: float


def _asked_for(module: RoutedWork, shape: Shape, rows: int) -> _Asked:
    touched = module.touched_bytes(rows)
    expert_bytes = 3 * TWO_BYTES * shape.config["hidden_size"] * shape.config["moe_intermediate_size"]
    copied = 0.0 if module.is_host else (1 - module.on_device) * touched
    in_16_bits, used = touched / module.source.expert_bytes * expert_bytes, module.source.used * expert_bytes
    return _Asked(touched, in_16_bits, used, module.missed * touched, copied)


def _reading(stored: float, in_16_bits: float, shape: Shape, host: Host, rows: int) -> float:
    """Seconds of reading weights for products."""
    if shape.compression is None:
        return in_16_bits / host.memory.value
    if host.codes is not None:
        return stored / host.codes.value
    return (stored if rows == 1 else stored + 2 * in_16_bits) / host.memory.value


def _over(nbytes: float, host: Host) -> float:
    return nbytes / host.link.value if host.link is not None else 0.0


def cache_bytes(shape: Shape, sequences: int) -> int:
    """Bytes of KV caches and states at the end of the answers."""
    return sequences * shape.cache.bytes_for(PROMPT + ANSWER)


def streaming(host: Host, drawn: Drawn, sequences: int) -> Outcome | None:
    """A batch on one machine that streams the weights that do not fit; None without room for KV caches and two buffers,
    or for the layer files on the disk."""
    devices = max(host.gpus, 1)
    room = int(host.room.value) - cache_bytes(drawn.shape, sequences) // devices
    if room < drawn.buffers or not fits_disk(drawn.shape, host):
        return None
    units = drawn.units(room, host.gpus, int(host.host.value))
    prompt = pass_over(units, drawn.shape, host, sequences, PROMPT, PROMPT)
    step = pass_over(units, drawn.shape, host, sequences, 1, PROMPT + ANSWER)
    return Outcome(1, sequences, prompt, step, _rate(sequences, prompt, step))


def spread(host: Host, drawn: Drawn, sequences: int) -> Outcome | None:
    """Layers over the fewest machines that hold all of them, with a micro-batch of sequences for each GPU; None if even
    one layer does not fit with its share of KV caches.

    Machines wait for the transfer of a micro-batch.
    """
    shape = drawn.shape
    room = host.room.value - cache_bytes(shape, sequences)
    largest = drawn.buffers / 2
    if room < largest:
        return None
    stages = math.ceil(shape.output_bytes / (room // largest * largest) / host.gpus) * host.gpus
    if stages > shape.layers:
        return None
    hosts = stages // host.gpus
    units = drawn.units(1 << 50, 1, 0)
    prompt, step = (
        _around(pass_over(units, shape, host, sequences, each, PROMPT + ANSWER), shape, host, hosts, sequences * each)
        for each in (PROMPT, 1)
    )
    return Outcome(hosts, stages * sequences, prompt, step, _rate(stages * sequences, prompt, step))


def _around(alone: Pass, shape: Shape, host: Host, hosts: int, rows: int) -> Pass:
    """A micro-batch goes through all layers, and from each machine to the next."""
    sent = 0.0
    if hosts > 1:
        sent = hosts * (rows * shape.hidden_bytes / host.network.value + host.latency.value)
    return Pass(alone.seconds + sent, {**alone.parts, NETWORK: sent})


def _rate(sequences: int, prompt: Pass, step: Pass) -> float:
    return sequences * ANSWER / (prompt.seconds + (ANSWER - 1) * step.seconds)


def batches(host: Host, drawn: Drawn) -> Iterator[Outcome]:
    """One machine with 1, 2, 4 … sequences, as many as fit."""
    return _while_there_is_room(lambda sequences: streaming(host, drawn, sequences))


def groups(host: Host, drawn: Drawn) -> Iterator[Outcome]:
    """Machines that share the layers, with micro-batches of 1, 2, 4 … sequences."""
    return _while_there_is_room(lambda sequences: spread(host, drawn, sequences))


def _while_there_is_room(outcome_of: Callable[[int], Outcome | None]) -> Iterator[Outcome]:
    for power in range(int(math.log2(MAX_SEQUENCES)) + 1):
        outcome = outcome_of(1 << power)
        if outcome is None:
            return
        yield outcome


def of_many(outcome: Outcome, hosts: int) -> float:
    """Tokens a second of so many machines, in independent groups."""
    return hosts // outcome.hosts * outcome.tokens_a_second


def dollars(host: Host, outcome: Outcome) -> float:
    """Dollars for a million tokens."""
    return host.hourly.value * outcome.hosts / 3600 / outcome.tokens_a_second * 1e6
