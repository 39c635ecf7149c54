"""Host time of a block: slopes between two depths, and runs whose losses are compared. No time is
asserted.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

from tests.helpers.ranks import PRELOADED
from tools.bench import host_time
from tools.bench.host_time import (
    BlockTime,
    HostTime,
    compute_block_time,
    format_row,
    merge_least,
    run_apart,
)

FEW = HostTime({"forward": 2e-3, "backward": 3e-3, "micro-batch": 7e-3}, 100.0, [1.0])
MANY = HostTime({"forward": 4e-3, "backward": 7e-3, "micro-batch": 15e-3}, 180.0, [1.0])


def test_a_block_takes_the_slope_between_two_depths() -> None:
    block = compute_block_time(FEW, MANY, 4)
    assert (block.forward, block.backward, block.rest) == pytest.approx((500, 1000, 500))
    assert block.total == pytest.approx(2000)
    assert block.operators == 20


def test_the_least_of_every_part_counts_over_rounds() -> None:
    slower = HostTime({"forward": 3e-3, "backward": 2e-3, "micro-batch": 9e-3}, 100.0, [1.0])
    merged = merge_least(FEW, slower)
    assert merged.seconds == {"forward": 2e-3, "backward": 2e-3, "micro-batch": 7e-3}
    assert (merged.operators, merged.losses) == (100.0, [1.0])


def test_a_row_has_the_share_of_the_first_path_and_says_if_losses_differ() -> None:
    block = BlockTime(500, 1000, 500, 20)
    half = replace(block, rest=0, forward=0)
    row = format_row("plain", "block", half, [1.0, 2.0], (block, [1.0, 2.0]))
    assert row == "| plain | block | 0 | 1,000 | 0 | 1,000 | 0.50 | 20.0 | equal |"
    other = format_row("ddp", "none", half, [1.0, 2.5], (block, [1.0, 2.0]))
    assert other.endswith("| differ |")


def test_a_block_without_a_wrapper_has_the_losses_of_fsdp_in_fewer_operators() -> None:
    """Three of the four measurements are forked from a process that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    words = {
        (path, layers): [
            *host_time.PATHS[path],
            "train.compile=none",
            f"model.num_hidden_layers={layers}",
        ]
        for path in ("fsdp", "plain")
        for layers in (1, 2)
    }
    apart = ("plain", 2)
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        times = {
            key: pool.submit(host_time.measure_depth, words[key], 1).result()
            for key in words
            if key != apart
        }
    times[apart] = run_apart(words[apart], 1)
    found = {path: [times[path, layers] for layers in (1, 2)] for path in ("fsdp", "plain")}
    fsdp, plain = (
        compute_block_time(few, many, 1) for few, many in (found["fsdp"], found["plain"])
    )
    assert found["plain"][1].losses == found["fsdp"][1].losses
    assert len(set(found["plain"][1].losses)) == host_time.COMPARED_STEPS
    # Gathers, copies into and out of buffers, and reductions are FSDP2's.
    assert plain.operators < 0.8 * fsdp.operators


def test_a_path_that_fails_is_told_with_its_last_lines() -> None:
    with pytest.raises(RuntimeError, match=r"layout.tensor=2: the measurement ended with\n"):
        run_apart(["layout.tensor=2"], 1)
