"""Check hosts before a launch: ask each by ssh, and turn the answers into findings.

Reads a config and hosts. Yields findings in this order: reach and clock, facts of each host, the
shared folder, the layout, collectives between all hosts, and a dry run.

Invariants:
- Every question has a limit, and the first one that a host does not answer is a finding.
- The whole preflight ends within `PreflightRequest.timeout_seconds`; a dry run, where it is asked
  for, comes after it.
"""

import json
import shlex
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmsys.config.run import RunConfig
from llmsys.data.step_plan import RunPlan
from llmsys.errors import LlmsysError
from llmsys.estimate.model_tensors import count_parameters
from llmsys.launch.hosts import host_checks
from llmsys.launch.hosts.host_checks import HostFinding, build_problem
from llmsys.launch.hosts.hostfile import Host
from llmsys.launch.hosts.ssh import (
    TIMED_OUT,
    SshResult,
    format_python_command,
    parse_last_json,
    run_on_all_hosts,
)
from llmsys.launch.launchers.host_commands import strip_user
from llmsys.launch.launchers.launch_plan import PORT
from llmsys.launch.preflight.cluster_checks import check_collectives, check_memory_fit
from llmsys.launch.preflight.dry_run_check import DryRunWish, check_dry_run
from llmsys.launch.preflight.hardware_checks import check_hardware
from llmsys.launch.preflight.host_probe import format_marker

REACH_SECONDS, SHELL_SECONDS = 10, 5  # limits of the first answer, and of later shell commands
# A preflight takes at most one patience for probes, one for the network test, and these seconds.
PATIENCES, SHORT_QUESTIONS_SECONDS = 2, 5
ALL = "all"


class PreflightRequest(NamedTuple):
    """A config, as given and as parsed, and the hosts to check it on."""

    given: str
    overrides: Sequence[str]
    config: RunConfig
    hosts: Sequence[Host]
    patience_seconds: int
    dry_run: DryRunWish = DryRunWish()

    @property
    def host_names(self) -> list[str]:
        """The hosts' names, for ssh."""
        return [host.name for host in self.hosts]

    @property
    def rendezvous_host(self) -> str:
        """The host where ranks meet, without the user that ssh may need."""
        return strip_user(self.host_names[0])

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole run."""
        return sum(host.slots for host in self.hosts)

    @property
    def timeout_seconds(self) -> int:
        """Limit of all questions together."""
        return PATIENCES * self.patience_seconds + SHORT_QUESTIONS_SECONDS

    @property
    def run_folder(self) -> Path:
        """The run folder, as an absolute path."""
        return Path.cwd() / self.config.run.folder


def run_preflight(request: PreflightRequest) -> Iterator[HostFinding]:
    """Run every check.

    Args:
        request: The config and the hosts.

    Yields:
        Findings, each as soon as it is known.
    """
    ends = time.monotonic() + request.timeout_seconds

    def cap_seconds(seconds: int) -> int:
        return max(1, min(seconds, round(ends - time.monotonic())))

    yield from check_divisibility(request)
    answers = run_on_all_hosts(
        request.host_names, lambda _: "date +%s.%N", cap_seconds(REACH_SECONDS)
    )
    for name, answer in answers.items():
        yield host_checks.check_ssh(name, answer)
        if answer.status == 0:
            yield host_checks.check_clock(name, answer)
    reachable = [name for name, answer in answers.items() if answer.status == 0]
    marker = f".preflight-{uuid.uuid4().hex[:12]}"
    try:
        limit = cap_seconds(request.patience_seconds)
        asked = run_on_all_hosts(
            reachable, lambda name: _format_probe_command(request, name, marker), limit
        )
        facts = {
            name: probe
            for name, answer in asked.items()
            if (probe := parse_last_json(answer)) is not None
        }
        yield from (
            _build_silence_finding(name, answer, limit)
            for name, answer in asked.items()
            if name not in facts
        )
        yield from _check_facts(request, facts, marker, cap_seconds(SHELL_SECONDS))
    finally:
        folder, run = (
            shlex.quote(str(request.run_folder / marker)),
            shlex.quote(str(request.run_folder)),
        )
        # rmdir leaves a run folder that holds anything else
        run_on_all_hosts(
            reachable,
            lambda _: f"rm -rf {folder}; rmdir {run} 2>/dev/null; true",
            cap_seconds(SHELL_SECONDS),
        )
    yield from check_collectives(
        request.host_names, request.rendezvous_host, facts, cap_seconds(request.patience_seconds)
    )
    yield from check_dry_run(
        request.given, request.overrides, request.hosts, facts, request.dry_run
    )


def check_divisibility(request: PreflightRequest) -> Iterator[HostFinding]:
    """Check that layout and batch divide over the ranks. Asks no host."""
    try:
        layout = request.config.resolve_layout(request.num_ranks)
    except LlmsysError as error:
        yield build_problem(ALL, "layout", str(error))
        return
    axes = ", ".join(f"{axis}={size}" for axis, size in layout.to_settings().items())
    yield HostFinding(ALL, "layout", f"{request.num_ranks} ranks: {axes}")
    try:
        if request.config.objective.uses_windows:
            # bitwise assigns micro-batches of a full step
            in_turns = request.config.train.reproducibility == "bitwise"
            plan = RunPlan(
                request.config.batch, 1 if in_turns else layout.data_parallel_size, 0
            ).get_step_plan(0)[1]
            yield HostFinding(
                ALL,
                "batch",
                f"{plan.sequences} sequences a step over {layout.data_parallel_size} data ranks",
            )
    except LlmsysError as error:
        yield build_problem(ALL, "batch", str(error))


def _check_facts(
    request: PreflightRequest, facts: dict[str, dict[str, Any]], marker: str, seconds: int
) -> Iterator[HostFinding]:
    """Yield the checks that need only the collected facts."""
    if not facts:
        return
    yield from host_checks.check_versions(facts)
    yield from host_checks.check_devices(facts, request.hosts)
    yield from check_hardware(facts)
    yield from check_memory_fit(request.config, request.hosts, facts)
    parameters, kept = (
        count_parameters(request.config.model).total,
        request.config.checkpoint.keep_last,
    )
    folder = str(request.run_folder)
    for name, probe in facts.items():
        yield host_checks.check_rendezvous_address(
            name, probe, request.rendezvous_host, len(request.hosts) > 1
        )
        if "port_problem" in probe:
            yield build_problem(name, "port", probe["port_problem"])
        yield host_checks.check_disk(name, probe, folder, parameters, kept)
        if "batch_problem" in probe:
            yield build_problem(name, "dry batch", probe["batch_problem"])
        else:
            yield HostFinding(
                name,
                "dry batch",
                "{micro_batches} micro-batches for its first rank".format(**probe["batch"]),
            )
    yield from host_checks.check_datasets(facts)
    yield from _check_sharing(request, facts, marker, seconds)


def _check_sharing(
    request: PreflightRequest, facts: dict[str, dict[str, Any]], marker: str, seconds: int
) -> Iterator[HostFinding]:
    """Check that each host reads what every other wrote. Files are read by name, because a
    listing may be cached.
    """
    wrote = [name for name, probe in facts.items() if "folder" in probe]
    numbers = [str(request.host_names.index(name)) for name in wrote]
    folder = shlex.quote(str(request.run_folder / marker))
    # by name, because a listing may be cached
    look = "; ".join(f"cat {folder}/{number} 2>/dev/null" for number in numbers)
    for name, answer in run_on_all_hosts(wrote, lambda _: f"{look}; true", seconds).items():
        lines = answer.output.splitlines(keepends=True)
        seen = {
            wrote[numbers.index(one)] for one in numbers if format_marker(marker, int(one)) in lines
        }
        yield host_checks.check_shared_folder(name, seen, wrote, str(request.run_folder))


def _format_probe_command(request: PreflightRequest, name: str, marker: str) -> str:
    rank = request.host_names.index(name)
    fields = {
        "config": request.given,
        "overrides": list(request.overrides),
        "rank": rank,
        "first": request.rendezvous_host,
        "ranks": request.num_ranks,
        "first_rank": sum(host.slots for host in request.hosts[:rank]),
        "port": request.config.launch.port or (PORT if len(request.hosts) > 1 else 0),
        "folder": str(request.run_folder),
        "marker": marker,
    }
    return format_python_command("llmsys.launch.preflight.host_probe", [json.dumps(fields)])


def _build_silence_finding(name: str, answer: SshResult, patience_seconds: int) -> HostFinding:
    if answer.status == TIMED_OUT:
        return HostFinding(
            name,
            "facts",
            f"did not respond within {patience_seconds} s",
            f"Check its load, or use --patience {4 * patience_seconds}.",
        )
    return HostFinding(
        name,
        "facts",
        f"cannot run llmsys: {answer.last_error_line}",
        f"{sys.executable} and {Path.cwd()} must exist there too: share the folders, or install "
        "at the same paths.",
    )
