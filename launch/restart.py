"""torchrun starts ranks again that were lost, and lets those rest that ended for a reason a restart does not mend.

A rank that was asked to stop (status 75) has saved and would be started again at once, against the wish; one that has
met what only a person can mend (status 2) would meet it again.
"""

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.launcher import api

from launch.train import MENDABLE, STOPPED

FINAL = (MENDABLE, STOPPED)


class RestingAgent(LocalElasticAgent):
    """torch's agent of one host, without the restarts that nobody wants."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if any(failure.exitcode in FINAL for failure in result.failures.values()):
            self._remaining_restarts = 0
        return result


def rest_when_final() -> None:
    """Have torchrun use this agent in this process. `torch.distributed.launcher.api` names the agent it makes."""
    api.LocalElasticAgent = RestingAgent  # type: ignore[misc]
