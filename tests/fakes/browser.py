"""A real headless Chromium, driven over a pipe: no port, no network, no driver to install.

The pipe carries JSON messages of the DevTools protocol, each ended by a zero byte; Chromium reads
its file descriptor 3 and writes its 4 (`--remote-debugging-pipe`).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Debian's name, Fedora's, and that of the build that Google ships.
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    "/usr/bin/chromium",
)

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

_DEADLINE_S = 60.0


class Page:
    """A tab; made by `open_page`.

    Attributes:
        requests: Addresses of everything it asked for.
    """

    def __init__(self, read: int, write: int) -> None:
        self.requests: list[str] = []
        self._read, self._write = read, write
        self._buffer = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self._call(f"{domain}.enable")

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._read], [], [], max(0.0, left))
            if not ready:
                raise TimeoutError("Chromium did not answer in time")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise EOFError("Chromium ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        if decoded.get("method") == "Network.requestWillBeSent":
            self.requests.append(decoded["params"]["request"]["url"])
        return decoded

    def _call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params or {}}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self._events.append(answer)

    def load(self, path: Path) -> None:
        """Open a file and wait until it is loaded."""
        self._events.clear()
        self._call("Page.navigate", {"url": path.resolve().as_uri()})
        deadline = time.monotonic() + _DEADLINE_S
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._events.append(self._receive(deadline))

    def show(self, width: int, height: int = 800, dark: bool = False, media: str = "") -> None:
        """Set the size of the view, the colour scheme that the user prefers, and the medium."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", {"media": media, "features": [scheme]})

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, as JSON can carry it."""
        answer = self._call("Runtime.evaluate", {"expression": script, "returnByValue": True})
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        options = {"format": "png", "captureBeyondViewport": True}
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", options)["data"]))


@contextmanager
def open_page() -> Iterator[Page]:
    """A tab in a Chromium of its own, which ends with the block."""
    profile = tempfile.mkdtemp(prefix="vringlab-chromium-")
    theirs_read, write = os.pipe()
    read, theirs_write = os.pipe()
    # The shell moves the ends to the descriptors that Chromium looks at.
    command = f'exec "$@" 3<&{theirs_read} 4>&{theirs_write}'
    process = subprocess.Popen(
        ["bash", "-c", command, "bash", CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(theirs_read, theirs_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(theirs_read)
    os.close(theirs_write)
    try:
        yield Page(read, write)
    finally:
        os.close(write)
        os.close(read)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        shutil.rmtree(profile, ignore_errors=True)
