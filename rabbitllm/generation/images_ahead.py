"""Prefetches the images of a pass from their file, in the order of their use, within a memory limit.

The next image is always read, however large. Called in the batch's thread; other threads read. The slot of each image
is looked up just before the read, since its sequence may have ended by then.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rabbitllm.generation.cache_image import Image, new_image
from rabbitllm.generation.image_file import ImageFile, StoredImage

READERS = 2
"""Number of reading threads: a disk is slower with a single read in flight."""

Key = tuple[Any, int]
"""The KV cache of a sequence, and the number of a layer."""


class ImagesAhead:
    """Prefetches images from one file.

    Args:
        file: file of the images.
        most: bytes that may be in memory ahead of their use; the next image is always allowed.
        find: returns the stored image of a key; None if it is no longer in the file.

    Attributes:
        read: bytes of the images taken so far.
        nbytes: bytes that are read ahead now.
    """

    def __init__(self, file: ImageFile, most: int, find: Callable[[Key], StoredImage | None]) -> None:
        self.read = 0
        self.nbytes = 0
        self._file = file
        self._most = most
        self._find = find
        self._threads: ThreadPoolExecutor | None = None
        self._next: deque[Key] = deque()
        self._coming: dict[tuple[int, int], tuple[Image, Future[None]]] = {}

    def begin(self, keys: Iterable[Key]) -> None:
        """Begin to read for a pass.

        Args:
            keys: images that the pass takes, in this order.
        """
        self.forget()
        self._next = deque(keys)
        self._go_on()

    def take(self, key: Key, stored: StoredImage) -> Image:
        """An image, after waiting for its read; one that is not being prefetched is read now.

        Args:
            key: key of the image.
            stored: the image in the file.

        Raises:
            OSError: it cannot be read.
        """
        cache, number = key
        found = self._coming.pop((id(cache), number), None)
        if found is None:
            with contextlib.suppress(ValueError):
                self._next.remove(key)
            image = self._file.get(stored)
        else:
            image, future = found
            future.result()
            self.nbytes -= len(image.whole)
            self._go_on()
        self.read += len(image.whole)
        return image

    def forget(self) -> None:
        """Drop all prefetched images; a failed pass leaves some."""
        self._next.clear()
        for _, future in self._coming.values():
            if not future.cancel():
                with contextlib.suppress(OSError):
                    future.result()
        self._coming.clear()
        self.nbytes = 0

    def close(self) -> None:
        """Drop all images and end the threads."""
        self.forget()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None

    def _go_on(self) -> None:
        while self._next:
            cache, number = self._next[0]
            stored = self._find((cache, number))
            if stored is not None:
                if self.nbytes and self.nbytes + stored.nbytes > self._most:
                    return
                image = new_image(*stored.form)
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(READERS, "rabbitllm-cache-file")
                self.nbytes += stored.nbytes
                self._coming[id(cache), number] = image, self._threads.submit(self._file.fill, image, stored)
            self._next.popleft()
