"""Places in a file that several share: taken, given back, and taken again. Pure.

The first that is large enough is taken, and those side by side that are given back become one, so that texts of many
lengths leave no more holes than there are texts. Knows no bytes.
"""

from __future__ import annotations

from bisect import insort


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
