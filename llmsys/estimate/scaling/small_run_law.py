"""Predict held-out bits per byte of a small decoder from its size, its tokens and its text.

The shape is the law of the ladder of recipes, in nats per token: texts differ in it by a few
percent only, and in the bytes of a token by half. So a text is known by how long its tokens are.
Reads `small_runs.yaml`, which has the shape and measured runs, with how they were measured. The
interval is that of runs whose text the fit has not seen.

The ladder ends at a million parameters, beyond which more of them change nothing in its law. So
from LADDER_BYTES on a published law of large runs counts too, the more, the more tokens there are.
Its runs begin at a hundred times as many, and nothing is measured between the two.
"""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import Field

from llmsys.config.section import Section
from llmsys.estimate.percentile_interval import (
    Z90,
    PercentileInterval,
    build_log_normal_interval,
)
from llmsys.estimate.scaling.chinchilla import compute_effective_amount
from llmsys.estimate.scaling.published_laws import BESIROGLU, MUENNIGHOFF

FILE = Path(__file__).with_name("small_runs.yaml")
# Share of the known runs that an interval from P10 to P90 holds. When it stood for eight in ten it
# held 11 of 19 texts that were new to the fit: people's texts differ more than known ones.
INSIDE = 0.9
# Outside of the fitted range: widening of the logarithm's deviation per factor of e.
EXTRAPOLATION_SPREAD = 0.03
# Deviation of the logarithm of `token_length` among texts, for one whose tokens are not measured.
UNKNOWN_LENGTH_SPREAD = 0.15
# Bytes of a token of the published law in English web text, by its vocabulary of 32,000 pieces, and
# trained bytes from which it holds alone: those of its smallest runs (44M parameters, 2B tokens).
PUBLISHED_TOKEN_BYTES = 4.3
PUBLISHED_BYTES = 1e10
# Trained bytes up to which the ladder counts alone: an evening on a few cores.
LADDER_BYTES = 1e8


class LadderShape(Section):
    """L = E + A / N^alpha + B / D^beta of the ladder, in nats per token of one text."""

    e: float = Field(gt=0, description="Loss that remains.")
    a: float = Field(gt=0, description="Factor of the term of parameters.")
    alpha: float = Field(gt=0, description="Exponent of parameters.")
    b: float = Field(gt=0, description="Factor of the term of tokens.")
    beta: float = Field(gt=0, description="Exponent of tokens.")
    bytes_per_token: float = Field(gt=0, description="Bytes of a token of the ladder.")


class SmallRun(Section):
    """A measured run: all that the law reads, and the bits per byte at its end."""

    text: str = Field(description="Name of the text.")
    parameters: int = Field(ge=1, description="Parameters.")
    tokens: int = Field(ge=1, description="Trained tokens.")
    unique_tokens: int = Field(ge=1, description="Tokens of one pass over the training text.")
    bytes_per_token: float = Field(gt=0, description="Bytes of a token of the training text.")
    token_length: float = Field(
        gt=0,
        description="Bytes of a token of a sample, by those of English web text with as many "
        "pieces.",
    )
    bits_per_byte: float = Field(gt=0, description="Held-out bits per byte at the end.")


class SmallRuns(Section):
    """The file of measurements."""

    format_version: int = Field(ge=2, le=2, description="Version of the format.")
    measured: str = Field(description="How, where and when.")
    ladder: LadderShape = Field(description="Shape of the law.")
    runs: tuple[SmallRun, ...] = Field(min_length=4, description="Measured runs.")


@dataclass(frozen=True)
class SmallRunLaw:
    """Nats per token = shape · exp(level). `spread` is the deviation of the logarithm by which an
    interval from P10 to P90 holds `INSIDE` of the known texts.
    """

    shape: LadderShape
    level: float
    spread: float
    parameters: tuple[float, float]
    trained_bytes: tuple[float, float]

    def predict_bits_per_byte(
        self,
        *,
        parameters: float,
        tokens: float,
        unique_tokens: float,
        bytes_per_token: float,
        token_length: float | None,
        most_bytes: float = 0.0,
    ) -> PercentileInterval:
        """Predict the loss at the end of a run whose learning rate falls to zero.

        Args:
            parameters: Parameters of the model.
            tokens: Trained tokens.
            unique_tokens: Tokens of one pass over the training text.
            bytes_per_token: Bytes of a token.
            token_length: Bytes of a token of the text, by those of English web text with as many
                pieces; None where they are not known.
            most_bytes: Trained bytes of the smallest model in the same time: models that are
                compared have the same share of the published law.

        Returns:
            Bits per byte: P10, P50 and P90, wider outside of the fitted runs.
        """
        curve = compute_curve(
            self.shape, parameters, tokens, unique_tokens, bytes_per_token, token_length or 1.0
        )
        trained_bytes = tokens * bytes_per_token
        share = _compute_published_share(max(trained_bytes, most_bytes))
        published = _predict_published_bits(
            parameters, tokens, unique_tokens, bytes_per_token, token_length or 1.0
        )
        median = (math.exp(self.level) * curve) ** (1 - share) * published**share
        unknown = UNKNOWN_LENGTH_SPREAD if token_length is None else 0.0
        beyond = _measure_distance(parameters, self.parameters) + _measure_distance(
            trained_bytes, self.trained_bytes
        )
        return build_log_normal_interval(
            median, math.hypot(self.spread, unknown, EXTRAPOLATION_SPREAD * beyond)
        )


def compute_curve(
    shape: LadderShape,
    parameters: float,
    tokens: float,
    unique_tokens: float,
    bytes_per_token: float,
    token_length: float,
) -> float:
    """Return the loss of the ladder in bits per byte of a text with other tokens.

    Tokens of other vocabularies count as bytes, so that vocabularies compare; repeated ones count
    for less.

    Args:
        shape: Constants of the ladder.
        parameters: Parameters of the model.
        tokens: Trained tokens.
        unique_tokens: Tokens of one pass over the training text.
        bytes_per_token: Bytes of a token.
        token_length: Bytes of a token of the text, by those of the ladder's text with as many
            pieces.
    """
    worth = _weigh_repetitions(tokens, unique_tokens)
    ladder_bytes = shape.bytes_per_token * token_length
    same = worth * bytes_per_token / ladder_bytes
    nats: float = shape.e + shape.a / parameters**shape.alpha + shape.b / same**shape.beta
    return nats / math.log(2) / ladder_bytes


def _weigh_repetitions(tokens: float, unique_tokens: float) -> float:
    """Return the tokens of new text that teach as much as `tokens` over `unique_tokens`."""
    if tokens > unique_tokens:
        return compute_effective_amount(tokens, unique_tokens, MUENNIGHOFF.token_decay)
    return tokens


def _compute_published_share(trained_bytes: float) -> float:
    """Return how much the published law counts, by the logarithm of the trained bytes."""
    beyond = math.log(trained_bytes / LADDER_BYTES) / math.log(PUBLISHED_BYTES / LADDER_BYTES)
    return min(1.0, max(0.0, beyond))


def _predict_published_bits(
    parameters: float,
    tokens: float,
    unique_tokens: float,
    bytes_per_token: float,
    token_length: float,
) -> float:
    """Return the loss of the published law in bits per byte of a text with other tokens; see
    `compute_curve`.
    """
    worth = _weigh_repetitions(tokens, unique_tokens)
    own_bytes = PUBLISHED_TOKEN_BYTES * token_length
    nats = BESIROGLU.predict_loss(parameters, worth * bytes_per_token / own_bytes)
    return nats / math.log(2) / own_bytes


def _measure_distance(value: float, fitted: tuple[float, float]) -> float:
    """Return by how many factors of e a value is outside of a range."""
    low, high = fitted
    return max(0.0, math.log(value / high), math.log(low / value))


def fit_small_runs(runs: SmallRuns) -> SmallRunLaw:
    """Fit the level of the law to measured runs.

    Args:
        runs: The measurements.

    Returns:
        The law; its interval is that of nine in ten runs left out with their whole text.
    """
    rests_R = np.array([_compute_rest(runs.ladder, run) for run in runs.runs])
    texts = np.array([run.text for run in runs.runs])
    errors_R = np.empty_like(rests_R)
    for text in set(texts):
        left_out = texts == text
        errors_R[left_out] = rests_R[left_out] - rests_R[~left_out].mean()
    sizes = [float(run.parameters) for run in runs.runs]
    amounts = [run.tokens * run.bytes_per_token for run in runs.runs]
    return SmallRunLaw(
        runs.ladder,
        float(rests_R.mean()),
        _find_inner_error(np.abs(errors_R)) / Z90,
        (min(sizes), max(sizes)),
        (min(amounts), max(amounts)),
    )


def _find_inner_error(errors_R: npt.NDArray[np.float64]) -> float:
    """Return the error that a share of new runs stays within, if they are like the known ones.

    Errors of texts have heavier tails than a normal law, so it is a rank, with one more run for
    the new one (conformal prediction: Vovk, Gammerman and Shafer 2005).
    """
    rank = min(len(errors_R), math.ceil(INSIDE * (len(errors_R) + 1)))
    return float(np.sort(errors_R)[rank - 1])


def _compute_rest(shape: LadderShape, run: SmallRun) -> float:
    curve = compute_curve(
        shape,
        run.parameters,
        run.tokens,
        run.unique_tokens,
        run.bytes_per_token,
        run.token_length,
    )
    return math.log(run.bits_per_byte / curve)


@cache
def load_small_run_law() -> SmallRunLaw:
    """Load the measurements that came with llmsys, and fit them.

    Returns:
        The law.
    """
    from llmsys.estimate.device_profile import read_profile_values

    values, _ = read_profile_values(FILE)
    return fit_small_runs(SmallRuns.model_validate(values))
