"""A real headless Chromium: opens a page and gives back what became of it (its elements and what its console said)."""

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tools.system_packages import find_browser

CHROMIUM = find_browser()
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")

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
    "--enable-logging=stderr",
    "--virtual-time-budget=20000",
)
DARK = ("--blink-settings=preferredColorScheme=0",)


@dataclass
class OpenedPage:
    """A page after its scripts ran: its elements as text, and every line its console printed."""

    dom: str
    console: list[str]

    def marks(self) -> dict[str, int]:
        """Drawn lines, bars and heat maps by the id of the plot they are in; plots without any count 0."""
        counter = _MarkCounter()
        counter.feed(self.dom)
        return dict(counter.marks)


def open_page(page: Path | str, scratch: Path, *options: str) -> OpenedPage:
    """Open a file or a URL in Chromium, wait until its scripts are idle, and return what it became."""
    assert CHROMIUM is not None
    url = page if isinstance(page, str) else page.as_uri()
    command = [CHROMIUM, *QUIET, f"--user-data-dir={scratch / 'chromium'}", *options, "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=False)
    assert "<html" in done.stdout, f"Chromium gave no page (status {done.returncode}): {done.stderr[-2000:]}"
    return OpenedPage(done.stdout, re.findall(r"CONSOLE[:(].*", done.stderr))


class _MarkCounter(HTMLParser):
    """Counts what plotly drew: a path of a line, of a bar, or the image of a heat map, each with something in it."""

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
        drawn_line = tag == "path" and "js-line" in found.get("class", "") and "L" in found.get("d", "")
        drawn_bar = tag == "path" and found.get("style", "").startswith("vector-effect") and "H" in found.get("d", "")
        heat_map = tag == "image" and found.get("xlink:href", found.get("href", "")).startswith("data:image")
        if self._plot:
            self.marks[self._plot] += drawn_line or drawn_bar or heat_map
