"""What a split shows by itself: a bar on a terminal or in a notebook, a line a shard elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from rabbitllm import progress

GB = 1e9
REFRESH_SECONDS = 0.2


class SplitDisplay:
    """Listens to a split and shows it on stderr."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._downloading = False
        self._lock = threading.Lock()
        self._fetched: dict[str, int] = {}
        self._shown = 0.0
        self._lines = not (sys.stderr.isatty() or "ipykernel" in sys.modules)

    def __call__(self, event: progress.Event) -> None:
        match event:
            case progress.DownloadStarted():
                self._start_download(event)
            case progress.SplitStarted():
                self._start(event)
            case progress.BytesDone():
                with self._lock:
                    if self._bar is not None:
                        self._bar.update(event.nbytes)
            case progress.ShardStarted():
                if self._bar is not None:
                    self._bar.set_description(f"splitting shard {event.number}/{event.of}")
            case progress.ShardDone():
                disk = f"{(event.disk_bytes + event.source_left_bytes) / GB:.2f} GB"
                if self._bar is not None:
                    self._bar.set_postfix_str(f"disk {disk}")
                else:
                    text = f"split {event.number}/{event.of} {event.shard} ({event.disposal}), disk in use {disk}"
                    print(text, file=sys.stderr, flush=True)
            case progress.SplitDone():
                self.close()
            case progress.BytesFetched():
                self._show_fetched(event)
            case progress.LayerDone():
                pass

    def _start_download(self, event: progress.DownloadStarted) -> None:
        self._downloading = True
        if self._lines:
            text = f"downloading {event.files} files of {event.label}, {event.nbytes / GB:.2f} GB"
            print(text, file=sys.stderr, flush=True)
        else:
            self._open(event.nbytes, "downloading")

    def _start(self, event: progress.SplitStarted) -> None:
        self.close()
        self._downloading = False
        if not self._lines and event.shards:
            self._open(event.source_bytes, "splitting")

    def _open(self, total: int, what: str) -> None:
        from tqdm.auto import tqdm

        self._bar = tqdm(total=total, unit="B", unit_scale=True, desc=what, leave=False)

    def _show_fetched(self, event: progress.BytesFetched) -> None:
        """What has come of the shard that is waited for; a large one takes minutes in which nothing is split."""
        with self._lock:
            if self._downloading:
                if self._bar is not None:
                    self._bar.update(event.nbytes)
                return
            self._fetched[event.shard] = self._fetched.get(event.shard, 0) + event.nbytes
            now = time.monotonic()
            if self._bar is not None and now - self._shown >= REFRESH_SECONDS:
                self._shown = now
                self._bar.set_postfix_str(f"fetched {self._fetched[event.shard] / GB:.2f} GB")

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


@contextlib.contextmanager
def shown(wanted: bool = True) -> Iterator[None]:
    """Show splits while the context is open, unless someone else listens."""
    if not wanted or progress.has_listeners():
        yield
        return
    display = SplitDisplay()
    try:
        with progress.listening(display):
            yield
    finally:
        display.close()
