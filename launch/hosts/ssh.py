"""Run one command on every host at once by ssh, and return its output, status and duration.

`localhost` is this machine and needs no ssh. Names, ports, users and keys come from the user's ssh
config.

Invariants:
- No password is asked for.
- Every host has a result within the timeout, and no process is left behind.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from llmsys.log import has_secret
from llmsys.storage.paths import find_import_root

CONNECT_SECONDS = 8
SPARE_SECONDS = 2  # over the remote timeout, so that its status arrives
# ssh's own status when it cannot connect, and that of timeout(1)
SSH_FAILED, TIMED_OUT = 255, 124
# beginnings of the variables that decide how hosts talk to each other
FORWARDED = ("FI_", "GLOO_", "NCCL_")
HERE = ("localhost", "127.0.0.1")

REMEDIES = {
    "Connection refused": "Start sshd there, or set its port in ~/.ssh/config",
    "Permission denied": "Install your public key there: ssh-copy-id {host}",
    "Could not resolve": "Correct the name, or give it an address in ~/.ssh/config or /etc/hosts",
    "Host key verification failed": "Accept its host key once: ssh {host} true",
    # before "timed out", because that message has both and the first match counts
    "during banner exchange": (
        "Its ssh port is open but does not respond: restart sshd, or the host"
    ),
    "timed out": "Check that it is up, and that its ssh port is open to this machine",
    "No route to host": "Check that it is up, and the network in between",
    "No such file or directory: 'ssh'": (
        "Install ssh here (Debian, Ubuntu: apt-get install openssh-client)"
    ),
}


class SshResult(NamedTuple):
    """Result of a command on a host. `seconds` is the wall time from `asked_at`, which is a
    time.time().
    """

    status: int
    output: str
    errors: str
    asked_at: float
    seconds: float

    @property
    def is_unreachable(self) -> bool:
        """True where ssh itself failed, so that the command never ran."""
        return self.status == SSH_FAILED

    @property
    def last_error_line(self) -> str:
        """The last non-empty line of stderr, else of stdout."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with status {self.status} without output"


def run_on_all_hosts(
    hosts: Sequence[str], command: Callable[[str], str], timeout_seconds: int
) -> dict[str, SshResult]:
    """Run a shell command on every host, all at once.

    Args:
        hosts: Names, as ssh knows them.
        command: Returns the shell line of a host.
        timeout_seconds: Limit of each command, connecting included.

    Returns:
        Host → result, in the order of `hosts`.
    """
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        answers = pool.map(lambda host: run_on_host(host, command(host), timeout_seconds), hosts)
        return dict(zip(hosts, answers, strict=True))


def run_on_host(host: str, command: str, timeout_seconds: int) -> SshResult:
    """Run one shell line on a host; the status is 124 when it took longer than the timeout,
    connecting included.
    """
    # ends the command on its host, where killing the local ssh would leave it running
    bounded = f"timeout {timeout_seconds} sh -c {shlex.quote(command)}"
    words = ["sh", "-c", bounded] if host in HERE else ["ssh", *_list_ssh_options(), host, bounded]
    asked_at, began = time.time(), time.monotonic()

    def build_result(status: int, output: str, errors: str) -> SshResult:
        return SshResult(status, output, errors, asked_at, time.monotonic() - began)

    try:
        limit = timeout_seconds + SPARE_SECONDS
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return build_result(TIMED_OUT, "", f"timed out after {limit} s")
    except OSError as error:
        return build_result(SSH_FAILED, "", str(error))
    return build_result(done.returncode, done.stdout, done.stderr)


def describe_ssh_remedy(host: str, answer: SshResult) -> str:
    """Return the next step for a host that ssh could not reach."""
    for words, remedy in REMEDIES.items():
        if words in answer.errors:
            return f"{remedy.format(host=host)}."
    return f"Try it manually: ssh {host} true."


def format_python_command(
    module: str, words: Sequence[str], environment: Mapping[str, str] | None = None
) -> str:
    """Return a shell line that runs a module with the interpreter, code and working directory that
    ranks use.

    Args:
        module: Name of the module, for `python -m`.
        words: Its arguments.
        environment: Variables to set in addition.

    Returns:
        One shell line.
    """
    forwarded = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(FORWARDED) and not has_secret(value)
    }
    settings = (
        {"PYTHONPATH": str(find_import_root()), "OMP_NUM_THREADS": "1"}
        | forwarded
        | dict(environment or {})
    )
    command = [
        "env",
        *(f"{key}={value}" for key, value in settings.items()),
        sys.executable,
        "-m",
        module,
        *words,
    ]
    return f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(command)}"


def parse_last_json(answer: SshResult) -> dict[str, Any] | None:
    """Parse the last line of output that is a JSON object. A shell's profile may have printed
    something before it.

    Args:
        answer: Result of a command.

    Returns:
        The object; None where there is none.
    """
    # a shell's profile may have printed something before it
    for line in reversed(answer.output.splitlines()):
        if line.startswith("{"):
            parsed: dict[str, Any] = json.loads(line)
            return parsed
    return None


def _list_ssh_options() -> list[str]:
    return [
        "-T",
        "-o",
        "BatchMode=yes",
        "-o",
        f"ConnectTimeout={CONNECT_SECONDS}",
        "-o",
        "ServerAliveInterval=5",
    ]
