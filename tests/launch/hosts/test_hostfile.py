"""Laws of llmsys.launch.hosts.hostfile: a list and a hostfile mean the same, and what cannot be
meant is refused by name.
"""

from pathlib import Path

import pytest

from llmsys.errors import LaunchError
from llmsys.launch.hosts.hostfile import Host, parse_nodes


def test_a_list_and_a_hostfile_mean_the_same(tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# two of us\n\nalpha slots=2\nme@10.0.0.2\tslots=4  # the large one\n")
    assert parse_nodes("alpha:2,me@10.0.0.2:4") == [Host("alpha", 2), Host("me@10.0.0.2", 4)]
    assert parse_nodes(str(hostfile)) == parse_nodes("alpha:2, me@10.0.0.2:4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alpha:2,beta:1,alpha:2", r"alpha is listed 2 times.* List each host once.*alpha:4"),
        ("alpha:2,beta:0", r"beta has 0 slots.* remove it"),
        ("alpha:2,beta", r"'beta' cannot be read as a host and its slots. Write it as `host:8`"),
        ("alpha:2,", r"'' cannot be read"),
        ("-oProxyCommand=x:2", r"'-oProxyCommand=x:2' cannot be read"),
        ("no/such/file", r"neither an existing hostfile nor host:slots. Write nodes=first:8"),
    ],
)
def test_nodes_that_cannot_be_meant_are_refused(text: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        parse_nodes(text)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "alpha slots=2\nbeta 2\n",
            r"hostfile, line 2: 'beta 2' cannot be read.* Write it as `host slots=8`",
        ),
        ("alpha slots=2\n\nbeta slots=0\n", r"line 3: beta has 0 slots"),
        ("alpha slots=2\nalpha slots=2\n", r"alpha is listed 2 times"),
        ("# nobody\n", r"lists no host. Write a line such as"),
    ],
)
def test_a_hostfile_that_cannot_be_meant_is_refused_by_its_line(
    lines: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "hostfile").write_text(lines)
    with pytest.raises(LaunchError, match=message):
        parse_nodes(str(tmp_path / "hostfile"))
