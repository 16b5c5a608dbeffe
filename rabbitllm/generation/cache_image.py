"""The KV cache of one layer of one sequence in one piece of memory, as it is written to a file and read from it.

Unless an image is small, its memory is aligned to blocks and made of whole blocks: its I/O can bypass the page cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rabbitllm.storage.page_cache import DIRECT_ALIGNMENT

LEAST_BLOCKS = 16
"""Smaller images are not padded to whole blocks, which could add more than a sixteenth."""

Form = tuple[torch.Size, torch.Size, torch.dtype]
"""Shapes of the key and the value tensor, including the room for more tokens, and their dtype."""


@dataclass(slots=True)
class Image:
    """The KV cache of one layer of one sequence, in one piece of memory, with room for more tokens.

    Attributes:
        keys, values: (1, heads, tokens and room, width), views of `whole`.
        whole: (bytes,) uint8, the whole memory up to the end of the last block.
    """

    keys: torch.Tensor
    values: torch.Tensor
    whole: torch.Tensor

    @property
    def is_aligned(self) -> bool:
        """Whether its memory is aligned to blocks and made of whole blocks."""
        return self.whole.data_ptr() % DIRECT_ALIGNMENT == 0 and len(self.whole) % DIRECT_ALIGNMENT == 0

    @property
    def form(self) -> Form:
        """The shapes and the dtype, from which `new_image` makes an image like it."""
        return self.keys.shape, self.values.shape, self.keys.dtype


def new_image(keys: torch.Size, values: torch.Size, dtype: torch.dtype, device: torch.device | None = None) -> Image:
    """An uninitialized image of this form; on the host unless a device is given."""
    nbytes = (keys.numel() + values.numel()) * dtype.itemsize
    if nbytes < LEAST_BLOCKS * DIRECT_ALIGNMENT:
        return image_over(torch.empty(nbytes, dtype=torch.uint8, device=device), keys, values, dtype)
    nbytes = -(-nbytes // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
    room = torch.empty(nbytes + DIRECT_ALIGNMENT, dtype=torch.uint8, device=device)
    begin = -room.data_ptr() % DIRECT_ALIGNMENT
    return image_over(room[begin : begin + nbytes], keys, values, dtype)


def image_over(whole: torch.Tensor, keys: torch.Size, values: torch.Size, dtype: torch.dtype) -> Image:
    """An image of this form over existing bytes."""
    parts, middle = whole.view(dtype), keys.numel()
    return Image(parts[:middle].view(keys), parts[middle : middle + values.numel()].view(values), whole)


def image_of(keys: torch.Tensor, values: torch.Tensor, more: int, device: torch.device | None = None) -> Image:
    """A copy of keys and values with room for `more` tokens, all zeros; on the host unless a device is given."""
    tokens = keys.shape[2]
    room = tokens + more
    shapes = (torch.Size((*one.shape[:2], room, one.shape[3])) for one in (keys, values))
    image = new_image(next(shapes), next(shapes), keys.dtype, device)
    for target, source in ((image.keys, keys), (image.values, values)):
        target[:, :, :tokens] = source
        target[:, :, tokens:] = 0
    return image
