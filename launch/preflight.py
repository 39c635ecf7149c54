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

from launch import findings
from launch.commands import bare
from launch.exchange import exchange
from launch.findings import Finding, problem
from launch.hosts import Host
from launch.room import room
from launch.ssh import TIMED_OUT, Answer, ask_all, last_json, python_line
from launch.start import PORT
from llmsys.config.run import RunConfig
from llmsys.data.plan import RunPlan
from llmsys.errors import LlmsysError
from llmsys.estimate.parameters import count_parameters

REACH_SECONDS, SHELL_SECONDS = 10, 5
"""How long a host may take to answer at all, and later to a command of the shell."""
PATIENCES, SHORT_QUESTIONS_SECONDS = 2, 5
"""A preflight lasts two patiences, one for facts and one for the exchange, and this: under a minute with 25 s."""
ALL = "all"


class Question(NamedTuple):
    """What a preflight is about: the config, as given and as read, and the hosts."""

    given: str
    words: Sequence[str]
    config: RunConfig
    hosts: Sequence[Host]
    patience_seconds: int

    @property
    def names(self) -> list[str]:
        """The hosts' names, for ssh."""
        return [host.name for host in self.hosts]

    @property
    def first(self) -> str:
        """The host where ranks meet, without the user that ssh may need."""
        return bare(self.names[0])

    @property
    def ranks(self) -> int:
        """Ranks of the whole run."""
        return sum(host.slots for host in self.hosts)

    @property
    def limit_seconds(self) -> int:
        """How long all questions together may take."""
        return PATIENCES * self.patience_seconds + SHORT_QUESTIONS_SECONDS

    @property
    def folder(self) -> Path:
        """The run folder, as every host will name it."""
        return Path.cwd() / self.config.run.folder


def preflight(question: Question) -> Iterator[Finding]:
    """Every finding, as soon as it is there."""
    ends = time.monotonic() + question.limit_seconds

    def within(seconds: int) -> int:
        return max(1, min(seconds, round(ends - time.monotonic())))

    yield from fit(question)
    answers = ask_all(question.names, lambda _: "date +%s.%N", within(REACH_SECONDS))
    for name, answer in answers.items():
        yield findings.reached(name, answer)
        if answer.status == 0:
            yield findings.clock(name, answer)
    reachable = [name for name, answer in answers.items() if answer.status == 0]
    marker = f".preflight-{uuid.uuid4().hex[:12]}"
    try:
        limit = within(question.patience_seconds)
        asked = ask_all(reachable, lambda name: _facts_command(question, name, marker), limit)
        facts = {name: told for name, answer in asked.items() if (told := last_json(answer)) is not None}
        yield from (_silent(name, answer, limit) for name, answer in asked.items() if name not in facts)
        yield from _judged(question, facts, marker, within(SHELL_SECONDS))
    finally:
        folder, run = shlex.quote(str(question.folder / marker)), shlex.quote(str(question.folder))
        ask_all(reachable, lambda _: f"rm -rf {folder}; rmdir {run} 2>/dev/null; true", within(SHELL_SECONDS))
    yield from exchange(question.names, question.first, facts, within(question.patience_seconds))


def fit(question: Question) -> Iterator[Finding]:
    """Whether layout and batch divide over the ranks: arithmetic, and nobody is asked."""
    try:
        layout = question.config.fitted_layout(question.ranks)
    except LlmsysError as error:
        yield problem(ALL, "layout", str(error))
        return
    axes = ", ".join(f"{axis}={size}" for axis, size in layout.model_dump().items())
    yield Finding(ALL, "layout", f"{question.ranks} ranks: {axes}")
    try:
        if question.config.objective.kind in ("next_token", "masked"):
            in_turns = question.config.train.reproducibility == "bitwise"  # whole steps, dealt by micro-batches
            plan = RunPlan(question.config.batch, 1 if in_turns else layout.data_ranks, 0).at(0)[1]
            said = f"{plan.sequences} sequences a step over {layout.data_ranks} data ranks"
            yield Finding(ALL, "batch", said)
    except LlmsysError as error:
        yield problem(ALL, "batch", str(error))


def _judged(question: Question, facts: dict[str, dict[str, Any]], marker: str, seconds: int) -> Iterator[Finding]:
    """What follows from the facts of hosts that told them."""
    if not facts:
        return
    yield from findings.same_everywhere(facts)
    yield from findings.devices(facts, question.hosts)
    yield from room(question.config, question.hosts, facts)
    parameters, kept = count_parameters(question.config.model).total, question.config.checkpoint.keep_last
    folder = str(question.folder)
    for name, told in facts.items():
        yield findings.addresses(name, told, question.first, len(question.hosts) > 1)
        if "port_problem" in told:
            yield problem(name, "port", told["port_problem"])
        yield findings.disk(name, told, folder, parameters, kept)
        if "batch_problem" in told:
            yield problem(name, "dry batch", told["batch_problem"])
        else:
            yield Finding(name, "dry batch", "{micro_batches} micro-batches for its first rank".format(**told["batch"]))
    yield from _sharing(question, facts, marker, seconds)


def _sharing(question: Question, facts: dict[str, dict[str, Any]], marker: str, seconds: int) -> Iterator[Finding]:
    """A file that each host wrote is looked for on every other, by name: a listing may be remembered, a name is not."""
    wrote = [name for name, told in facts.items() if "folder" in told]
    numbers = [str(question.names.index(name)) for name in wrote]
    folder = shlex.quote(str(question.folder / marker))
    look = "; ".join(f"test -e {folder}/{number} && echo {number}" for number in numbers)
    for name, answer in ask_all(wrote, lambda _: f"{look}; true", seconds).items():
        seen = {wrote[numbers.index(one)] for one in answer.output.split() if one in numbers}
        yield findings.shared(name, seen, wrote, str(question.folder))


def _facts_command(question: Question, name: str, marker: str) -> str:
    rank = question.names.index(name)
    request = {
        "config": question.given,
        "overrides": list(question.words),
        "rank": rank,
        "first": question.first,
        "ranks": question.ranks,
        "first_rank": sum(host.slots for host in question.hosts[:rank]),
        "port": question.config.launch.port or (PORT if len(question.hosts) > 1 else 0),
        "folder": str(question.folder),
        "marker": marker,
    }
    return python_line("launch.facts", [json.dumps(request)])


def _silent(name: str, answer: Answer, patience_seconds: int) -> Finding:
    if answer.status == TIMED_OUT:
        said = f"did not tell its facts within {patience_seconds} s"
        return Finding(name, "facts", said, f"See what keeps it busy, or give it --patience {4 * patience_seconds}.")
    remedy = f"Have {sys.executable} and {Path.cwd()} there too: share the folders, or install at the same paths."
    return Finding(name, "facts", f"cannot run llmsys: {answer.last_words}", remedy)
