"""Checks of `train.reproducibility: bitwise`: its conditions at the start, and the hash of the state at every save."""

from pathlib import Path
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.engine.engine import Engine, EngineState
from llmsys.engine.state_hash import hash_state
from llmsys.errors import CheckpointError
from llmsys.log import get_logger

log = get_logger(__name__)


def format_bitwise_notice(config: RunConfig, micro_batches: int, device: str) -> str:
    """Return the guarantee of bitwise mode for this run and the conditions under which it holds.

    Args:
        config: the config of the run.
        micro_batches: micro-batches of one step over all ranks.
        device: device type, such as `cpu`.
    """
    return (
        f"bitwise mode: the same weights and moments, bit for bit, on any power of two of processes that divides the "
        f"{micro_batches} micro-batches of a step; on devices of this kind ({device}), with the versions in "
        f"environment.json and {config.train.threads_per_process} CPU threads per process"
    )


def hash_state_if_bitwise(config: RunConfig, state: EngineState) -> dict[str, str]:
    """Return {"state_hash": hash} for the record of a checkpoint; empty in fast mode. Collective."""
    return {"state_hash": hash_state(state)} if config.train.reproducibility == "bitwise" else {}


def check_loaded_state(engine: Engine, checkpoint: Path, record: dict[str, Any]) -> None:
    """Compare the loaded state with the hash in the checkpoint's record, if it has one. Collective.

    Raises:
        CheckpointError: the engine does not hold the bits that were saved.
    """
    saved = record.get("state_hash")
    if saved is None:
        return
    loaded = hash_state(engine.get_state())
    if loaded != saved:
        raise CheckpointError(
            f"{checkpoint} was saved with state {saved} and loads as {loaded}. Its files are intact, so the "
            "state was loaded wrongly: resume with the versions that saved it (environment.json), and report "
            "this."
        )


def drop_reproducibility_mode(saved: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return both identities without the mode where they differ in it, and log the change.

    A run may continue in the other mode; the bits differ from there on.
    """
    # The key is present in bitwise mode only.
    if ("bitwise" in saved) == ("bitwise" in now):
        return saved, now
    modes = ["fast" if "bitwise" not in one else "bitwise" for one in (saved, now)]
    log.info("until now in %s mode, from now on in %s mode", *modes)
    return tuple({k: v for k, v in one.items() if k != "bitwise"} for one in (saved, now))  # type: ignore[return-value]
