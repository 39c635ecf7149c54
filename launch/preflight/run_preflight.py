"""What would fail on these hosts, found before a rank starts: asks each by ssh and judges the answers.

Reads a config and hosts; gives findings in the order in which they were asked: reach and clock, facts of each host, the
shared folder, the layout, and an exchange between all. Each question has its limit, and the first that a host does not
answer is a finding; all together end within a time that the patience gives.
"""

import json
import shlex
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launch.hosts import host_checks
from launch.hosts.host_checks import HostFinding, build_problem
from launch.hosts.hostfile import Host
from launch.hosts.ssh import TIMED_OUT, SshResult, format_python_command, parse_last_json, run_on_all_hosts
from launch.launchers.host_commands import strip_user
from launch.launchers.launch_plan import PORT
from launch.preflight.cluster_checks import check_collectives, check_memory_fit
from llmsys.config.run import RunConfig
from llmsys.data.step_plan import RunPlan
from llmsys.errors import LlmsysError
from llmsys.estimate.parameter_count import count_parameters

REACH_SECONDS, SHELL_SECONDS = 10, 5
"""How long a host may take to answer at all, and later to a command of the shell."""
PATIENCES, SHORT_QUESTIONS_SECONDS = 2, 5
"""A preflight lasts two patiences, one for facts and one for the exchange, and this: under a minute with 25 s."""
ALL = "all"


class PreflightRequest(NamedTuple):
    """What a preflight is about: the config, as given and as read, and the hosts."""

    given: str
    overrides: Sequence[str]
    config: RunConfig
    hosts: Sequence[Host]
    patience_seconds: int

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
        """How long all questions together may take."""
        return PATIENCES * self.patience_seconds + SHORT_QUESTIONS_SECONDS

    @property
    def run_folder(self) -> Path:
        """The run folder, as every host will name it."""
        return Path.cwd() / self.config.run.folder


def run_preflight(question: PreflightRequest) -> Iterator[HostFinding]:
    """Every finding, as soon as it is there."""
    ends = time.monotonic() + question.timeout_seconds

    def cap_seconds(seconds: int) -> int:
        return max(1, min(seconds, round(ends - time.monotonic())))

    yield from check_divisibility(question)
    answers = run_on_all_hosts(question.host_names, lambda _: "date +%s.%N", cap_seconds(REACH_SECONDS))
    for name, answer in answers.items():
        yield host_checks.check_ssh(name, answer)
        if answer.status == 0:
            yield host_checks.check_clock(name, answer)
    reachable = [name for name, answer in answers.items() if answer.status == 0]
    marker = f".preflight-{uuid.uuid4().hex[:12]}"
    try:
        limit = cap_seconds(question.patience_seconds)
        asked = run_on_all_hosts(reachable, lambda name: _format_probe_command(question, name, marker), limit)
        facts = {name: told for name, answer in asked.items() if (told := parse_last_json(answer)) is not None}
        yield from (_build_silence_finding(name, answer, limit) for name, answer in asked.items() if name not in facts)
        yield from _check_facts(question, facts, marker, cap_seconds(SHELL_SECONDS))
    finally:
        folder, run = shlex.quote(str(question.run_folder / marker)), shlex.quote(str(question.run_folder))
        run_on_all_hosts(
            reachable, lambda _: f"rm -rf {folder}; rmdir {run} 2>/dev/null; true", cap_seconds(SHELL_SECONDS)
        )
    yield from check_collectives(
        question.host_names, question.rendezvous_host, facts, cap_seconds(question.patience_seconds)
    )


def check_divisibility(question: PreflightRequest) -> Iterator[HostFinding]:
    """Whether layout and batch divide over the ranks: arithmetic, and nobody is asked."""
    try:
        layout = question.config.resolve_layout(question.num_ranks)
    except LlmsysError as error:
        yield build_problem(ALL, "layout", str(error))
        return
    axes = ", ".join(f"{axis}={size}" for axis, size in layout.model_dump().items())
    yield HostFinding(ALL, "layout", f"{question.num_ranks} ranks: {axes}")
    try:
        if question.config.objective.kind in ("next_token", "masked"):
            in_turns = question.config.train.reproducibility == "bitwise"  # whole steps, dealt by micro-batches
            plan = RunPlan(question.config.batch, 1 if in_turns else layout.data_parallel_size, 0).get_step_plan(0)[1]
            said = f"{plan.sequences} sequences a step over {layout.data_parallel_size} data ranks"
            yield HostFinding(ALL, "batch", said)
    except LlmsysError as error:
        yield build_problem(ALL, "batch", str(error))


def _check_facts(
    question: PreflightRequest, facts: dict[str, dict[str, Any]], marker: str, seconds: int
) -> Iterator[HostFinding]:
    """What follows from the facts of hosts that told them."""
    if not facts:
        return
    yield from host_checks.check_versions(facts)
    yield from host_checks.check_devices(facts, question.hosts)
    yield from check_memory_fit(question.config, question.hosts, facts)
    parameters, kept = count_parameters(question.config.model).total, question.config.checkpoint.keep_last
    folder = str(question.run_folder)
    for name, told in facts.items():
        yield host_checks.check_rendezvous_address(name, told, question.rendezvous_host, len(question.hosts) > 1)
        if "port_problem" in told:
            yield build_problem(name, "port", told["port_problem"])
        yield host_checks.check_disk(name, told, folder, parameters, kept)
        if "batch_problem" in told:
            yield build_problem(name, "dry batch", told["batch_problem"])
        else:
            yield HostFinding(
                name, "dry batch", "{micro_batches} micro-batches for its first rank".format(**told["batch"])
            )
    yield from _check_sharing(question, facts, marker, seconds)


def _check_sharing(
    question: PreflightRequest, facts: dict[str, dict[str, Any]], marker: str, seconds: int
) -> Iterator[HostFinding]:
    """A file that each host wrote is looked for on every other, by name: a listing may be remembered, a name is not."""
    wrote = [name for name, told in facts.items() if "folder" in told]
    numbers = [str(question.host_names.index(name)) for name in wrote]
    folder = shlex.quote(str(question.run_folder / marker))
    look = "; ".join(f"test -e {folder}/{number} && echo {number}" for number in numbers)
    for name, answer in run_on_all_hosts(wrote, lambda _: f"{look}; true", seconds).items():
        seen = {wrote[numbers.index(one)] for one in answer.output.split() if one in numbers}
        yield host_checks.check_shared_folder(name, seen, wrote, str(question.run_folder))


def _format_probe_command(question: PreflightRequest, name: str, marker: str) -> str:
    rank = question.host_names.index(name)
    request = {
        "config": question.given,
        "overrides": list(question.overrides),
        "rank": rank,
        "first": question.rendezvous_host,
        "ranks": question.num_ranks,
        "first_rank": sum(host.slots for host in question.hosts[:rank]),
        "port": question.config.launch.port or (PORT if len(question.hosts) > 1 else 0),
        "folder": str(question.run_folder),
        "marker": marker,
    }
    return format_python_command("launch.preflight.host_probe", [json.dumps(request)])


def _build_silence_finding(name: str, answer: SshResult, patience_seconds: int) -> HostFinding:
    if answer.status == TIMED_OUT:
        said = f"did not tell its facts within {patience_seconds} s"
        return HostFinding(
            name, "facts", said, f"See what keeps it busy, or give it --patience {4 * patience_seconds}."
        )
    remedy = f"Have {sys.executable} and {Path.cwd()} there too: share the folders, or install at the same paths."
    return HostFinding(name, "facts", f"cannot run llmsys: {answer.last_error_line}", remedy)
