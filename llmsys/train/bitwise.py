"""What a run in bitwise mode says and checks beside training: what it needs, and the hash of its state at each save."""

from pathlib import Path
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.engine.engine import Engine, LogicalState
from llmsys.engine.state_hash import state_hash
from llmsys.errors import CheckpointError
from llmsys.log import logger

log = logger(__name__)


def announcement(config: RunConfig, micro_batches: int, device: str) -> str:
    """What bitwise mode promises of this run, and under which conditions; `micro_batches` of a step, over all ranks."""
    return (
        f"bitwise mode: the same weights and moments, bit for bit, on any power of two of processes that divides the "
        f"{micro_batches} micro-batches of a step; on devices of this kind ({device}), with the versions in "
        f"environment.json and {config.train.threads_per_process} CPU threads per process"
    )


def hashed(config: RunConfig, state: LogicalState) -> dict[str, str]:
    """`state_hash` for the record of a checkpoint, in bitwise mode; nothing in fast mode. Collective."""
    return {"state_hash": state_hash(state)} if config.train.reproducibility == "bitwise" else {}


def check_loaded(engine: Engine, checkpoint: Path, record: dict[str, Any]) -> None:
    """CheckpointError when the engine does not hold the bits that were saved, where their hash is known. Collective."""
    saved = record.get("state_hash")
    if saved is None:
        return
    loaded = state_hash(engine.state())
    if loaded != saved:
        raise CheckpointError(
            f"{checkpoint} was saved with state {saved} and loads as {loaded}. Its files are whole, so the loading is "
            f"wrong: resume with the versions that saved it (environment.json), and report this."
        )


def without_mode(saved: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both identities, ready to compare: one mode may go on where the other stopped, with other bits from there on."""
    if ("bitwise" in saved) == ("bitwise" in now):
        return saved, now
    modes = ["fast" if "bitwise" not in one else "bitwise" for one in (saved, now)]
    log.info("so far in %s mode, from here on in %s mode", *modes)
    return tuple({k: v for k, v in one.items() if k != "bitwise"} for one in (saved, now))  # type: ignore[return-value]
