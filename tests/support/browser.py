"""Headless Chromium over its DevTools protocol, by a pipe: no driver, no port, no library.

    with Browser(folder) as browser:
        tab = browser.tab(url)
        tab.wait("document.querySelector('#log').textContent.includes('Hello')")

Messages are JSON, each ended by a zero byte (`--remote-debugging-pipe`: the browser reads descriptor 3, writes 4).
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-proxy-server",
    "--remote-debugging-pipe",
)
SECONDS = 600.0
"""Until something that must happen has happened; a machine may be slow."""


def chromium() -> str | None:
    """The program, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A running browser with a profile of its own; a context manager.

    Args:
        folder: for the profile, and for what the pages download.
        preferences: the user's, in the form of the profile's file.
    """

    def __init__(self, folder: Path, preferences: dict[str, Any] | None = None) -> None:
        program = chromium()
        assert program is not None
        self.downloads = folder / "downloads"
        (folder / "profile" / "Default").mkdir(parents=True)
        (folder / "profile" / "Default" / "Preferences").write_text(json.dumps(preferences or {}))
        ours, self._write = os.pipe()
        self._read, theirs = os.pipe()
        # the shell gives the pipes the numbers that the browser expects; so they must not have these already
        to_browser, from_browser = (fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (ours, theirs))
        os.close(ours)
        os.close(theirs)
        line = f'exec "$@" 3<&{to_browser} 4>&{from_browser} {to_browser}<&- {from_browser}>&-'
        arguments = [program, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", line, "browser", *arguments],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._numbers = itertools.count(1)
        self._rest = b""
        self.events: list[dict[str, Any]] = []
        """What the browser told without being asked."""
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception):
            self.call("Browser.close")
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer.

        Raises:
            RuntimeError: the browser refuses.
            TimeoutError: it says nothing.
        """
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params, **({"sessionId": session} if session else {})}
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self._next(deadline)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            more = os.read(self._read, 1 << 20)
            if not more:
                raise RuntimeError("the browser has ended")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        read: dict[str, Any] = json.loads(message)
        return read

    def tab(self, url: str, width: int = 1000, height: int = 700) -> Tab:
        """A new page, with nothing kept from others."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        self.call(
            "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads), browserContextId=context
        )
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height)
        tab.go(url)
        return tab


class Tab:
    """A page, alone in its context."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """See `Browser.call`."""
        return self._browser.call(method, self._session, **params)

    def go(self, url: str) -> None:
        """Open an address and wait until its scripts have run."""
        self.call("Page.navigate", url=url)
        self.wait(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def reload(self) -> None:
        """Load the page again, as a user does."""
        self.run("window.isOld = true")
        self.call("Page.reload")
        self.wait("!window.isOld && document.readyState === 'complete'")

    def close(self) -> None:
        """Close it."""
        self._browser.call("Target.closeTarget", targetId=self._target)

    def run(self, script: str) -> Any:
        """The value of an expression, or of what it promises.

        Raises:
            RuntimeError: it threw.
        """
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{script}: {json.dumps(done['exceptionDetails'])[:1000]}")
        return done["result"].get("value")

    def wait(self, condition: str, seconds: float = SECONDS) -> Any:
        """Wait until an expression is true, and return its value.

        Raises:
            TimeoutError: it did not become so.
        """
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(RuntimeError):  # between two documents there is none to ask
                if value := self.run(condition):
                    return value
            if time.monotonic() > deadline:
                shown = self.run("document.body?.innerText")
                raise TimeoutError(f"this did not come about: {condition}\n{shown}\n{self.complaints()}")
            time.sleep(0.05)

    def press(self, key: str, modifiers: int = 0) -> None:
        """A key that types no character; 2 for Control and 8 for Shift among the modifiers."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38, "Delete": 46, "k": 75}
        text = {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def write(self, text: str) -> None:
        """As from a keyboard, into what has the focus."""
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """With the mouse, where the element is."""
        self.wait(f"!!document.querySelector({json.dumps(selector)})")
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'nearest'});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for event_type in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=event_type, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, height: int) -> None:
        """The window, in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        """Light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def picture(self, path: Path) -> None:
        """What is seen, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """What scripts threw, and what the browser refused or could not load, so far."""
        self.run("0")
        texts = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                texts.append(json.dumps(event["params"]["exceptionDetails"])[:600])
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                texts.append(event["params"]["entry"]["text"])
        return texts

    def asked_for(self) -> list[str]:
        """Addresses that the page has asked for so far."""
        return [request["url"] for request in self._requests()]

    def posted(self) -> list[str]:
        """Bodies that the page has sent so far."""
        return [request["postData"] for request in self._requests() if request["method"] == "POST"]

    def _requests(self) -> list[dict[str, Any]]:
        self.run("0")
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        return [event["params"]["request"] for event in mine if event["method"] == "Network.requestWillBeSent"]
