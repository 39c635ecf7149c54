"""The estimate agrees with a dry run of a tiny model: at the peak, in each phase and item, and
in attention's FLOPs.
"""

from typing import Any

import pytest

from llmsys.dryrun.kernel_flops import BACKWARD_TILE, FORWARD_TILE
from tests.helpers.dry_runs import EXPERTS, LAYERS, LENGTH, run_tiny

STATE_SHARE = 0.04
"""Blocks of 512 bytes, and a step count for each parameter: much of a model of 300 KiB, nothing
of a real one.
"""


@pytest.mark.parametrize("overrides", [(), (*EXPERTS, "layout.expert=4")], ids=["dense", "experts"])
def test_the_peak_and_every_phase_are_those_of_the_estimate(overrides: tuple[str, ...]) -> None:
    estimate: dict[str, Any] = run_tiny(*overrides)["estimate"]
    assert abs(estimate["difference"]) < 0.02
    assert estimate["peak_instant"] == "at the end of backward"
    phases = {phase["phase"]: phase for phase in estimate["phases"]}
    assert phases.keys() == {
        "forward",
        "loss",
        "backward to the second block",
        "backward of the first block",
        "optimizer step",
        "evaluation",
    }
    for name, phase in phases.items():
        assert phase["dry_run_bytes"] == pytest.approx(phase["estimate_bytes"], rel=0.06), name
        for item in phase["items"]:
            allowed = STATE_SHARE * phase["estimate_bytes"]
            if name == "backward to the second block":
                allowed *= 1.5  # the branches of a block count as wholes
            assert abs(item["dry_run_bytes"] - item["estimate_bytes"]) < allowed, (name, item)


def test_gathered_weights_are_those_that_fsdp_holds_at_each_moment() -> None:
    phases = {phase["phase"]: phase for phase in run_tiny()["estimate"]["phases"]}

    def get_items(phase: str) -> tuple[int, int]:
        found = [one for one in phases[phase]["items"] if one["item"] == "gathered weights"]
        return (found[0]["dry_run_bytes"], found[0]["estimate_bytes"]) if found else (0, 0)

    # Twice in the forward, with the buffers that they travelled in; not at all when gradients
    # outside of blocks travel.
    forward, loss = get_items("forward"), get_items("loss")
    assert forward[0] == pytest.approx(forward[1], rel=0.01)
    assert loss[0] == pytest.approx(loss[1], rel=0.01)
    assert forward[1] > 1.9 * loss[1]
    assert get_items("backward of the first block") == (0, 0)


@pytest.mark.parametrize(("overrides", "rank"), [((), 0), (("layout.pipeline=2",), 4)])
def test_attention_computes_whole_tiles_of_what_the_documents_need(
    overrides: tuple[str, ...], rank: int
) -> None:
    """Also on a rank of a pipeline, which has one of the two layers."""
    result = run_tiny(*overrides, rank=rank)
    flops = result["attention_flops"]
    pairs = LENGTH * (LENGTH + 1) // 2
    # A document of 32 tokens is one tile, forward and backward.
    tile = FORWARD_TILE[0] * FORWARD_TILE[1]
    assert tile == BACKWARD_TILE[0] * BACKWARD_TILE[1]
    assert flops["ratio"] == pytest.approx(tile / pairs)
    assert [group["layers"] for group in result["kernels"]] == [1 if overrides else LAYERS]
