"""Ask apt for Debian packages, quietly, where tests need programs that pip does not bring. For root only."""

import os
import subprocess

INSTALL_SECONDS = 300


def install_packages(*packages: str) -> None:
    """Install packages; whether it worked shows in what is on the path afterwards.

    Raises OSError or subprocess.SubprocessError when apt is not there or takes too long.
    """
    apt = ["apt-get", "-qq", "-o", "Dpkg::Use-Pty=0"]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for step in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        subprocess.run(
            [*apt, *step], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=INSTALL_SECONDS, check=False,
        )  # fmt: skip
