"""Every shipped training config of a small model is proven on two devices, by its last rank; the
others by `llmsys dryrun --all-configs`.
"""

from dataclasses import replace

import pytest

from llmsys.config.loading.load import read_config
from llmsys.dryrun.dry_run_request import DryRunRequest
from llmsys.dryrun.shipped_configs import SMALLEST, list_shipped_requests
from llmsys.estimate.model_tensors import list_model_tensors
from tests.helpers.dry_runs import run_forked

MAX_PARAMETERS = 30_000_000


def list_small_requests() -> list[DryRunRequest]:
    """The requests of models that a dry run takes a few seconds for."""
    found = []
    for request in list_shipped_requests():
        model = read_config(request.config, []).run.model
        # A recurrent cell is called for every position: minutes instead of seconds.
        if model.rnn is not None:
            continue
        elements = sum(row.num_elements for row in list_model_tensors(model))
        if request.world_size == SMALLEST and elements <= MAX_PARAMETERS:
            found.append(replace(request, rank=request.world_size - 1))
    return found


@pytest.mark.parametrize("wanted", list_small_requests(), ids=lambda one: one.config)
def test_a_small_config_is_proven(wanted: DryRunRequest) -> None:
    result = run_forked(wanted)
    differences = [
        one for key in ("collective_check", "block_check") for one in result[key]["differences"]
    ]
    assert differences == []
    assert result["collective_check"]["num_messages"] > 0
    assert result["is_proven"]
