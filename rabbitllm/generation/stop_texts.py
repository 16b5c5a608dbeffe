"""Text that comes piece by piece and ends before the first of some stop texts to be complete. Knows no tokens."""

from __future__ import annotations


class StoppedText:
    """Holds back what may become a stop text, until more is known.

    Args:
        stops: texts that end it; none of them empty.

    Attributes:
        stop: the one that came, or None.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stop: str | None = None
        self._stops = stops
        self._held = ""
        self._free = ""

    def add(self, text: str) -> None:
        """Take what follows; after a stop text, nothing does."""
        if self.stop is not None:
            return
        text = self._held + text
        # the one that is complete first, as if the text came character by character; of several the longest
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.stop = min(found)
            self._free += text[:at]
            self._held = ""
            return
        keep = max((n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._free += text[: len(text) - keep]
        self._held = text[len(text) - keep :]

    def take(self, *, last: bool = False) -> str:
        """What is certain since the last time.

        Args:
            last: nothing follows, so nothing is held back.
        """
        taken = self._free + (self._held if last else "")
        self._free = ""
        if last:
            self._held = ""
        return taken
