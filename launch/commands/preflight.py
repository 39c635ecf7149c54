"""Run `llmsys preflight`: check hosts before a launch, and print the findings as a table."""

import argparse
import json
import time
from typing import TYPE_CHECKING

from llmsys.errors import ConfigError
from llmsys.launch.commands.arguments import parse_count, split_arguments
from llmsys.launch.hosts.hostfile import parse_nodes

if TYPE_CHECKING:
    from llmsys.launch.hosts.host_checks import HostFinding

OWN_NAMES = ("nodes", "device")
PATIENCE_SECONDS = 25  # limit of a host's facts, and again of the collectives
WOULD_FAIL = 1
NODES_HELP = (
    "nodes=first:8,second:8 names hosts and slots; nodes=FILE reads a hostfile; nodes=localhost:2 "
    "needs no ssh; device=h100-sxm names the accelerators of a dry run, which may be others than "
    "those of the hosts."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the time limit and the dry run. nodes= and device= are given among the overrides."""
    parser.add_argument(
        "--patience",
        type=parse_count(1),
        default=PATIENCE_SECONDS,
        metavar="SECONDS",
        help="seconds to wait for a host's answer (default: %(default)s)",
    )
    parser.add_argument(
        "--dryrun",
        action="store_true",
        help="also run the step of the largest rank on pretended accelerators (minutes): those of "
        "the hosts, or device=NAME",
    )
    parser.epilog = f"{NODES_HELP}\n{parser.epilog}"


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return 1 when a check failed."""
    own, words = split_arguments(arguments.overrides, OWN_NAMES)
    if "nodes" not in own:
        raise ConfigError(
            "A preflight needs hosts. Give nodes=first:8,second:8, or nodes=HOSTFILE."
        )
    from llmsys.config.loading.load import load_run_config
    from llmsys.config.loading.trusted_run import require_trusted_run

    hosts, config = parse_nodes(own["nodes"]), load_run_config(arguments.config, words)
    require_trusted_run(config, "training")
    from llmsys.launch.preflight.dry_run_check import DryRunWish
    from llmsys.launch.preflight.run_preflight import PreflightRequest, run_preflight

    if "device" in own:
        from llmsys.estimate.device_profile import load_device_profile

        load_device_profile(own["device"])  # an unknown one is an error before any host is asked
    wish = DryRunWish(arguments.dryrun, own.get("device", ""))
    began = time.monotonic()
    request = PreflightRequest(arguments.config, words, config, hosts, arguments.patience, wish)
    found = list(run_preflight(request))
    seconds, wrong = time.monotonic() - began, sum(bool(one.remedy) for one in found)
    if arguments.json:
        rows = [_build_row(one) for one in found]
        print(
            json.dumps(
                {"hosts": [host._asdict() for host in hosts], "findings": rows, "seconds": seconds}
            )
        )
    else:
        summary = f"{wrong} would fail" if wrong else "nothing would fail"
        print(
            f"{format_host_findings(found)}\n\n{summary}: {len(hosts)} hosts, {len(found)} "
            f"findings in {seconds:.0f} s"
        )
    return WOULD_FAIL if wrong else 0


def _build_row(finding: "HostFinding") -> dict[str, object]:
    """Return a finding for --json, with a probability where it has one."""
    values = finding._asdict() | {"fails": bool(finding.remedy)}
    return {name: value for name, value in values.items() if value is not None}


def format_host_findings(found: "list[HostFinding]") -> str:
    """Return a row for each finding. Hosts with the same finding share a row; a remedy follows
    on its own line.
    """
    rows: dict[tuple[str, str, str], list[str]] = {}
    for one in found:
        rows.setdefault((one.check, one.finding, one.remedy), []).append(one.host)
    order = {
        check: number for number, check in enumerate(dict.fromkeys(one.check for one in found))
    }
    lines = [("", "CHECK", "HOST", "FINDING", "")]
    for (check, finding, remedy), hosts in sorted(rows.items(), key=lambda row: order[row[0][0]]):
        lines.append(
            ("FAIL" if remedy else "ok", check, ", ".join(dict.fromkeys(hosts)), finding, remedy)
        )
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    text = []
    for verdict, check, hosts_text, finding, remedy in lines:
        text.append(
            f"{verdict:<{widths[0]}}  {check:<{widths[1]}}  {hosts_text:<{widths[2]}}  {finding}"
        )
        if remedy:
            text.append(f"{'':<{widths[0]}}  {'':<{widths[1]}}  {'':<{widths[2]}}  → {remedy}")
    return "\n".join(line.rstrip() for line in text)
