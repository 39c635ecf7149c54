"""Rules of a ring of context ranks. Each violation names the value, the rule and the remedy."""

from collections.abc import Iterator

from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.section import list_divisors
from llmsys.errors import Violation, format_choices


def find_ring_violations(
    layout: ParallelLayout, model: ModelConfig, sequence_length: int
) -> Iterator[Violation]:
    """Yield the violations of a ring of context ranks.

    Args:
        layout: the `layout:` section, with a ring.
        model: the architecture.
        sequence_length: positions of a sequence.

    Returns:
        An iterator over violations; keys are relative to `layout`.
    """
    ring = layout.ring_size
    if layout.context % ring:
        yield Violation(
            "ring",
            f"{ring} members cannot share context={layout.context} ranks equally. Use "
            f"ring={format_choices(list_divisors(layout.context)[1:])}, or context_kind=ring.",
        )
    if sequence_length % (2 * ring):
        near = max(1, round(sequence_length / (2 * ring))) * 2 * ring
        yield Violation(
            "context_kind",
            f"{layout.context_kind} deals two chunks of a sequence to each of {ring} members, and "
            f"batch.sequence_length={sequence_length} cannot be divided by {2 * ring}. Use "
            f"batch.sequence_length={near}.",
        )
    choices = {
        f"model.position.kind={model.position.kind}, whose bias of the scores is trained,": (
            model.position.has_trained_scores
        ),
        f"model.dropout.attention={model.dropout.attention}": model.dropout.attention > 0,
    }
    for choice in (choice for choice, found in choices.items() if found):
        yield Violation(
            "context_kind",
            f"{layout.context_kind} merges attention of keys that arrive one after another, which "
            f"{choice} has no form for. Use context_kind=ulysses, or another position kind "
            "without dropout of attention.",
        )
