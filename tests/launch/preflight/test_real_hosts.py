"""Laws of the preflight on real, separate hosts with real ssh: what is wrong is named by host,
with its remedy.
"""

import json
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import llmsys
from llmsys.doctor.toy_dataset import build_toy_config, write_toy_dataset
from tests.helpers.hosts import Hosts, find_missing_requirement, real_hosts
from tests.helpers.paths import ROOT

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        bool(find_missing_requirement()),
        reason=f"no hosts can be made here: {find_missing_requirement()}",
    ),
]

Found = dict[tuple[str, str], dict[str, Any]]
# On one host, what tells its facts never ends.
NEVER = (
    '#!/bin/sh\ncase "$*" in *llmsys.launch.preflight.host_probe*) exec sleep 600;; esac\nexec '
    '/usr/bin/env "$@"\n'
)
# A host with another version of llmsys and a folder of its own where the others share one.
ODD = (
    "mount --bind {folder}/other_init.py {root}/llmsys/__init__.py\nmount -t tmpfs tmpfs "
    "{folder}/shared"
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts where all is well, one where much is wrong, one slow, and two whose sshd has
    ended or been halted.
    """
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "shared").mkdir()
    write_toy_dataset(folder / "data")
    config = build_toy_config(folder, run={"folder": str(folder / "shared" / "run")})
    (folder / "toy.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    (folder / "other_init.py").write_text(
        (ROOT / "llmsys" / "__init__.py").read_text() + '__version__ = "0.0.7"\n'
    )
    before = {"odd": ODD.format(folder=folder, root=ROOT)}
    with real_hosts(folder, ["alpha", "beta", "odd", "closed", "slow", "deaf"], before) as made:
        wrapped = {
            "odd/date": '#!/bin/sh\nexec /bin/date -d "90 seconds" "$@"\n',
            "slow/env": NEVER,
        }
        for name, text in wrapped.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        made.stop_sshd("closed")
        made.daemons["deaf"].send_signal(signal.SIGSTOP)
        yield made


def preflight(hosts: Hosts, nodes: str, patience_seconds: int = 120) -> tuple[int, Found, float]:
    """Status, findings by host and check, and the seconds of asking. A test machine may have
    other work: be patient.
    """
    words = [
        "-m",
        "llmsys.launch.main",
        "preflight",
        str(hosts.folder / "toy.yaml"),
        f"nodes={nodes}",
        "--json",
    ]
    done = hosts.run("alpha", sys.executable, *words, "--patience", str(patience_seconds))
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    return (
        done.returncode,
        {(one["host"], one["check"]): one for one in told["findings"]},
        told["seconds"],
    )


def test_hosts_on_which_all_is_well_are_found_so(hosts: Hosts) -> None:
    shared = hosts.folder / "shared"
    before = sorted(shared.iterdir())
    status, found, _ = preflight(hosts, "alpha:1,beta:1")
    assert not [one for one in found.values() if one["fails"]]
    assert status == 0
    assert "alpha is 10.77.0.1" in found["beta", "address"]["finding"]
    assert "sees the files of 2 hosts" in found["alpha", "shared"]["finding"]
    for host in ("alpha", "beta"):
        assert "over eth0 (gloo)" in found[host, "exchange"]["finding"]
        assert "all-reduce" in found[host, "exchange"]["finding"]
    assert sorted(shared.iterdir()) == before


def test_what_is_wrong_is_told_by_host_with_its_remedy(hosts: Hosts) -> None:
    status, found, _ = preflight(hosts, "alpha:1,odd:1,closed:1")
    assert status == 1
    wanted = {
        ("closed", "reach"): ("Connection refused", "Start sshd there"),
        ("closed", "exchange"): (
            "the network was not tested, because closed",
            "Fix the findings above",
        ),
        ("odd", "clock"): (
            "s ahead of this host; 2 s is the maximum",
            "Synchronize it with a time service",
        ),
        ("odd", "versions"): (
            f"llmsys is 0.0.7, on other hosts {llmsys.__version__}",
            f"Install llmsys {llmsys.__version__} there",
        ),
        ("odd", "code"): ("files of code differ: digest", "Check out the same commit there"),
        ("odd", "shared"): (
            "does not see the files that alpha wrote to {run}",
            "Mount one shared folder",
        ),
        ("alpha", "shared"): (
            "does not see the files that odd wrote to {run}",
            "set run.folder to a path in it",
        ),
        ("all", "batch"): ("", ""),
    }
    for place, (finding, remedy) in wanted.items():
        assert finding.format(run=hosts.folder / "shared" / "run") in found[place]["finding"]
        assert remedy in found[place]["remedy"]
    failed = {place for place, one in found.items() if one["fails"]}
    assert wanted.keys() >= failed - {("alpha", "dry batch"), ("odd", "dry batch")}


def test_a_host_that_never_answers_is_named_within_the_minute(hosts: Hosts) -> None:
    """One accepts connections and says nothing; one answers, and then takes for ever to tell
    what it has.
    """
    status, found, seconds = preflight(hosts, "slow:1,deaf:1", patience_seconds=10)
    assert status == 1
    assert "banner exchange" in found["deaf", "reach"]["finding"]
    assert "Its ssh port is open but does not respond" in found["deaf", "reach"]["remedy"]
    assert found["slow", "facts"]["finding"] == "did not respond within 10 s"
    assert "Check its load, or use --patience 40" in found["slow", "facts"]["remedy"]
    assert seconds < 60


def test_a_launch_refuses_hosts_that_cannot_take_part(hosts: Hosts) -> None:
    """The same ills, without a preflight: all are named at once, and nothing starts."""
    words = [
        "launch",
        str(hosts.folder / "toy.yaml"),
        "nodes=alpha:1,odd:1,closed:1,deaf:1",
        "--launcher",
        "torchrun",
    ]
    done = hosts.run("alpha", sys.executable, "-m", "llmsys.launch.main", *words)
    assert done.returncode == 2
    assert "s ahead of this host; 2 s is the maximum" in done.stderr
    assert "Synchronize it with a time service" in done.stderr
    assert "closed cannot be reached: " in done.stderr
    assert "Start sshd there" in done.stderr
    assert "deaf cannot be reached: " in done.stderr
    assert "Nothing was started." in done.stderr
    wrong = hosts.folder / "bin" / "odd" / "date"
    wrong.rename(hosts.folder / "date")
    done = hosts.run(
        "alpha", sys.executable, "-m", "llmsys.launch.main", *words[:2], "nodes=alpha:1,odd:1"
    )
    # tests that steal work from each other do not keep this order
    (hosts.folder / "date").rename(wrong)
    assert (
        f"odd does not see the files that this host wrote to {hosts.folder}/shared/run"
        in done.stderr
    )
    assert not (hosts.folder / "shared" / "run" / "events.jsonl").exists()
