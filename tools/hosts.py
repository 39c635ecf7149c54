"""See to what tests need to make hosts of their own on one machine: iproute2, OpenSSH and pdsh.

`make test` runs it. It never fails: what is missing it says in one line, and those tests are skipped with the same
reason. It installs only where CI is set, since a package with a server in it would start that on a person's machine.
"""

import os
import shutil
import subprocess
import sys

from tools.apt import install

PACKAGES = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "pdsh": "pdsh"}
SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def missing_packages() -> list[str]:
    """Packages whose programs are not there."""
    return [package for program, package in PACKAGES.items() if shutil.which(program, path=SYSTEM_PATH) is None]


def main() -> None:
    """Look, install where that is wanted, and say what will be skipped."""
    if missing_packages() and os.environ.get("CI") and os.geteuid() == 0 and shutil.which("apt-get"):
        print("test: installing OpenSSH, iproute2 and pdsh, for the tests on several hosts", flush=True)
        try:
            install(*missing_packages())
        except (OSError, subprocess.SubprocessError) as error:
            print(f"test: apt-get did not finish: {error}", file=sys.stderr)
    if missing := missing_packages():
        print(f"test: without {', '.join(missing)}, tests on several hosts are skipped", file=sys.stderr)


if __name__ == "__main__":
    main()
