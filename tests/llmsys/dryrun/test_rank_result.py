"""Numbers of a dry run that follow from its config: what compiled blocks save, by hand."""

from types import SimpleNamespace
from typing import Any

from llmsys.config.loading.load import read_config
from llmsys.dryrun.rank_result import estimate_compiled_saving
from llmsys.estimate.device_profile import load_device_profile

LAYERS, LENGTH, INNER, BF16 = 32, 8192, 14336, 2


def estimate_saving(*overrides: str) -> int:
    config = read_config("train/llama-8b-64xh100", ["train.precision=bf16", *overrides]).run
    request, profile = SimpleNamespace(rank=0), load_device_profile("h100-sxm")
    session: Any = SimpleNamespace(
        config=config, layout=config.resolve_layout(64), profile=profile, request=request
    )
    return estimate_compiled_saving(session)


def test_compiled_blocks_keep_no_activated_gate() -> None:
    gate = LENGTH * INNER * BF16
    assert estimate_saving("train.compile=block") == LAYERS * gate
    # With full recomputation one block is in memory at a time.
    assert estimate_saving("train.compile=block", "train.activation_checkpoint=full") < 3 * gate
    assert estimate_saving("train.compile=none") == 0
