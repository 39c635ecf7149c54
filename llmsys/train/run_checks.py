"""Checks before training and at saves: all ranks agree, and the conditions and hashes of bitwise
reproducibility.

Before anything is built, each rank sends its versions and checksums of llmsys' source and of its
config. Later a difference would be a wrong sum or a hang."""

import hashlib
import platform
from pathlib import Path
from typing import Any

import torch

import llmsys
from llmsys.config.run import RunConfig
from llmsys.engine.engine import Engine, EngineState
from llmsys.engine.state_hash import hash_state
from llmsys.errors import CheckpointError, LaunchError
from llmsys.parallel.process_group import all_gather_object, get_rank
from llmsys.train.run_settings import list_changes


def format_bitwise_notice(config: RunConfig, micro_batches: int, device: str) -> str:
    """Return the guarantee of bitwise mode for this run and the conditions under which it holds.

    Args:
        config: the config of the run.
        micro_batches: micro-batches of one step over all ranks.
        device: device type, such as `cpu`.
    """
    return (
        "bitwise mode: the same weights and moments, bit for bit, on any power of two of "
        f"processes that divides the {micro_batches} micro-batches of a step; on devices of this "
        f"kind ({device}), with the versions in environment.json and "
        f"{config.train.threads_per_process} CPU threads per process"
    )


def hash_state_if_bitwise(config: RunConfig, state: EngineState) -> dict[str, str]:
    """Hash the state for the record of a checkpoint. Collective.

    Args:
        config: The config of the run.
        state: The state that is saved.

    Returns:
        {"state_hash": hash} in bitwise mode; empty in fast mode, where bits promise nothing.
    """
    return {"state_hash": hash_state(state)} if config.train.reproducibility == "bitwise" else {}


def check_loaded_state(engine: Engine, checkpoint: Path, record: dict[str, Any]) -> None:
    """Compare the loaded state with the hash in the record of its checkpoint. Collective.

    Args:
        engine: The engine that was filled.
        checkpoint: The checkpoint, for the message.
        record: Its record; without a hash nothing is compared.

    Raises:
        CheckpointError: The engine does not hold the bits that were saved.
    """
    saved = record.get("state_hash")
    if saved is None:
        return
    loaded = hash_state(engine.get_state())
    if loaded != saved:
        raise CheckpointError(
            f"{checkpoint} was saved with state {saved} and loads as {loaded}. Its files are "
            "intact, so the state was loaded wrongly: resume with the versions that saved it "
            "(environment.json), and report this."
        )


# Differences that a message lists.
MAX_LISTED = 5


def require_rank_agreement(config: RunConfig) -> None:
    """Compare versions, sources and config of all ranks with those of rank 0. Collective.

    Args:
        config: The config as this rank read it.

    Raises:
        LaunchError: On rank 0, if a rank differs; the other ranks exit with status 2.
    """
    own = collect_rank_facts(config)
    found = all_gather_object((platform.node(), own))
    if all(facts == found[0][1] for _, facts in found):
        return
    # Only now: configs are large, and usually equal.
    settings = all_gather_object(config.model_dump(mode="json"))
    if get_rank() != 0:
        # Rank 0 raises: one message is enough.
        raise SystemExit(2)
    raise LaunchError(format_disagreement(found, settings))


def collect_rank_facts(config: RunConfig) -> dict[str, str]:
    """Collect what must be equal on every rank.

    Args:
        config: The config as this rank read it.

    Returns:
        Versions and hashes, by the name that a message gives them.
    """
    return {
        "llmsys": llmsys.__version__,
        "the source of llmsys": _hash_source(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "the config": hashlib.blake2b(config.model_dump_json().encode(), digest_size=8).hexdigest(),
    }


def format_disagreement(
    found: list[tuple[str, dict[str, str]]], settings: list[dict[str, Any]]
) -> str:
    """Return one sentence per rank that differs from rank 0, and the next step.

    Args:
        found: (host, facts) of each rank.
        settings: the config of each rank.
    """
    first_host, first = found[0]
    lines = []
    for number, (host, facts) in enumerate(found):
        changed = [
            (name, first[name], value) for name, value in facts.items() if value != first[name]
        ]
        changed = [entry for entry in changed if entry[0] != "the config"] + list_changes(
            settings[0], settings[number]
        )
        differing = [
            f"{name} {here} (rank 0 on {first_host}: {there})" for name, there, here in changed
        ]
        if differing:
            lines.append(f"rank {number} on {host} has {'; '.join(differing[:MAX_LISTED])}")
    more = f" (and {len(lines) - MAX_LISTED} more ranks)" if len(lines) > MAX_LISTED else ""
    return (
        f"{'. '.join(lines[:MAX_LISTED])}{more}. All ranks must run the same program with the "
        "same config. Install the same versions on every host, and start every rank with the "
        "same arguments."
    )


def _hash_source() -> str:
    root = Path(llmsys.__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
