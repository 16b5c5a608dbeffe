"""The most disk that a call takes, looked at before each of its steps and at each of its events."""

from __future__ import annotations

from pathlib import Path

from rabbitllm.base import progress
from tests.support.splitting import Call, Counter, occupied
from tests.support.ticks import observe_ticks


class Peak:
    """Looks at the disk before every step and at every event.

    Attributes:
        most: by which the folders were fuller than at the start, bytes.
        predicted: what the split said that it would add.
        told: the most that it said it occupied.
    """

    def __init__(self, *folders: Path) -> None:
        self.folders = folders
        self.start = occupied(*folders)
        self.most = 0
        self.predicted = 0
        self.told = 0

    def look(self, *_: object) -> None:
        self.most = max(self.most, occupied(*self.folders) - self.start)

    def listen(self, event: progress.Event) -> None:
        self.look()
        if isinstance(event, progress.SplitStarted):
            self.predicted = event.peak_bytes
        if isinstance(event, progress.ShardDone):
            self.told = max(self.told, event.disk_bytes)

    def during(self, call: Call) -> Path:
        with observe_ticks(Counter(self.look)), progress.listening(self.listen):
            return call.make()
