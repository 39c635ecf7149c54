"""Check that all ranks run the same program with the same config, before anything is built.

Each rank sends its versions and checksums of llmsys' source and of its config. Later a difference would be a wrong sum
or a hang.
"""

import hashlib
import platform
from pathlib import Path
from typing import Any

import torch

import llmsys
from llmsys.config.run import RunConfig
from llmsys.errors import LaunchError
from llmsys.parallel.process_group import all_gather_object, get_rank

MAX_LISTED = 5
"""Differences that a message lists."""


def require_rank_agreement(config: RunConfig) -> None:
    """Compare all ranks with rank 0. Collective.

    Raises:
        LaunchError: on rank 0, if a rank differs; the other ranks exit with status 2.
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
    """Return the facts that must be equal on every rank, by name."""
    return {
        "llmsys": llmsys.__version__,
        "the source of llmsys": _hash_source(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "the config": hashlib.blake2b(config.model_dump_json().encode(), digest_size=8).hexdigest(),
    }


def format_disagreement(found: list[tuple[str, dict[str, str]]], settings: list[dict[str, Any]]) -> str:
    """Return one sentence per rank that differs from rank 0, and the next step.

    Args:
        found: (host, facts) of each rank.
        settings: the config of each rank.
    """
    first_host, first = found[0]
    lines = []
    for number, (host, facts) in enumerate(found):
        changed = [(name, first[name], value) for name, value in facts.items() if value != first[name]]
        changed = [entry for entry in changed if entry[0] != "the config"] + list_changes(settings[0], settings[number])
        differing = [f"{name} {here} (rank 0 on {first_host}: {there})" for name, there, here in changed]
        if differing:
            lines.append(f"rank {number} on {host} has {'; '.join(differing[:MAX_LISTED])}")
    more = f" (and {len(lines) - MAX_LISTED} more ranks)" if len(lines) > MAX_LISTED else ""
    return (
        f"{'. '.join(lines[:MAX_LISTED])}{more}. All ranks must run the same program with the same config. "
        "Install the same versions on every host, and start every rank with the same arguments."
    )


def list_changes(saved: Any, now: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Return (dotted key, value in `saved`, value in `now`) for every difference between nested settings."""
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = sorted(saved.keys() | now.keys())
        return [
            entry for key in keys for entry in list_changes(saved.get(key), now.get(key), f"{path}.{key}".strip("."))
        ]
    return [] if saved == now else [(path, saved, now)]


def format_changes(saved: Any, now: Any) -> list[str]:
    """Return the differences as sentences: `optimizer.learning_rate was 0.001, now 0.002`."""
    return [f"{path} was {before}, now {after}" for path, before, after in list_changes(saved, now)]


def _hash_source() -> str:
    root = Path(llmsys.__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
