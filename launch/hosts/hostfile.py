"""Parse the hosts of a run and their slots: `nodes=a:8,b:8`, or a hostfile in DeepSpeed's format.

Reads a command-line value or a file. The order of hosts is the order of ranks. An error names the
line and the host.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llmsys.errors import LaunchError
from llmsys.storage.paths import require_local_path

PATIENCE_SECONDS = 3600  # longest wait for lost hosts
ANONYMOUS = "of-slurms-choice"  # beginning of the names of hosts that Slurm will choose
HOSTFILE_LINE = re.compile(r"(?P<name>\S+)\s+slots=(?P<slots>\d+)")
NODE = re.compile(r"(?P<name>[^\s:]+):(?P<slots>\d+)")
# no leading dash, which ssh would read as an option
NAME = re.compile(r"([A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.-]*", re.ASCII)


class Host(NamedTuple):
    """A machine, by the name that ssh knows it by, and its number of ranks (slots), usually one
    per accelerator.
    """

    name: str
    slots: int


def parse_nodes(text: str) -> list[Host]:
    """Return the hosts of `a:2,b:2`, or of a hostfile (`host slots=N` on each line, `#` for
    comments).

    Args:
        text: Value of `nodes=`: a list, or the path of a hostfile.

    Returns:
        The hosts, in rank order.

    Raises:
        LaunchError: The path is no file, there is no host, a line cannot be parsed, a host has no
            slot or is named twice.
    """
    path = require_local_path(text, "nodes")
    if path.is_file():
        hosts = [
            _parse_host(location, line, HOSTFILE_LINE, "host slots=8")
            for location, line in _iter_hostfile_lines(path)
        ]
    elif "/" in text or ":" not in text:
        raise LaunchError(
            f"nodes={text} is neither an existing hostfile nor host:slots. Write "
            "nodes=first:8,second:8."
        )
    else:
        hosts = [
            _parse_host(f"nodes={text}", part.strip(), NODE, "host:8") for part in text.split(",")
        ]
    if not hosts:
        raise LaunchError(
            f"{path} lists no host. Write a line such as `first slots=8` for each host."
        )
    _require_unique_hosts(hosts, text)
    return hosts


def _iter_hostfile_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (location, text) of each line that is not empty or a comment."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(
            f"nodes={path} cannot be read: {error}. Give a text file of `host slots=8`."
        ) from None
    for number, line in enumerate(text.splitlines(), 1):
        if entry := line.partition("#")[0].strip():
            yield f"{path}, line {number}", entry


def _parse_host(location: str, entry: str, form: re.Pattern[str], example: str) -> Host:
    found = form.fullmatch(entry)
    if found is None or NAME.fullmatch(found["name"]) is None:
        raise LaunchError(
            f"{location}: {entry!r} cannot be read as a host and its slots. Write it as "
            f"`{example}`."
        )
    if int(found["slots"]) == 0:
        raise LaunchError(
            f"{location}: {found['name']} has 0 slots, but every listed host takes part. Give it "
            "one slot per accelerator, or remove it."
        )
    return Host(found["name"], int(found["slots"]))


def _require_unique_hosts(hosts: list[Host], text: str) -> None:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            slots = sum(host.slots for host in hosts if host.name == name)
            raise LaunchError(
                f"nodes={text}: {name} is listed {names.count(name)} times. List each host once, "
                f"with all its slots: {name}:{slots}, or `{name} slots={slots}` in a hostfile."
            )
