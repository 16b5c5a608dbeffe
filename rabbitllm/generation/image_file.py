"""A nameless file of images: the place of each image, and whether its I/O uses the page cache. Knows no sequences.

    through the page cache    as long as the whole file and the weights that a pass reads stay cached
    past it (direct I/O)      from then on: data that is read once a pass would evict other pages

Under a control group's limit the page cache is the group's own. An image that goes through it costs a copy, and the
kernel has to find pages to reclaim for it among those of everything else.
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

# Places in a file that several share: taken, given back, and taken again. Pure.
#
# The first that is large enough is taken, and those side by side that are given back become one, so that texts of many
# lengths leave no more holes than there are texts. Knows no bytes.


class FileSlots:
    """The places of a file.

    Args:
        limit: bytes that the file may have.

    Attributes:
        limit: see above.
        taken: bytes of places that are.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._end = 0
        self._free: list[tuple[int, int]] = []  # (begin, bytes), in their order; none touches another one, or the end

    def take(self, nbytes: int) -> int | None:
        """Where so many bytes may go; None if there is no room.

        Args:
            nbytes: at least one.
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
        """Let others have a place.

        Args:
            begin: as `take` returned it.
            nbytes: as it was given them.
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
        place, nbytes: there; it takes no more.
        form: of what is made of it again.
    """

    place: int
    nbytes: int
    form: Form


class ImageFile:
    """The file of a batch.

    Args:
        folder: where it may be.
        limit: bytes that it may have.
        weight_bytes: bytes of weights that are read between two readings of an image.

    Attributes:
        error: why nothing can be written any more; None as long as all is well.
        written: bytes.
        is_past_the_cache: whether images go past the page cache, if they are not small.
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
        """Bytes that its images may take, as estimated; 0 if it cannot be written to."""
        return self._limit if self.error is None else 0

    @property
    def nbytes(self) -> int:
        """That are in it."""
        return self._places.taken

    def close(self) -> None:
        """Forget all of it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def look_around(self) -> None:
        """See what memory is free now; to be called between passes, while nothing is computed."""
        if not self.is_past_the_cache:
            self._room = available_ram()

    def put(self, image: Image) -> StoredImage | None:
        """Write an image; None if that is not possible.

        Args:
            image: on the host.
        """
        if self.error is not None:
            return None
        nbytes = len(image.whole)
        place = self._places.take(nbytes)
        if place is None:
            self._limit -= self._limit // 8  # holes between places take more than was thought
            return None
        if not self.is_past_the_cache and not stays_cached(self.nbytes + self._weight_bytes, self._room):
            self.is_past_the_cache = True  # and remains so; what is in the cache is dropped when it is read
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
        """Read an image; by any thread.

        Args:
            image: a new one of its form.
            stored: as `put` returned it, and not given back.

        Raises:
            OSError: it cannot be read.
        """
        assert self._file is not None
        self._file.read_at(image.whole.numpy().data, stored.place, aligned=self._goes_past(image, stored.place))

    def get(self, stored: StoredImage) -> Image:
        """An image again, see `fill`."""
        image = new_image(*stored.form)
        self.fill(image, stored)
        return image

    def give_back(self, stored: StoredImage) -> None:
        """Let others have a place.

        Args:
            stored: as `put` returned it.
        """
        self._places.give_back(stored.place, stored.nbytes)

    def _goes_past(self, image: Image, place: int) -> bool:
        return self.is_past_the_cache and image.is_aligned and place % DIRECT_ALIGNMENT == 0
