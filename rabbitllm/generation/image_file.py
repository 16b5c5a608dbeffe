"""A nameless file of images: the offset of each image, and whether its I/O uses the page cache.

    through the page cache    as long as the whole file and the weights that a pass reads remain cached
    past it (direct I/O)      from then on: data that is read once a pass would evict other pages

With a memory limit of a control group the page cache counts against that limit. I/O through it costs a copy, and the
kernel has to reclaim other pages for it.
"""

from __future__ import annotations

import logging
from bisect import insort
from dataclasses import dataclass
from pathlib import Path

from rabbitllm.engine.free_memory import available_ram
from rabbitllm.engine.span_reader import stays_cached
from rabbitllm.generation.cache_image import Form, Image, new_image
from rabbitllm.storage import durable
from rabbitllm.storage.page_cache import DIRECT_ALIGNMENT

# Slots of a file: taken, given back, and reused.
#
# The first free slot that is large enough is used, and adjacent free slots are merged, so that there are never more
# holes than slots in use.


class FileSlots:
    """The slots of a file.

    Args:
        limit: maximum size of the file in bytes.

    Attributes:
        limit: see above.
        taken: bytes of the slots in use.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._end = 0
        self._free: list[tuple[int, int]] = []  # (begin, bytes), sorted; not adjacent to each other or to the end

    def take(self, nbytes: int) -> int | None:
        """Reserve a slot and return its offset; None if there is no room.

        Args:
            nbytes: size of the slot, at least one.
        """
        for number, (begin, room) in enumerate(self._free):
            if room >= nbytes:
                self._free[number : number + 1] = [(begin + nbytes, room - nbytes)] if room > nbytes else []
                break
        else:
            begin = self._end
            if begin + nbytes > self.limit:
                return None
            self._end += nbytes
        self.taken += nbytes
        return begin

    def give_back(self, begin: int, nbytes: int) -> None:
        """Free a slot.

        Args:
            begin: as `take` returned it.
            nbytes: as passed to `take`.
        """
        self.taken -= nbytes
        insort(self._free, (begin, nbytes))
        joined: list[tuple[int, int]] = []
        for one in self._free:
            if joined and sum(joined[-1]) == one[0]:
                joined[-1] = (joined[-1][0], joined[-1][1] + one[1])
            else:
                joined.append(one)
        if sum(joined[-1]) == self._end:
            self._end = joined.pop()[0]
        self._free = joined


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image that is in the file.

    Attributes:
        place: offset of its slot in the file.
        nbytes: bytes of its slot.
        form: form of the image.
    """

    place: int
    nbytes: int
    form: Form


class ImageFile:
    """The file of a batch.

    Args:
        folder: folder of the file.
        limit: maximum size of the file in bytes.
        weight_bytes: bytes of weights that are read between two reads of an image.

    Attributes:
        error: the error after which nothing is written any more, or None.
        written: bytes written so far.
        is_past_the_cache: whether images that are not small bypass the page cache.
    """

    def __init__(self, folder: Path, limit: int, weight_bytes: int) -> None:
        self.error: OSError | None = None
        self.written = 0
        self.is_past_the_cache = False
        self._places = FileSlots(limit)
        self._limit = limit
        self._folder = folder
        self._weight_bytes = weight_bytes
        self._room = available_ram()
        self._file: durable.NamelessFile | None = None

    @property
    def limit(self) -> int:
        """Estimate of the bytes that images may take in the file; 0 if it cannot be written to."""
        return self._limit if self.error is None else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the images in the file."""
        return self._places.taken

    def close(self) -> None:
        """Close the file, which deletes it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def look_around(self) -> None:
        """Measure the free memory; called between passes, while nothing is computed."""
        if not self.is_past_the_cache:
            self._room = available_ram()

    def put(self, image: Image) -> StoredImage | None:
        """Write an image; None if that is not possible.

        Args:
            image: an image on the host.
        """
        if self.error is not None:
            return None
        nbytes = len(image.whole)
        place = self._places.take(nbytes)
        if place is None:
            self._limit -= self._limit // 8  # holes between slots take more than estimated
            return None
        if not self.is_past_the_cache and not stays_cached(self.nbytes + self._weight_bytes, self._room):
            self.is_past_the_cache = True  # and remains so; cached images are dropped when they are read
        try:
            if self._file is None:
                self._file = durable.NamelessFile(self._folder)
            self._file.write_at(image.whole.numpy().data, place, aligned=self._goes_past(image, place))
        except OSError as error:
            logger.warning("KV caches cannot be written to a file in %s any more: %s.", self._folder, error)
            self.error = error
            self._places.give_back(place, nbytes)
            return None
        self.written += nbytes
        return StoredImage(place, nbytes, image.form)

    def fill(self, image: Image, stored: StoredImage) -> None:
        """Read an image; may be called in any thread.

        Args:
            image: an image of its form, overwritten.
            stored: as `put` returned it, and not given back.

        Raises:
            OSError: it cannot be read.
        """
        assert self._file is not None
        self._file.read_at(image.whole.numpy().data, stored.place, aligned=self._goes_past(image, stored.place))

    def get(self, stored: StoredImage) -> Image:
        """Read an image into new memory; see `fill`."""
        image = new_image(*stored.form)
        self.fill(image, stored)
        return image

    def give_back(self, stored: StoredImage) -> None:
        """Free the slot of an image.

        Args:
            stored: as `put` returned it.
        """
        self._places.give_back(stored.place, stored.nbytes)

    def _goes_past(self, image: Image, place: int) -> bool:
        return self.is_past_the_cache and image.is_aligned and place % DIRECT_ALIGNMENT == 0
