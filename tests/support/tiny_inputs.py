"""Inputs for small models: text, and images or audio where a model takes them, found by trial.

The number of placeholder tokens of an image and the shape of its pixels differ from type to type, and no config has
them. So shapes are tried in turn, each with the numbers of tokens that error messages name. The first call that
succeeds, and whose outputs depend on the image (or audio), is used. Knows nothing of rabbitllm.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.tiny_configs import END_TOKEN, FIRST_TOKEN, LAST_TOKEN

TEXT_TOKENS = 9
NEW_TOKENS = 4
GRID = 4
"""Rows and columns of patches of an image."""
MAX_PLACES = 80
"""Numbers of placeholder tokens below this are tried one by one."""

Arguments = dict[str, Any]
"""By name: tensors, and tuples of tensors by name."""


@dataclass(frozen=True)
class Inputs:
    """Arguments of a call.

    Attributes:
        arguments: by name; batches of one.
        kinds: "text", "image", "audio" and "embeddings", those that are in it.
    """

    arguments: Mapping[str, Any]
    kinds: tuple[str, ...]


def inputs_of(model: Any, media: Sequence[str] = ("image", "audio")) -> Inputs:
    """Inputs for a model, with an image or audio if possible.

    Args:
        model: of transformers, in eval mode, with finite weights.
        media: what to try, in this order.

    Raises:
        Exception: the model's own error for text alone, if no inputs were found.
    """
    taken = inspect.signature(model.forward).parameters
    plain = _text(taken, model)
    error: Exception | None = None
    try:
        without = results(model, plain)
    except Exception as raised:
        error, without = raised, None
    arguments: Arguments = {}
    kinds: list[str] = (
        [] if without is None else ["text" if {"input_ids", "decoder_input_ids"} & plain.keys() else "embeddings"]
    )
    for medium in media:
        options = _images(model.config, taken) if medium == "image" else _audio(model.config, taken)
        more = _first_that_works(model, plain, medium, options, without)
        if more is not None:
            arguments, kinds = more, [*(["text"] if "input_ids" in more else []), medium]
            break
    if not kinds:
        assert error is not None
        raise error
    return Inputs(arguments or plain, tuple(kinds))


def results(model: Any, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """All output tensors of a call, except caches; random numbers are the same each time."""
    torch.manual_seed(0)
    with torch.inference_mode():
        return list(_tensors(model(**{name: copy.deepcopy(value) for name, value in arguments.items()})))


def generated(model: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """The tokens of a greedy generation."""
    torch.manual_seed(0)
    inputs = {name: copy.deepcopy(value) for name, value in arguments.items() if name != "decoder_input_ids"}
    with torch.inference_mode():
        output: Any = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    return next(_tensors(output))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _text(taken: Mapping[str, Any], model: Any) -> Arguments:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(FIRST_TOKEN, LAST_TOKEN, (1, TEXT_TOKENS), generator=generator)
    ids[0, -1] = END_TOKEN  # classifiers of encoder-decoders look for it
    arguments: Arguments = {}
    if "shared_kv_states" in taken:
        return _of_another_model(model.config)
    if "input_ids" in taken:
        arguments["input_ids"] = _with_codes(ids, model.config)
    elif "inputs" in taken and hasattr(model.config, "d_model"):
        arguments["inputs"] = _random(1, TEXT_TOKENS, model.config.d_model)
    elif "decoder_input_values" in taken and "input_features" not in taken:
        width = model.config.hidden_size
        arguments |= {
            "input_values": _random(1, TEXT_TOKENS, width),
            "decoder_input_values": _random(1, TEXT_TOKENS, width),
        }
    if "qformer_input_ids" in taken:
        arguments["qformer_input_ids"] = ids
    if "bbox" in taken:
        arguments["bbox"] = torch.zeros(1, TEXT_TOKENS, 4).long()
    if "decoder_input_ids" in taken and (model.config.is_encoder_decoder or "input_ids" not in taken):
        arguments["decoder_input_ids"] = ids.flip(1)
    return arguments


def _with_codes(ids: torch.Tensor, config: Any) -> torch.Tensor:
    """Tokens, each with the codes of a moment of sound if the model takes both at once."""
    codebooks = getattr(config, "num_codebooks", 0) if hasattr(config, "codebook_vocab_size") else 0
    return ids[..., None].expand(-1, -1, 1 + codebooks).clone() if codebooks else ids


def _of_another_model(config: Any) -> Arguments:
    """Hidden states, keys and values of the model that this one drafts for."""
    text = config.get_text_config()
    shared = {}
    for number, layer_type in enumerate(dict.fromkeys(text.layer_types)):
        own = text.per_layer_config[layer_type]
        shape = (1, own.num_key_value_heads, TEXT_TOKENS, own.head_dim)
        shared[layer_type] = (_random(*shape), _random(*shape) + number)
    states = _random(1, 1, 2 * config.backbone_hidden_size)
    return {"inputs_embeds": states, "position_ids": torch.tensor([[TEXT_TOKENS]]), "shared_kv_states": shared}


def _first_that_works(
    model: Any,
    plain: Arguments,
    medium: str,
    options: Iterable[Arguments],
    without: list[torch.Tensor] | None,
) -> Arguments | None:
    for option in options:
        for arguments in _placed(model, plain, medium, option):
            if without is None or not same(results(model, arguments), without):
                return arguments
    return None


def _placed(model: Any, plain: Arguments, medium: str, option: Arguments) -> Iterator[Arguments]:
    """The first call with this image or audio that succeeds, if any number of placeholder tokens does."""
    token = _token_of(model.config, medium)
    if "input_ids" not in plain or token is None:
        counts: Iterable[int] = (0,)
    else:
        counts = _Counts()
    for count in counts:
        arguments = {**plain, **option, **_marked(model, plain, medium, token, count)}
        try:
            results(model, arguments)
        except Exception as raised:
            if isinstance(counts, _Counts):
                counts.learn(str(raised))
            continue
        yield arguments
        return


class _Counts:
    """Numbers of placeholder tokens to try: those in error messages first, then all; a repeated error ends it."""

    def __init__(self) -> None:
        self._named: list[int] = []
        self._seen: set[int] = set()
        self._messages: set[str] = set()
        self._has_sense = True

    def learn(self, message: str) -> None:
        """Take note of an error."""
        self._has_sense = message not in self._messages
        self._messages.add(message)
        self._named += [int(number) for number in re.findall(r"\d+", message) if 0 < int(number) <= 2048][:8]

    def __iter__(self) -> Iterator[int]:
        for count in itertools.chain((GRID * GRID,), self._from_errors(), range(1, MAX_PLACES)):
            if count not in self._seen and self._has_sense:
                self._seen.add(count)
                yield count

    def _from_errors(self) -> Iterator[int]:
        while self._named:
            yield self._named.pop(0)


def _marked(model: Any, plain: Arguments, medium: str, token: int | None, count: int) -> Arguments:
    """A text with so many placeholder tokens, and the argument that marks them."""
    if not count or token is None:
        return {}
    ids = plain["input_ids"]
    middle = torch.full((1, count), token)
    text = torch.cat((ids[:, :3], middle, ids[:, 3:]), 1)
    arguments = {"input_ids": text}
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        arguments["mm_token_type_ids"] = (text == token).long() * (1 if medium == "image" else 3)
    return arguments


def _token_of(config: Any, medium: str) -> int | None:
    names = [
        f"{medium}_token_id",
        f"{medium}_token_index",
        f"{medium}_patch_id",
        f"im_{medium}_id",
        "media_placeholder_token_id",
        "video_token_id",
    ]
    for name in names:
        token = getattr(config, name, None)
        if isinstance(token, int):
            return token
    return None


@dataclass(frozen=True)
class _Pixels:
    """Sizes of a vision tower: channels, patches, frames of a patch, and side of an image, in pixels."""

    channels: int
    patch: int
    frames: int
    size: int

    def square(self, *leading: int) -> torch.Tensor:
        """Images as squares of pixels: (*leading, channels, size, size)."""
        return _random(*leading, self.channels, self.size, self.size)

    def patches(self, *leading: int, frames: int = 1) -> torch.Tensor:
        """An image as flattened patches: (*leading, GRID * GRID, pixels of a patch)."""
        return _random(*leading, GRID * GRID, self.channels * frames * self.patch * self.patch)

    def unflattened(self) -> torch.Tensor:
        """An image as patches: (GRID * GRID, channels, patch, patch)."""
        return _random(GRID * GRID, self.channels, self.patch, self.patch)


def _images(config: Any, taken: Mapping[str, Any]) -> Iterator[Arguments]:
    """Pixels in the shapes that processors give them."""
    if "flattened_patches" in taken:
        yield {"flattened_patches": _random(1, 16, 2 + 3 * 16 * 16)}
    if not {"pixel_values", "images"} & taken.keys():
        return
    vision = next((part for name in _VISION if (part := getattr(config, name, None)) is not None), config)
    pixels = _Pixels(
        _first(vision, ("num_channels", "in_channels", "in_chans"), 3),
        _first(vision, ("patch_size",), 14),
        _first(vision, ("temporal_patch_size",), 1),
        _first(vision, ("image_size",), 56),
    )
    yield from _in_patches(pixels, taken)
    if "high_res_pixel_values" in taken:
        finer = _first(getattr(config, "high_res_vision_config", config), ("image_size",), 56)
        high_res = {"high_res_pixel_values": _random(1, pixels.channels, finer, finer)}
        yield {"pixel_values": pixels.square(1), **high_res}
    if "aspect_ratio_ids" in taken:
        tiles = _first(vision, ("max_num_tiles",), 4)
        yield {
            "pixel_values": pixels.square(1, 1, tiles),
            "aspect_ratio_ids": torch.ones(1, 1).long(),
            "aspect_ratio_mask": torch.ones(1, 1, tiles).long(),
            "cross_attention_mask": torch.ones(1, TEXT_TOKENS, 1, tiles).long(),
        }
    yield from _in_squares(pixels, taken)
    if "image_embeds_position_mask" in taken:
        mask = torch.arange(TEXT_TOKENS)[None] < config.latent_query_num
        yield {"pixel_values": pixels.square(1), "image_embeds_position_mask": mask}
    yield {"pixel_values": pixels.square(1)}
    yield {"pixel_values": pixels.square(1, 1)}
    yield {"pixel_values": pixels.square(1, 4)}
    yield {"pixel_values": _random(GRID, pixels.frames, pixels.patch, pixels.patch, pixels.channels)}
    yield {"pixel_values": pixels.patches()}


def _in_patches(pixels: _Pixels, taken: Mapping[str, Any]) -> Iterator[Arguments]:
    sides = torch.tensor([[GRID, GRID]])
    if "image_grid_thw" in taken:
        grids = {"image_grid_thw": torch.tensor([[1, GRID, GRID]])}
        if "image_merge_sizes" in taken:
            grids["image_merge_sizes"] = torch.tensor([2])
        for frames in dict.fromkeys((pixels.frames, 2, 1)):
            yield {"pixel_values": pixels.patches(frames=frames), **grids}
        yield {"pixel_values": pixels.unflattened(), **grids}
        side = 2 * pixels.patch
        yield {"pixel_values": _random(GRID * GRID, side, side, pixels.channels), **grids}
    if "target_sizes" in taken:
        yield {"pixel_values": pixels.square(1), "target_sizes": sides}
        row = _random(1, pixels.channels, pixels.patch, GRID * GRID * pixels.patch)
        yield {"pixel_values": row, "target_sizes": sides}
    for name in ("image_grid_hws", "grid_hws", "grid_thws"):
        if name in taken:
            grid = torch.tensor([[1, GRID, GRID]]) if name == "grid_thws" else sides
            yield {"pixel_values": pixels.unflattened(), name: grid}
    if "spatial_shapes" in taken:
        mask = torch.ones(1, GRID * GRID).long()
        yield {"pixel_values": pixels.patches(1), "spatial_shapes": sides, "pixel_attention_mask": mask}
    if "image_token_pooling" in taken:
        rows = torch.arange(2 * GRID * GRID).view(-1, 4)
        crops = {"image_grids": torch.tensor([[2, 2, 2, 2]]), "image_num_crops": torch.tensor([2])}
        yield {"pixel_values": pixels.patches(2), "image_token_pooling": rows, **crops}
    if "image_position_ids" in taken:
        places = torch.stack(torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij"), -1)
        yield {"pixel_values": pixels.patches(1), "image_position_ids": places.view(1, -1, 2)}


def _in_squares(pixels: _Pixels, taken: Mapping[str, Any]) -> Iterator[Arguments]:
    if "image_attention_mask" in taken:
        yield {"pixel_values": pixels.square(1, 1), "image_attention_mask": torch.ones(1, TEXT_TOKENS, 1).long()}
    if "image_sizes" in taken:
        sizes = {"image_sizes": torch.tensor([[pixels.size, pixels.size]])}
        for tiles in (2, 3, 5):
            yield {"pixel_values": pixels.square(1, tiles), **sizes}
        yield {"pixel_values": pixels.square(1), **sizes}
    if "pixel_attention_mask" in taken:
        mask = torch.ones(1, 1, pixels.size, pixels.size).bool()
        yield {"pixel_values": pixels.square(1, 1), "pixel_attention_mask": mask}


_VISION = (
    "vision_config",
    "vision_model_config",
    "vision_tower_config",
    "encoder_config",
    "encoder",
    "backbone_config",
)
_AUDIO = ("audio_config", "audio_encoder_config", "encoder_config", "speech_config", "encoder", "audio_encoder")


def _audio(config: Any, taken: Mapping[str, Any]) -> Iterator[Arguments]:
    """Spectrograms and waveforms in the shapes that processors give them."""
    audio = next((part for name in _AUDIO if (part := getattr(config, name, None)) is not None), config)
    bins = _first(audio, ("num_mel_bins", "n_mels", "input_feat_per_channel", "feature_size", "input_dim"), 16)
    longest = _first(audio, ("max_source_positions",), 64)
    masks = [name for name in _MASKS if name in taken]
    for name in ("input_features", "audio_features", "input_audio_embeds", "audio_input_features"):
        if name not in taken:
            continue
        for length, turned in itertools.product((2 * longest, 64, 8 * TEXT_TOKENS, 100, 160), (False, True)):
            features = {name: _random(1, length, bins) if turned else _random(1, bins, length)}
            for mask in masks:
                yield {**features, mask: torch.ones(1, length).long()}
                yield {**features, mask: torch.ones(1, length).bool()}
            yield features
    for name in ("input_values", "audio_values", "speech_tensors", "audios"):
        if name not in taken:
            continue
        for length in (1600, 4000, 16000):
            wave = {name: _random(1, length)}
            for mask in ("padding_mask", "speech_masks"):
                if mask in taken:
                    yield {**wave, mask: torch.ones(1, length).bool()}
            yield wave
            yield {name: _random(1, 1, length)}


_MASKS = ("feature_attention_mask", "input_features_mask", "audio_attention_mask", "audio_feature_lengths")


def _first(config: Any, names: Sequence[str], otherwise: int) -> int:
    """A setting by one of its names; of one for each direction the first."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple) and value:
            value = value[0]
        if isinstance(value, dict) and value:
            value = next(iter(value.values()))
        if isinstance(value, int):
            return value
    return otherwise


def _random(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) - 0.5


def same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are equal, bit for bit."""
    return len(actual) == len(expected) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(actual, expected, strict=True)
    )
