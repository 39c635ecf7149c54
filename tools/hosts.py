"""See to what tests need to make hosts of their own on one machine: iproute2, OpenSSH and pdsh, and Slurm on them.

`make test` runs it. It never fails: what is missing it says in one line, and those tests are skipped with the same
reason. It installs only where CI is set, since a package with a server in it would start that on a person's machine.
"""

import os
import shutil
import subprocess
import sys

from tools.apt import install_packages

HOSTS = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "pdsh": "pdsh"}
SLURM = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def list_missing_packages(wanted: dict[str, str]) -> list[str]:
    """Packages whose programs are not there."""
    return [package for program, package in wanted.items() if shutil.which(program, path=SYSTEM_PATH) is None]


def install_host_programs() -> None:
    """Look, install where that is wanted, and say what will be skipped."""
    may_install = os.environ.get("CI") and os.geteuid() == 0 and shutil.which("apt-get")
    for wanted in (HOSTS, SLURM):  # apart: where apt does not know one, it installs none
        if may_install and (missing := list_missing_packages(wanted)):
            print(f"test: installing {', '.join(missing)}, for the tests on several hosts", flush=True)
            try:
                install_packages(*missing)
            except (OSError, subprocess.SubprocessError) as error:
                print(f"test: apt-get did not finish: {error}", file=sys.stderr)
    if missing := list_missing_packages(HOSTS | SLURM):
        print(f"test: without {', '.join(missing)}, tests on several hosts are skipped", file=sys.stderr)


if __name__ == "__main__":
    install_host_programs()
