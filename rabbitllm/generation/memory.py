"""Estimates the memory that a pass and its KV caches take, from the sizes of a model.

    free before loading    weights | left to requests: KV caches and the activations of a pass
    free after loading     by default half for KV caches; the rest bounds the tokens of a pass

    in a layer          for each token of a part: the peak, in a product of the feed-forward network or in attention
    between two layers  for each token of the pass: hidden states, and tensors that the model keeps with them
    in a mixture        for each token of the pass: the rows of its experts, which are read once for all tokens
    fixed               a matrix, or the part of one, as the processor multiplies it
    after the head      logits of each sequence whose next token is sampled

Products of 16-bit values are summed in 32 bits, and a processor without 16-bit multiplication widens their inputs too
(`quant/bfloat_products.py`); the estimate includes both. A processor with 16-bit multiplication takes as little as a
quarter of it. Measured on the CPU, see docs/PERFORMANCE.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

from transformers import DynamicCache

from rabbitllm.base.options import RunOptions
from rabbitllm.base.terminal import size
from rabbitllm.checkpoints.config import picked_by
from rabbitllm.engine import kv_room
from rabbitllm.engine.devices import CpuDevice, default_budget, resolve_devices
from rabbitllm.engine.free_memory import available_ram, keep_large_apart, last_bytes, reclaimable_bytes, trimming
from rabbitllm.engine.kv_room import GrowingCache, angles_change_after, has_states
from rabbitllm.engine.pass_line import pass_input_of
from rabbitllm.engine.transformers_api import attention_of
from rabbitllm.errors import NotEnoughMemoryError, OptionError
from rabbitllm.generation._cache_file import TAIL_TOKENS
from rabbitllm.generation._sequence import SequenceLength
from rabbitllm.generation.kv_cache import (
    CACHE_ARGUMENT,
    CacheCost,
    cache_layers,
    cost_by_cache,
    cost_by_config,
    grows,
    keeps,
    layer_configs,
    state_bytes,
)
from rabbitllm.quant import bfloat_products
from rabbitllm.quant.products import CHUNK_ELEMENTS

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from rabbitllm.engine.streamed_model import StreamedModel

logger = logging.getLogger(__name__)

MIN_TOKENS = 16
"""Minimum prompt tokens in a pass, even with little memory."""
MIN_MAX_TOKENS = 512
"""Lower bound of `PassCost.max_tokens`, even for large blocks: products of more tokens are hardly faster."""
GOOD_TOKENS, GOOD_PARTS = 256, 8
"""Tokens of a part that uses the processor well, and the number of parts that make a pass worth reading the weights."""
CARRIED = 6
"""Memory of a token between two layers, and while other tokens are in a layer, in multiples of its hidden state."""
HEAP_BLOCK_BYTES = 32 << 20
"""The allocator gets larger blocks from the system each time, page by page, which took a sixth of one processor's time
with parts that needed such blocks (glibc's DEFAULT_MMAP_THRESHOLD_MAX)."""
MASK_BYTES = 5
"""Memory of a query-key pair in masks: bool, and float32 where a kernel needs that."""
TIGHT = 3
"""Holes between long-lived blocks take up to this many times the memory of a part."""
COMPILED_BYTES = 64 << 20
"""What torch compiles in a prompt of new length and keeps, for products of experts: 1 MB for each number of rows."""
COMPILED_SCORES = 3 << 19
"""The same for `eager` attention to each other number of tokens: 0.6 MB for scores, and 0.7 for what they weigh."""
CERTAIN = 3
"""1 / `CERTAIN` of the estimate is taken on any processor (measured: 1 / 1.3 to 1 / 3)."""
_SPARE = 5, 4
"""Ratio by which the estimate is multiplied: allocators round up, and the interpreter keeps recent objects alive."""


@dataclass(frozen=True, slots=True)
class PassCost:
    """Bytes of a pass.

    Attributes:
        each: bytes of a token in a layer.
        pair: bytes of a query-key pair in the attention matrix; 0 if attention makes no such matrix.
        carried: bytes of a token between two layers.
        fixed: bytes independent of the number of tokens.
        sampled: bytes of a sequence whose next token is sampled.
        block: bytes of a token in the largest tensor of a layer.
        experts: bytes of a token in the experts of a layer, through which all tokens of a pass go at once.
    """

    each: int
    pair: int
    carried: int
    fixed: int
    sampled: int
    block: int
    experts: int = 0

    def of(self, tokens: int, part: int, sequences: int) -> int:
        """Bytes of a pass.

        Args:
            tokens: tokens of all sequences.
            part: tokens that go through a layer at a time, assumed to be of one sequence and so attend to each other.
            sequences: number of sequences whose next token is sampled.
        """
        waiting = sequences * self.sampled + tokens * (self.carried + self.experts)
        return self.fixed + waiting + part * (self.each + part * self.pair)

    def whole(self, batch: int, length: int, past: int) -> int:
        """Bytes of a pass of `batch` sequences of `length` tokens each, after `past` ones, all in a layer at once."""
        return self.fixed + batch * (self.sampled + length * self.token_of(past + length, batch > 1 or past > 0))

    def token_of(self, total: int, is_masked: bool) -> int:
        """Bytes of a token that attends to `total` ones, all tokens of its pass being in a layer at once."""
        return self.carried + max(self.each, self.experts) + total * (self.pair or MASK_BYTES * is_masked)

    def worthwhile(self, sequences: int) -> int:
        """Bytes of a pass that is worth reading the weights."""
        return self.of(GOOD_PARTS * GOOD_TOKENS, GOOD_TOKENS, sequences)

    def least(self) -> int:
        """Bytes of the smallest pass."""
        return self.of(MIN_TOKENS, MIN_TOKENS, 1)

    def tokens_in(self, nbytes: int) -> int:
        """Number of tokens that can go through a layer at a time in `nbytes`; at least `MIN_TOKENS`."""
        each = self.each + self.experts
        if self.pair:
            half = each / (2 * self.pair)
            tokens = int(math.sqrt(half * half + max(nbytes, 0) / self.pair) - half)
        else:
            tokens = nbytes // each
        return max(tokens, MIN_TOKENS)

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens that are worth taking through a layer at a time."""
        return max(HEAP_BLOCK_BYTES // self.block, MIN_MAX_TOKENS)

    def is_tight(self, part: int, nbytes: int) -> bool:
        """Whether `nbytes` are too few for parts of this size with the holes between blocks."""
        return nbytes < TIGHT * self.of(0, part, 0)

    def sequences_in(self, nbytes: int) -> int:
        """Maximum number of sequences in a pass if logits get a quarter of `nbytes`; at least one."""
        return max(nbytes // (4 * self.sampled), 1)

    def parts_in(self, nbytes: int, sequences: int) -> tuple[int, int]:
        """Maximum prompt tokens in a pass that goes through each layer in parts, and in one part.

        At most half of the memory is for the activations of a part in a layer, the rest for all tokens.

        Args:
            nbytes: bytes that weights and KV caches leave.
            sequences: number of sequences whose next token is sampled.

        Returns:
            Tokens of the pass, and tokens of a part.
        """
        free = max(nbytes - self.fixed - sequences * self.sampled, 0)
        part = self.tokens_in(free // 2)
        rest = free - part * (self.each + part * self.pair)
        return max(rest // (self.carried + self.experts), part), part


def cost_of_a_pass(config: PretrainedConfig, itemsize: int) -> PassCost:
    """The cost according to a model's config.

    Args:
        config: config of the text model.
        itemsize: bytes of a value.
    """
    each_layer = [_cost_by(layer, itemsize) for layer in layer_configs(config)]
    return PassCost(*map(max, zip(*map(astuple, each_layer), strict=True)))


def _cost_by(config: PretrainedConfig, itemsize: int) -> PassCost:
    """The cost according to the config of a layer."""
    hidden: int = config.hidden_size
    sizes = getattr(config, "intermediate_size", None) or 4 * hidden
    wide = max([sizes] if isinstance(sizes, int) else sizes)  # of any layer's feed-forward network
    heads: int = getattr(config, "num_attention_heads", None) or 1
    head = getattr(config, "head_dim", None) or hidden // heads
    queries = heads * head
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head
    widened = 4 if itemsize < 4 else 0  # in a product: its inputs, and its sums before rounding
    # the product with a part of the matrix, before it is joined with the others
    part_of_sums = widened * min(CHUNK_ELEMENTS // hidden, wide)
    # the input rows, the normed rows, one result, and the second one being computed
    up = itemsize * (2 * hidden + 2 * wide) + widened * (hidden + wide) + part_of_sums
    both = itemsize * (2 * hidden + 3 * wide)
    down = itemsize * (3 * hidden + wide) + widened * (hidden + wide)
    # during the rotary embedding: queries, two products, a rotated half, the sum
    turned = itemsize * (2 * hidden + 6 * queries + 4 * keys) + widened * (hidden + queries)
    normed = itemsize * 2 * hidden + 3 * 4 * hidden
    token = max(up, both, down, turned, normed) * _SPARE[0] // _SPARE[1]
    is_eager = attention_of(config) == "eager"
    pair = heads * (2 * itemsize + 4) if is_eager else 0
    matrix = hidden * max(wide, queries)
    fixed = max(2 * 4 * min(CHUNK_ELEMENTS, matrix) if widened else 0, itemsize * matrix)
    vocabulary: int = getattr(config, "vocab_size", None) or 0
    sampled = max((4 + itemsize) * vocabulary, 1)
    block, carried = max(widened, itemsize) * max(wide, queries), CARRIED * itemsize * hidden
    return PassCost(token, pair, carried, fixed, sampled, block, _experts_by(config, itemsize))


def _experts_by(config: PretrainedConfig, itemsize: int) -> int:
    """Bytes of a token while transformers computes its experts; 0 without any."""
    picked, hidden = picked_by(config) or 0, int(config.hidden_size)
    width = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    wide = width if isinstance(width, int) else 0
    # its rows with gate and up and what comes of these; or with the results, weighted in 32 bits, and these in order
    each = max(itemsize * (hidden + 4 * wide), itemsize * 2 * hidden + 2 * 4 * hidden)
    return picked * each * _SPARE[0] // _SPARE[1]


def repeated_bytes(config: PretrainedConfig, itemsize: int, tokens: int) -> int:
    """Bytes of the keys and values of a layer that attention repeats for all query heads; 0 if it repeats none.

    transformers' `sdpa` does so for several query tokens with a mask, such as a part of a prompt that attends to
    earlier parts, and for all prompts on GPUs where `repeat_keys_on` is used.

    Args:
        config: config of the text model.
        itemsize: bytes of a value.
        tokens: length of the sequence.
    """
    queries = [0]
    for layer in layer_configs(config):
        heads: int = getattr(layer, "num_attention_heads", None) or 1
        if (getattr(layer, "num_key_value_heads", None) or heads) < heads:
            queries.append(heads * (getattr(layer, "head_dim", None) or layer.hidden_size // heads))
    return 2 * itemsize * max(queries) * tokens


PREFETCH_SHARE = 8
"""1 / `PREFETCH_SHARE` of the limit is for KV caches that are prefetched from a file."""
UNUSED_SHARE = 4
"""In batch jobs, where passes are as large as memory allows, 1 / `UNUSED_SHARE` of their memory is kept free for input
lines in the queue, answers, and caches that are being written to a file."""
MIN_CACHE_TOKENS = 64
"""With room for fewer tokens a server would reject nearly every request."""


class CacheMemory:
    """The memory limit of KV caches, and their sizes.

    Args:
        model: as `AutoModel.from_pretrained` returns it.
        cache_bytes: limit of all KV caches; None for half of the memory that is free once the weights are loaded, on
            the devices that compute.
        throughput: see `Limits`.
        running: maximum number of sequences in one pass.

    Attributes:
        limit: bytes that KV caches may take.
        max_tokens: prompt tokens that one pass can compute in the remaining memory.
        part: how many of these can go through a layer at a time; None for all.
        rows: maximum rows of several sequences in a packed forward; None for no limit.
        logits: maximum rows of a pass with logits, if there are any besides those of its sequences.
        max_sequences: maximum sequences in one pass: `running`, or fewer if memory for their logits is short.
        is_measured: whether the bytes of a token, and of states, are those of a cache.
        is_tight: whether memory freed after a pass must be returned to the system at once.

    Raises:
        OptionError: no memory is left for KV caches, or none for activations.
    """

    def __init__(
        self, model: StreamedModel, cache_bytes: int | None, *, throughput: bool = False, running: int = 1
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        self._least = 0 if model.takes_sequences else kv_room.MIN_ROOM_BYTES
        self._cost: CacheCost = replace(cost_by_config(config, model.dtype), least=self._least)
        self.is_measured = False
        free = free_memory(model)
        self.limit = cache_bytes if cache_bytes is not None else free // 2
        if cache_bytes is None and self.limit < self.bytes_for(MIN_CACHE_TOKENS):
            raise OptionError(
                f"The weights leave {size(free)} free, which is too little to answer any request.",
                "Lower --max-memory, or end other programs.",
            )
        executors = model.streamer.executors.values()
        # KV caches and activations are in memory at once, the activations of a layer on one device
        room = (free - self.limit) // len(executors)
        if not all(executor.device.shares_host_memory for executor in executors):
            longest = min(
                self.limit // max(self._cost.every_token, 1), getattr(config, "max_position_embeddings", 1 << 40)
            )
            room -= repeated_bytes(config, model.dtype.itemsize, longest)
        room = max(room, 0)
        cost = cost_of_a_pass(config, model.dtype.itemsize)
        self.max_sequences = running
        self.part: int | None = None
        self.rows: int | None = None
        self.logits = cost.sequences_in(room)
        self.is_tight = False
        if not throughput:
            self.max_tokens = cost.tokens_in(room - cost.of(0, 0, running))
            return
        if cache_bytes is not None and room < cost.least():
            raise OptionError(
                f"A pass needs {size(cost.least())} in addition to the KV cache ({size(cache_bytes)}); "
                f"{size(free)} are free with the weights loaded.",
                "Lower --cache-memory or --max-memory.",
            )
        room -= room // UNUSED_SHARE
        self.logits = cost.sequences_in(room)
        self.max_sequences = min(running, self.logits)
        self.max_tokens, self.part = cost.parts_in(room, self.max_sequences)
        self.rows = min(self.part, cost.max_tokens)
        self.is_tight = cost.is_tight(self.rows, room // 2)

    def bytes_for(self, tokens: int) -> int:
        """Bytes of the KV cache of one sequence of this length."""
        return self._cost.bytes_for(tokens)

    def tail_bytes(self) -> int:
        """Bytes of memory of a sequence whose KV cache is in a file."""
        return self._cost.tail_bytes(TAIL_TOKENS)

    def prefetch_bytes(self) -> int:
        """Maximum bytes of KV caches that are prefetched from a file."""
        return self.limit // PREFETCH_SHARE

    def next_bytes(self, lengths: Iterable[SequenceLength]) -> int:
        """Bytes of the KV caches of these sequences after the next pass."""
        return sum(self.bytes_for(length.tokens + 1) for length in lengths)

    def drafted_bytes(self, tokens: int, count: int) -> int:
        """Bytes of `count` drafted tokens in the KV cache of a sequence of this length, in its next pass."""
        windows = sum(nbytes for _, nbytes in self._cost.windows)  # they keep what leaves them until the pass has ended
        copies = self._cost.tail_bytes(0) if self._cost.fixed else 0  # of states and what goes back with them
        return self.bytes_for(tokens + 1 + count) - self.bytes_for(tokens + 1) + count * windows + copies

    def reserved(self, lengths: Iterable[SequenceLength]) -> int:
        """Bytes of the KV caches of these sequences after the next tokens; see `SequenceLength.reserved`."""
        return sum(self.bytes_for(length.reserved) for length in lengths)

    def measure(self, caches: Iterable[Any]) -> None:
        """Measure the bytes of a token on the first cache that allows it; does nothing after that.

        Args:
            caches: of each sequence, a cache with some tokens in it or None.
        """
        if self.is_measured:
            return
        for cache in caches:
            if cache is not None and (cost := cost_by_cache(cache)) is not None:
                self._cost, self.is_measured = replace(cost, least=self._least), True
                return


CHECKED_TOKENS, CHECKED_PASSES = 64, 64
"""Tokens of a pass before which memory is looked at, and the number of smaller passes between two such looks."""


class PromptMemory:
    """Keeps the passes of `generate` on a CPU within memory; those of a batch are chosen by `CacheMemory`.

    A pass takes the memory of the least used experts if it needs more than is free: these are read again later, each
    once. If that is not enough, a prompt is computed in chunks, each of which reads all that is streamed. What does not
    fit then, when the system has taken back all that it can, would end the process: it is an error before.

    Args:
        model: a model that generates, on the CPU alone.
    """

    def __init__(self, model: StreamedModel) -> None:
        config = model.config.get_text_config(decoder=True)
        (self._executor,) = model.streamer.executors.values()
        self._model, self._config, self._itemsize = model, config, model.dtype.itemsize
        cost, kv_cost = cost_of_a_pass(config, self._itemsize), cost_by_config(config, model.dtype)
        if model.has_few_rows:
            results = (picked_by(config) or 0) * self._itemsize * config.hidden_size
            cost = replace(cost, experts=results * _SPARE[0] // _SPARE[1])
        compiles = self._itemsize < 4 and bfloat_products.torch_has_instructions()
        self._compiled = COMPILED_BYTES if compiles and cost.experts else 0
        self._compiled_each = COMPILED_SCORES if compiles and cost.pair else 0
        self._layers = cache_layers(model)
        if self._layers:
            each, kept = kv_cost.every_token // len(self._layers), [*filter(grows, self._layers)]
            sizes = (getattr(layer, "sliding_window", None) for layer in self._layers)
            windows = tuple((size, each) for size in sizes if isinstance(size, int))
            states = sum(map(has_states, self._layers)) * state_bytes(config)
            kv_cost = CacheCost(each * len(kept), max(len(kept), 1), windows, states)
        self._cost, self._kv_cost = cost, kv_cost
        self._tokens, self._left, self._is_warned = -1, 0, False

    def make_room(self, batch: int, length: int, past: int) -> None:
        """See `engine.streamed_model.PassMemory`."""
        tokens = batch * length if batch * length >= CHECKED_TOKENS else 0
        self._left -= 1
        if tokens == self._tokens and tokens < MIN_MAX_TOKENS and self._left >= 0:
            return
        self._tokens, self._left = tokens, CHECKED_PASSES
        sizes = batch, length, past, past, past + length + CHECKED_PASSES
        missing, cost = self._missing(*sizes)
        if missing > (1 - TIGHT) * cost and (trim := trimming()) is not None:
            trim()  # holes that a large pass left
            missing, cost = self._missing(*sizes)
        self._require(batch, length, missing, cost)
        # apart, blocks leave no holes, but each use of one zeroes pages: a third of the time of a mixture's prompt
        holes = cost // 2 if self._lendable else (TIGHT - 1) * cost
        if missing + holes > self._lendable:
            keep_large_apart()
            holes = 0
        for pool in self._model.streamer.pools.values():
            pool.lend(missing + holes)

    def chunk(self, tokens: torch.Tensor, options: dict[str, Any]) -> int | None:
        """See `engine.streamed_model.PassMemory`."""
        (batch, total), cache = tokens.shape, options.get(CACHE_ARGUMENT)
        past = pass_input_of((tokens,), options)[0].past or 0
        length, self._is_warned = total - past if total > past else total, False
        if batch * length < CHECKED_TOKENS or not self._has_chunks(batch, past + length, cache, options):
            return None
        given = reclaimable_bytes() + self._lendable
        end = past + length
        if self._missing(batch, length, past, past, end)[0] <= given:
            return None
        each = self._cost.token_of(end, is_masked=True) + sum(each for _, each in self._kv_cost.windows)
        free = given - self._missing(batch, 0, end, past, end)[0]
        each, compiled = batch * each, length * self._compiled_each  # in chunks of 1
        best = math.sqrt(compiled / each)  # takes least
        fitting = (free + math.sqrt(max(free * free - 4 * each * compiled, 0))) / (2 * each)
        chunk = int(max(fitting, best, CHECKED_TOKENS // batch, MIN_TOKENS))
        missing, cost = self._missing(batch, chunk, end - chunk, past, end)
        self._require(batch, length, missing + compiled // chunk, cost)
        return chunk

    def _has_chunks(self, batch: int, total: int, cache: Any, options: Mapping[str, Any]) -> bool:
        """Whether the tokens of a prompt, of `total` with those in its cache, may come in chunks."""
        mask, known = options.get("attention_mask"), {"attention_mask", "position_ids", "use_cache", CACHE_ARGUMENT}
        others = {name for name, value in options.items() if value is not None} - known - {"logits_to_keep"}
        is_plain = type(cache) in (DynamicCache, GrowingCache) and not others and (mask is None or mask.dim() == 2)
        is_same = is_plain and total <= angles_change_after(self._config) and not self._model._internals.options.exact
        return is_same and keeps(self._model) and (batch == 1 or not any(map(has_states, self._layers)))

    def _require(self, batch: int, length: int, missing: int, cost: int) -> None:
        """Warn of a pass that may not fit in memory; refuse one that takes more in any case.

        Args:
            batch, length: sequences, and tokens of each.
            missing: bytes that the pass may need more than are free.
            cost: those of its activations: on processors that multiply 16 bits a third may do.

        Raises:
            NotEnoughMemoryError: the system would end the process.
        """
        free, missing = available_ram(), missing - self._lendable
        certain = missing - cost * (CERTAIN - 1) // CERTAIN
        if certain > last_bytes():
            raise NotEnoughMemoryError(
                f"{batch * length} tokens and their KV cache need at least {size(certain + free)} of memory; "
                f"{size(free + last_bytes())} can be had.",
                "Use a shorter prompt, fewer sequences, a stronger compression or a smaller max_memory, or raise the "
                "limit (container, `ulimit -v`).",
            )
        if missing > reclaimable_bytes() and not self._is_warned:
            logger.warning(
                "A prompt may need %s more than is free; the system may end the process. "
                "Lower max_memory, or use a shorter prompt or fewer sequences.",
                size(missing),
            )
            self._is_warned = True

    @property
    def _lendable(self) -> int:
        """Bytes of the slots of experts."""
        return sum(pool.kept for pool in self._model.placement.pools)

    def _missing(self, batch: int, length: int, past: int, begin: int, end: int) -> tuple[int, int]:
        """Bytes that a pass of `batch` sequences of `length` tokens each, after `past` ones, may need more than are
        free, with the KV cache of tokens from `begin` to `end`; and those of its activations."""
        windows = tuple((window + length, each) for window, each in self._kv_cost.windows)  # parts of a pass's tensors
        kept = replace(self._kv_cost, windows=windows).bytes_for(end) - (self._kv_cost.bytes_for(begin) if begin else 0)
        cost = self._cost.whole(batch, length, past) + self._compiled
        if past:
            cost += batch * repeated_bytes(self._config, self._itemsize, past + length)
        return self._missing_bytes(batch * kept + cost), cost

    def _missing_bytes(self, nbytes: int) -> int:
        device = self._executor.device
        assert isinstance(device, CpuDevice)
        return device.missing_bytes(nbytes + self._executor.scratch)


def keep_prompts_within_memory(model: Any) -> None:
    """Let a loaded model use `PromptMemory`, unless it generates no text, or other devices or hosts compute."""
    if not hasattr(model, "placement") or getattr(model, "hosts", None) is not None or not model.can_generate():
        return
    has_sizes = isinstance(getattr(model.config.get_text_config(decoder=True), "hidden_size", None), int)
    if has_sizes and {*model.streamer.executors} == {"cpu"}:
        model.pass_memory = PromptMemory(model)


def free_memory(model: StreamedModel) -> int:
    """Free bytes on all devices together, besides all that weights take in a pass."""
    free: list[int] = [executor.free_bytes() for executor in model.streamer.executors.values()]
    return len(free) * min(free)


REQUESTS_SHARE = 5
"""By default 1 / `REQUESTS_SHARE` of the free memory is left to requests."""
MIN_PASS_SHARE = 10
"""If the size of the KV cache is given, at least 1 / `MIN_PASS_SHARE` of the free memory is left to activations."""


def left_to_requests(free: int, cache_bytes: int | None, pass_bytes: int = 0) -> int:
    """Bytes that the weights must leave free, of those free before they are loaded.

    Args:
        free: bytes free before the weights are loaded.
        cache_bytes: limit of the KV caches; None for the default.
        pass_bytes: bytes of activations of a pass of good size, used if `cache_bytes` is given; 0 if unknown.
    """
    if cache_bytes is None:
        return free // REQUESTS_SHARE
    return min(cache_bytes + max(free // MIN_PASS_SHARE, pass_bytes), free)


def cache_share(run: RunOptions, models: int) -> int:
    """Limit of the KV caches of one of several models that a process loads: a part of what is left to requests.

    Args:
        run: options for running it.
        models: their number, loaded or not.
    """
    free = min(device.free_bytes() for device in resolve_devices(run.device, run.max_memory))
    return max(left_to_requests(free, None) // models, 1)


def weight_limits(run: RunOptions, cache_bytes: int | None, pass_bytes: int = 0) -> Mapping[str, int] | None:
    """Memory limits of the weights that leave room for requests: the caller's own, else lower defaults.

    On GPUs a margin is always left, so the limits are lower only where the size of the KV cache is given.

    Args:
        run: options for running the model.
        cache_bytes: limit of the KV caches; divided equally among several GPUs, as layers are. None for the default.
        pass_bytes: see `left_to_requests`.
    """
    if run.max_memory is not None:
        return run.max_memory
    devices = resolve_devices(run.device, None)
    on_host = all(device.shares_host_memory for device in devices)
    if cache_bytes is None and not on_host:
        return None
    share = None if cache_bytes is None else cache_bytes // len(devices)
    reserved = {
        device.name: left_to_requests(device.free_bytes(), share, pass_bytes) if on_host or share is None else share
        for device in devices
    }
    return {device.name: max(default_budget(device) - reserved[device.name], 0) for device in devices}
