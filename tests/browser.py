"""Pages in headless Chromium, driven over the DevTools protocol: JSON messages through a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")
_SECONDS = 60
#: the codes and texts of keys that have a name
_KEYS = {"Enter": (13, "\r"), " ": (32, " "), "Tab": (9, "")}


class Browser:
    """A browser, until the block ends; `profile` is its folder for files."""

    def __init__(self, profile: Path) -> None:
        self.pages: dict[str, Page] = {}
        self._count, self._rest = 0, b""
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        # the protocol has the browser read descriptor 3 and write 4
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, str(CHROMIUM), *_OPTIONS, f"--user-data-dir={profile}"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # a launcher and the browser that it started
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command, to a page or to the browser itself, and give its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        text = json.dumps(message | ({"sessionId": session} if session else {}))
        try:
            os.write(self._to, text.encode() + b"\0")
        except BrokenPipeError:
            raise AssertionError("the browser has ended") from None
        end = time.monotonic() + _SECONDS
        while (answer := self._read(end)).get("id") != self._count:
            if page := self.pages.get(answer.get("sessionId", "")):
                page.note(answer["method"], answer["params"])
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self, end: float) -> dict[str, Any]:
        while (left := end - time.monotonic()) > 0:
            line, separator, rest = self._rest.partition(b"\0")
            if separator:
                self._rest = rest
                return json.loads(line)
            if select.select([self._from], [], [], left)[0]:
                data = os.read(self._from, 1 << 16)
                assert data, "the browser has ended"
                self._rest += data
        raise AssertionError("the browser does not answer")


class Page:
    """A file in a window, where the processor is so many times `slower`. `problems` are the errors of its scripts and
    its messages to the console; `requests` are the addresses of its requests."""

    def __init__(self, browser: Browser, file: Path, width: int = 1280, dark: bool = False, slower: int = 1) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        browser.pages[self._session] = self
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send("Emulation.setCPUThrottlingRate", rate=slower)
        self.send("Page.navigate", url=file.as_uri())

    def note(self, method: str, event: dict[str, Any]) -> None:
        """Store the errors and requests of an event."""
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.problems.append(str(event))
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and give its result."""
        return self._browser.send(method, self._session, **parameters)

    def run(self, expression: str) -> Any:
        """Return the value of an expression; for a promise its result."""
        reply = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _SECONDS
        while not self.run(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.02)

    def press(self, *keys: str) -> None:
        """Press keys by name, one after the other."""
        for key in keys:
            code, text = _KEYS.get(key, (0, key if len(key) == 1 else ""))
            down = {"text": text} if text else {}
            self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **down)
            self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def close(self) -> None:
        """Close the window."""
        self.send("Page.close")
        del self._browser.pages[self._session]

    def picture(self, file: Path) -> None:
        """Write the whole page as PNG."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))
