"""A real headless Chromium: opens a page at a width and in a colour scheme, and gives back what
became of it.

One Chromium serves a test process, driven over its debugging pipe. `--window-size` would not do:
Chromium makes no window narrower than 500 pixels, so a page of 390 needs the emulated metrics of a
device.
"""

import atexit
import base64
import functools
import json
import os
import re
import select
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tools.system_packages import find_browser

CHROMIUM = find_browser()
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)"
)

PHONE, DESK = 390, 1280
MAX_PAGE_BYTES = 1_500_000
LOOKS = ((PHONE, False), (DESK, True))
"""Width in pixels and whether the desktop is dark: every page is fit for both."""

QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)
SECONDS = 120
# A page with figures is ready once its script drew them.
READY = """document.readyState === "complete" &&
  (document.getElementById("figures") === null ||
   document.documentElement.dataset.plots !== undefined)"""
FIND_DEFECTS = (Path(__file__).parent / "page_defects.js").read_text()


@dataclass
class OpenedPage:
    """A page after its scripts ran: its elements as text, its console, what a reader would
    stumble over.
    """

    dom: str
    console: list[str]
    defects: list[str]

    def marks(self) -> dict[str, int]:
        """Drawn lines, bars and heat maps by the id of the plot they are in; plots without any
        count 0.
        """
        counter = _MarkCounter()
        counter.feed(self.dom)
        return dict(counter.marks)


def open_page(
    page: Path | str,
    width: int = DESK,
    *,
    dark: bool = False,
    ready: str = READY,
    picture: Path | None = None,
) -> OpenedPage:
    """Open a file or a URL, wait until the JavaScript expression `ready` holds, and return what
    the page became.
    """
    browser = _start_chromium()
    with browser.open_tab() as tab:
        tab.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=844,
            deviceScaleFactor=1,
            mobile=False,
        )
        tab.call("Emulation.setScrollbarsHidden", hidden=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        tab.navigate(page if isinstance(page, str) else page.as_uri())
        tab.evaluate(
            f"new Promise((done) => {{ const look = () => ({ready}) ? done() : setTimeout(look, "
            "20); look(); })"
        )
        if picture is not None:
            picture.write_bytes(tab.take_picture())
        dom, defects = (
            tab.evaluate("document.documentElement.outerHTML"),
            tab.evaluate(FIND_DEFECTS),
        )
        return OpenedPage(dom, tab.console, defects)


def open_in_both_looks(page: Path) -> Iterator[OpenedPage]:
    """Yield a page as wide as a phone and as a desk, light and dark, which has no defect and is
    not too large.
    """
    assert page.stat().st_size < MAX_PAGE_BYTES
    for width, dark in LOOKS:
        opened = open_page(page, width, dark=dark)
        assert not opened.console, opened.console
        assert not opened.defects, opened.defects
        assert 'data-plots="drawn"' in opened.dom
        yield opened


@functools.cache
def _start_chromium() -> "_Chromium":
    return _Chromium()


class _Chromium:
    """A browser process; messages are JSON texts that end in a zero byte, written to its
    descriptor 3, read from 4.
    """

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        down, self._requests = os.pipe()
        self._replies, up = os.pipe()
        # the shell moves the two pipes to the descriptors that Chromium uses; dash copies none
        # above 9 by its number
        words = ["sh", "-c", f'exec "$@" 3</dev/fd/{down} 4>/dev/fd/{up}', "sh", CHROMIUM, *QUIET]
        self._process = subprocess.Popen(
            [*words, f"--user-data-dir={self._profile.name}"], pass_fds=(down, up),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(down)
        os.close(up)
        self._rest = b""
        self._numbers = count(1)
        atexit.register(self.close)

    def close(self) -> None:
        """End the process and remove its profile."""
        self._process.kill()
        self._process.wait()
        self._profile.cleanup()

    def open_tab(self) -> "_Tab":
        """Return a new tab."""
        return _Tab(self)

    def send(self, method: str, session: str | None, params: dict[str, Any]) -> int:
        """Send a request and return its number."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | (
            {"sessionId": session} if session else {}
        )
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        return number

    def read_messages(self) -> Iterator[dict[str, Any]]:
        """Yield replies and events as they come."""
        while True:
            while b"\0" in self._rest:
                text, self._rest = self._rest.split(b"\0", 1)
                yield json.loads(text)
            assert select.select([self._replies], [], [], SECONDS)[0], (
                f"Chromium was silent for {SECONDS} seconds"
            )
            part = os.read(self._replies, 2**20)
            assert part, f"Chromium ended with status {self._process.wait()}"
            self._rest += part


class _Tab:
    """One tab with its console."""

    def __init__(self, browser: _Chromium) -> None:
        self._browser = browser
        self._session: str | None = None
        self._is_loaded = False
        self.console: list[str] = []

    def __enter__(self) -> "_Tab":
        # a page must not find what an earlier one stored
        self._context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call(
            "Target.createTarget", url="about:blank", browserContextId=self._context
        )["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        self.call("Target.disposeBrowserContext", browserContextId=self._context)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a method of the protocol."""
        number = self._browser.send(method, self._session, params)
        for message in self._browser.read_messages():
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])
            self._note(message)
        raise AssertionError("unreachable")

    def navigate(self, url: str) -> None:
        """Go to a page and wait for its load event."""
        self._is_loaded = False
        found = self.call("Page.navigate", url=url)
        assert "errorText" not in found, f"{url}: {found['errorText']}"
        messages = self._browser.read_messages()
        while not self._is_loaded:  # the event may come before the reply
            self._note(next(messages))

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, of a promise what it resolves to."""
        found = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def take_picture(self) -> bytes:
        """Return the whole page as PNG."""
        return base64.b64decode(
            self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        )

    def _note(self, message: dict[str, Any]) -> None:
        """Keep what the console of this tab would show, and whether its page is loaded."""
        if message.get("sessionId") != self._session:
            return
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._is_loaded = True
            case "Runtime.consoleAPICalled":
                self.console.append(" ".join(str(one.get("value", "")) for one in params["args"]))
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded":
                self.console.append(params["entry"]["text"])
            case _:
                pass


class _MarkCounter(HTMLParser):
    """Counts what plotly drew: a path of a line, of a bar, or the image of a heat map, each with
    something in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.marks: Counter[str] = Counter()
        self._plot = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attributes}
        if re.match(r"plot(\s|$)", found.get("class", "")):
            self._plot = found["id"]
            self.marks[self._plot] += 0
        elif tag in ("figcaption", "section"):
            self._plot = ""
        drawn_line = (
            tag == "path" and "js-line" in found.get("class", "") and "L" in found.get("d", "")
        )
        drawn_bar = (
            tag == "path"
            and found.get("style", "").startswith("vector-effect")
            and "H" in found.get("d", "")
        )
        heat_map = tag == "image" and found.get("xlink:href", found.get("href", "")).startswith(
            "data:image"
        )
        if self._plot:
            self.marks[self._plot] += drawn_line or drawn_bar or heat_map
