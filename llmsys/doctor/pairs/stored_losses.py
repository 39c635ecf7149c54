"""The losses by document that a run has stored, joined to the steps that it trained.

Reads `document_losses/` of the run folders of a case.
"""

from collections.abc import Sequence
from dataclasses import replace

from llmsys.config.run import RunConfig
from llmsys.dataset.loss_parts import read_loss_parts
from llmsys.doctor.pairs.events import Entry
from llmsys.doctor.pairs.phase import Phase
from llmsys.doctor.pairs.plain_losses import DocumentLosses
from llmsys.train.run_data import open_run_data


class StoredLossError(Exception):
    """Losses are stored of a step that the run has not trained, or with another outcome."""


def add_stored_losses(entries: Sequence[Entry], phases: Sequence[Phase]) -> list[Entry]:
    """Return the entries with the losses by document that their run has stored.

    A step that was trained again after a load has those of its last time, and none at the times
    before. A step of which none are stored has an empty record.

    Args:
        entries: what the run did, in order.
        phases: its phases; unchanged entries are returned where they record no losses.

    Raises:
        StoredLossError: losses are stored of a step that is not trained at the end of the run, or
            of a refused step as of one that was applied, or the other way round.
    """
    joined = list(entries)
    for run in sorted({phase.run for phase in phases}):
        config = next(phase.config for phase in phases if phase.run == run)
        if not config.train.record_document_losses:
            continue
        places = find_last_places(entries, run)
        stored = _read_steps(config)
        for step, (is_applied, _) in stored.items():
            if step not in places:
                raise StoredLossError(f"losses of step {step} are stored, which was not trained")
            if is_applied != entries[places[step]].action.is_applied:
                text = "applied" if is_applied else "refused"
                raise StoredLossError(f"step {step} is stored as {text}, and was not")
        for step, place in places.items():
            losses = stored[step][1] if step in stored else {}
            joined[place] = replace(entries[place], documents=losses)
    return joined


def find_last_places(entries: Sequence[Entry], run: int) -> dict[int, int]:
    """Return the index of the last entry that trains each step, without steps that were left after
    a load.

    Args:
        entries: what the run did, in order.
        run: 0, or 1 for the branch.
    """
    places: dict[int, int] = {}
    for place, entry in enumerate(entries):
        action = entry.action
        if action.run != run:
            continue
        if action.kind == "train":
            places[action.step] = place
        if action.kind == "load":
            places = {step: before for step, before in places.items() if step <= action.step}
    return places


def _read_steps(config: RunConfig) -> dict[int, tuple[bool, DocumentLosses]]:
    """Return the outcome of each stored step, and its losses."""
    fingerprints = [source.fingerprint for source in open_run_data(config, "train").sources]
    steps: dict[int, tuple[bool, DocumentLosses]] = {}
    for batch in read_loss_parts(config.run.folder, fingerprints):
        for row in batch.to_pylist():
            is_applied, losses = steps.setdefault(row["step"], (row["applied"], {}))
            if is_applied != row["applied"]:
                raise StoredLossError(f"step {row['step']} is stored both as applied and refused")
            key = (row["source"], row["epoch"], row["document"])
            tokens, nats = losses.get(key, (0, 0.0))
            losses[key] = tokens + row["tokens"], nats + row["nats"]
    return steps
