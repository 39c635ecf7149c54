"""Install the Debian packages that tests need and pip does not provide: a browser, a compiler,
network tools, OpenSSH and Slurm.

`make test` runs it. It never fails: missing packages are named in one line, and their tests are
skipped with the same reason.

Invariants:
- Chromium is installed where apt-get is available and the user is root.
- g++ is installed where CI is set and there is no compiler.
- Packages with a server (OpenSSH, Slurm) are installed only where CI is set, because apt starts
  their servers.
"""

import os
import shutil
import subprocess
import sys

INSTALL_SECONDS = 300


def install_packages(*packages: str) -> None:
    """Install packages. Success is seen by what is on the path afterwards.

    Raises OSError or subprocess.SubprocessError when apt is missing or takes too long.
    """
    apt = ["apt-get", "-qq", "-o", "Dpkg::Use-Pty=0"]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for step in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        subprocess.run(
            [*apt, *step], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=INSTALL_SECONDS, check=False,
        )  # fmt: skip


NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    """Return the path of the first Chromium or Chrome on the path."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


def install_browser() -> None:
    """Find a browser, else install one, else print which tests will be skipped."""
    if find_browser() is None and os.geteuid() == 0 and shutil.which("apt-get"):
        print(
            "test: installing Chromium, for the test that opens the report in a browser", flush=True
        )
        try:
            install_packages("chromium")
        except (OSError, subprocess.SubprocessError) as error:
            print(f"test: apt-get did not finish: {error}", file=sys.stderr)
    if find_browser() is None:
        print(
            "test: no Chromium on the path; the test that opens the report in a browser is skipped",
            file=sys.stderr,
        )


HOSTS = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "pdsh": "pdsh"}
SLURM = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def list_missing_packages(wanted: dict[str, str]) -> list[str]:
    """Return the packages whose programs are not installed."""
    return [
        package
        for program, package in wanted.items()
        if shutil.which(program, path=SYSTEM_PATH) is None
    ]


COMPILERS = ("c++", "g++", "clang++")


def install_compiler() -> None:
    """Install a C++ compiler where allowed: tests compare the compiled core with Python."""
    if any(map(shutil.which, COMPILERS)):
        return
    if os.environ.get("CI") and os.geteuid() == 0 and shutil.which("apt-get"):
        print("test: installing g++, for the tests of the compiled core", flush=True)
        try:
            install_packages("g++")
        except (OSError, subprocess.SubprocessError) as error:
            print(f"test: apt-get did not finish: {error}", file=sys.stderr)
    if not any(map(shutil.which, COMPILERS)):
        print("test: no C++ compiler; the tests of the compiled core are skipped", file=sys.stderr)


def install_host_programs() -> None:
    """Install missing network tools and servers where allowed, and print which tests will be
    skipped.
    """
    may_install = os.environ.get("CI") and os.geteuid() == 0 and shutil.which("apt-get")
    for wanted in (HOSTS, SLURM):  # apart: where apt does not know one, it installs none
        if may_install and (missing := list_missing_packages(wanted)):
            print(
                f"test: installing {', '.join(missing)}, for the tests on several hosts", flush=True
            )
            try:
                install_packages(*missing)
            except (OSError, subprocess.SubprocessError) as error:
                print(f"test: apt-get did not finish: {error}", file=sys.stderr)
    if missing := list_missing_packages(HOSTS | SLURM):
        print(
            f"test: without {', '.join(missing)}, tests on several hosts are skipped",
            file=sys.stderr,
        )


if __name__ == "__main__":
    install_browser()
    install_compiler()
    install_host_programs()
