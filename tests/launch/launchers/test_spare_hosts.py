"""A spare takes the place of a host that failed alone, and of none that fails with the others or
after them.
"""

from llmsys.launch.launchers.spare_hosts import TOGETHER_SECONDS, Replacement
from llmsys.launch.train import LOST_PEER, MENDABLE, STOPPED


def test_a_host_is_replaced_once_and_only_while_the_first_one_waits_for_it() -> None:
    now = [100.0]
    replacement = Replacement("a", lambda: now[0])
    ended = {"b": LOST_PEER, "c": MENDABLE}
    for host, status in ended.items():
        replacement.add_failure(host, status)
    del ended["c"]
    # others may be about to fail for the same reason
    assert replacement.list_due(ended, ["a", "d"]) == []
    now[0] += TOGETHER_SECONDS
    assert replacement.list_due(ended, ["d"]) == []
    assert replacement.list_due(ended | {"d": 0}, ["a"]) == []
    assert replacement.list_due(ended | {"d": STOPPED}, ["a"]) == []
    assert replacement.list_due(ended, ["a", "d"]) == ["b"]
    assert replacement.list_due(ended, ["a", "d"]) == []


def test_the_host_of_the_rendezvous_is_not_replaced() -> None:
    replacement = Replacement("a", lambda: 0.0)
    replacement.add_failure("a", 1)
    assert not replacement.failed_at
