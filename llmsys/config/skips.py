"""Rules of the skips of a U (`model.u_shaped_skips`; Ronneberger 2015, modded-nanogpt).

The output of layer i, times a trained number, is added to the input of layer L - 1 - i, for the
first half of L layers.
"""

from collections.abc import Iterator
from typing import Any

from llmsys.errors import Violation


def find_skip_violations(model: dict[str, Any]) -> Iterator[Violation]:
    """Yield what skips between layers cannot be combined with.

    Args:
        model: fields of a model that has them.
    """
    parametrization = model["parametrization"].kind
    refused = {
        "num_hidden_layers": 1 if model["num_hidden_layers"] == 1 else None,
        "family": None if model["family"] == "decoder" else model["family"],
        "rnn": None if model["rnn"] is None else model["rnn"].kind,
        "recurrence": None if model["recurrence"] is None else model["recurrence"].kind,
        "residual.kind": "reversible" if model["residual"].is_reversible else None,
        "parametrization.kind": None if parametrization == "standard" else parametrization,
    }
    for key, value in refused.items():
        if value is not None:
            yield Violation(
                "u_shaped_skips",
                f"model.{key}={value} has no layers that skips could join. Use false, or a decoder "
                "of two standard blocks or more.",
            )
