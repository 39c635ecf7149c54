"""See to a headless Chromium for the test that opens the report in a browser.

`make test` runs it. It never fails: where no browser can be had it says so in one line, and that test is skipped with
the same reason. On Debian and its relatives, as root, it installs the package `chromium`, once.
"""

import os
import shutil
import subprocess
import sys

from tools.apt import install_packages

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """The path of the first Chromium or Chrome on the path."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


def install_browser() -> None:
    """Find a browser, else install one, else say what will be skipped."""
    if find_browser() is None and os.geteuid() == 0 and shutil.which("apt-get"):
        print("test: installing Chromium, for the test that opens the report in a browser", flush=True)
        try:
            install_packages("chromium")
        except (OSError, subprocess.SubprocessError) as error:
            print(f"test: apt-get did not finish: {error}", file=sys.stderr)
    if find_browser() is None:
        print("test: no Chromium on the path; the test that opens the report in a browser is skipped", file=sys.stderr)


if __name__ == "__main__":
    install_browser()
