"""What a run in bitwise mode says and checks beside training: what it needs, and the hash of its state at each save."""

from pathlib import Path
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.engine.engine import Engine, EngineState
from llmsys.engine.state_hash import hash_state
from llmsys.errors import CheckpointError
from llmsys.log import get_logger

log = get_logger(__name__)


def format_bitwise_notice(config: RunConfig, micro_batches: int, device: str) -> str:
    """What bitwise mode promises of this run, and under which conditions; `micro_batches` of a step, over all ranks."""
    return (
        f"bitwise mode: the same weights and moments, bit for bit, on any power of two of processes that divides the "
        f"{micro_batches} micro-batches of a step; on devices of this kind ({device}), with the versions in "
        f"environment.json and {config.train.threads_per_process} CPU threads per process"
    )


def hash_state_if_bitwise(config: RunConfig, state: EngineState) -> dict[str, str]:
    """`hash_state` for the record of a checkpoint, in bitwise mode; nothing in fast mode. Collective."""
    return {"state_hash": hash_state(state)} if config.train.reproducibility == "bitwise" else {}


def check_loaded_state(engine: Engine, checkpoint: Path, record: dict[str, Any]) -> None:
    """CheckpointError when the engine does not hold the bits that were saved, where their hash is known. Collective."""
    saved = record.get("state_hash")
    if saved is None:
        return
    loaded = hash_state(engine.get_state())
    if loaded != saved:
        raise CheckpointError(
            f"{checkpoint} was saved with state {saved} and loads as {loaded}. Its files are whole, so the loading is "
            f"wrong: resume with the versions that saved it (environment.json), and report this."
        )


def drop_reproducibility_mode(saved: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both identities, ready to compare: one mode may go on where the other stopped, with other bits from there on."""
    if ("bitwise" in saved) == ("bitwise" in now):
        return saved, now
    modes = ["fast" if "bitwise" not in one else "bitwise" for one in (saved, now)]
    log.info("so far in %s mode, from here on in %s mode", *modes)
    return tuple({k: v for k, v in one.items() if k != "bitwise"} for one in (saved, now))  # type: ignore[return-value]
