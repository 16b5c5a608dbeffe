"""Images of a pass, read from their file ahead of their use, in its order, as many as may be in memory at a time.

The next one is always read, however large. Called in the batch's thread; what is ahead is read by others. Knows no
texts but as keys, and asks where each image is when it comes to be read: texts may have gone by then.
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
"""A disk that is asked for one thing at a time is slower."""

Key = tuple[Any, int]
"""The cache of a text, and the number of a layer."""


class ImagesAhead:
    """What is read ahead of one file.

    Args:
        file: see there.
        most: bytes that may be in memory before their use; the next image always.
        find: where an image is in the file; None if it no longer is.

    Attributes:
        read: bytes, of what was taken.
        nbytes: that are ahead.
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
            keys: what it takes, in this order.
        """
        self.forget()
        self._next = deque(keys)
        self._go_on()

    def take(self, key: Key, stored: StoredImage) -> Image:
        """An image, once it has come; if it was not asked for it is read now.

        Args:
            key: whose it is.
            stored: where it is.

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
        """Nothing of what comes is wanted any more; a pass that has failed leaves some."""
        self._next.clear()
        for _, future in self._coming.values():
            if not future.cancel():
                with contextlib.suppress(OSError):
                    future.result()
        self._coming.clear()
        self.nbytes = 0

    def close(self) -> None:
        """Forget all, and end the threads."""
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
