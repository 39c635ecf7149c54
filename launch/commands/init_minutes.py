"""Size a run to wall minutes for `llmsys init --minutes`: probe the machine, choose model and
tokens by the law of small runs, measure the chosen model's step, and promise minutes and loss.
"""

import datetime
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmsys.config.promise import PromiseConfig, PromisedInterval
from llmsys.config.train import EVALUATED_COST
from llmsys.errors import ConfigError
from llmsys.estimate.percentile_interval import (
    Z90,
    PercentileInterval,
    build_log_normal_interval,
)

if TYPE_CHECKING:
    from llmsys.config.run import RunConfig
    from llmsys.config.train import Precision
    from llmsys.data_pipeline.inspection.text_sample import TextSample
    from llmsys.estimate.device_profile import DeviceProfile
    from llmsys.estimate.scaling.small_run_law import SmallRunLaw

# hidden size, blocks, heads; head sizes are multiples of 16.
SIZES = (
    (64, 3, 2),
    (96, 3, 3),
    (128, 4, 4),
    (160, 4, 5),
    (192, 4, 3),
    (256, 4, 4),
    (320, 6, 5),
    (384, 6, 6),
    (512, 8, 8),
    (768, 12, 12),
    (1024, 16, 16),
    (1536, 20, 24),
)
# Vocabularies, bytes of their tokens (measured on English web text), and the trained tokens from
# which each is worth its rows.
VOCABULARIES = (
    (512, 1.6, 0.0),
    (1_024, 2.4, 0.0),
    (2_048, 2.95, 3e5),
    (4_096, 3.3, 2e6),
    (8_192, 3.8, 1e7),
    (32_000, 4.3, 3e8),
)
# A vocabulary is trained on the text: it needs some hundred bytes for each piece.
PIECE_BYTES = 60
# Fewer are for small texts alone: half of 512 pieces are bytes, the law has no run with them, and
# one was 22 % worse than it said.
MIN_PIECES = 1_024
# A text has more characters than its sample: measured on two crawls, eight and ten times the bytes
# have 1.7 and 1.8 times as many. The exponent has a margin.
CHARACTER_EXPONENT = 0.3
# Pieces of bytes and of control, and those for more than characters.
OTHER_PIECES, PIECES_PER_CHARACTER = 300, 1.25
# Those whose tokens are measured: a sample is too small for larger ones.
MEASURED_VOCABULARIES = tuple(pieces for pieces, _, _ in VOCABULARIES if pieces <= 8_192)
SEQUENCE_LENGTH = 256
# Steps of a run: fewer do not train a small model, more are a waste of small matrices.
TARGET_STEPS = 800
MIN_STEP_TOKENS, MAX_STEP_TOKENS = 1_024, 131_072
# Held-out tokens, as a share of the trained ones: a fifteenth of the time.
EVALUATED_SHARE = 0.1
# Passes over the text: after more of them a repeated token teaches little.
MAX_PASSES = 8
# Share of the time for checkpoints and samples.
RESERVE = 0.03
PROBE_SECONDS = 5.0
# Deviation of the logarithm of minutes: the run fits its tokens to them (train.fit_minutes), and
# what is left is the evaluation at its end, whose seconds are an estimate.
FIT_SPREAD = 0.04
# The same beside other programs, by five runs: the evaluation may get a fraction of a core.
BUSY_FIT_SPREAD = 0.09
# Seconds of a run that no plan sees, such as the last checkpoint.
UNPLANNED_SECONDS = 1.0
# Deviations of the logarithm of the tokens that fit. The probe is seconds, and the run is minutes
# on a machine that others use too.
LOAD_SPREAD = 0.07
# The same where more programs want to run than there are cores: measured over the minutes of eight
# runs with a fixed budget on such a machine (docs/measurements/first-models.md).
BUSY_SPREAD = 0.48
# What a profile knows of a step that it has not seen.
PROFILE_SPREAD = 0.25
MIN_MINUTES, MAX_MINUTES = 0.2, 7 * 24 * 60


@dataclass(frozen=True)
class SizedRun:
    """A model, its budget and what is promised.

    Attributes:
        vocabulary: Pieces of the tokenizer.
        hidden_size: Width.
        blocks: Layers.
        heads: Attention heads.
        sequences: Sequences of 256 tokens in a step.
        tokens: Budget, in whole steps.
        evaluated_tokens: Held-out tokens that are evaluated.
        unique_tokens: Tokens of one pass over the text, by the sample.
        bytes_per_token: Of the vocabulary.
        parameters: Of the model.
        step_seconds: Measured, or by the profile of the accelerator.
        how: How the step's time is known.
        threads: CPU threads that were fastest; 0 for the default.
        asked_minutes: What `--minutes` asked for.
        promise: Minutes and bits per byte.
    """

    vocabulary: int
    hidden_size: int
    blocks: int
    heads: int
    sequences: int
    tokens: int
    evaluated_tokens: int
    unique_tokens: float
    bytes_per_token: float
    parameters: int
    step_seconds: float
    how: str
    threads: int
    asked_minutes: float
    promise: PromiseConfig

    def list_overrides(self) -> list[str]:
        """Return the words that describe the model and its batch."""
        return list_size_overrides(
            self.vocabulary, (self.hidden_size, self.blocks, self.heads), self.sequences
        )


def list_size_overrides(vocabulary: int, size: tuple[int, int, int], sequences: int) -> list[str]:
    """Return the words of a model's size and its batch, over the config of a decoder.

    Args:
        vocabulary: Rows of the embedding.
        size: Hidden size, blocks, heads.
        sequences: Sequences of a step.

    Returns:
        Overrides.
    """
    hidden, blocks, heads = size
    values = {
        "model.vocab_size": vocabulary,
        "model.hidden_size": hidden,
        "model.intermediate_size": compute_intermediate_size(hidden),
        "model.num_hidden_layers": blocks,
        "model.num_attention_heads": heads,
        "model.num_key_value_heads": heads,
        "model.head_dim": hidden // heads,
        "model.tie_word_embeddings": "true",
        "batch.sequence_length": SEQUENCE_LENGTH,
        "batch.sequences": sequences,
    }
    return [f"{key}={value}" for key, value in values.items()]


def compute_intermediate_size(hidden: int) -> int:
    """Return the width of the feed-forward layer: 8/3 of the hidden size, a multiple of 16.

    Args:
        hidden: Hidden size.
    """
    return 16 * round(hidden * 8 / 3 / 16)


def require_minutes(minutes: float) -> None:
    """Raise ConfigError for minutes that no run can be sized to.

    Args:
        minutes: Of `--minutes`.
    """
    if not MIN_MINUTES <= minutes <= MAX_MINUTES:
        raise ConfigError(
            f"--minutes {minutes:g} is not between {MIN_MINUTES:g} (shorter runs train "
            f"nothing) and {MAX_MINUTES:,} (a week). Give the minutes that training may take, such "
            "as --minutes 10."
        )


def plan_run_minutes(minutes: float, text_bytes: float, sample: "TextSample") -> SizedRun:
    """Choose the model and the tokens with the lowest predicted loss in the given time.

    Args:
        minutes: Wall minutes of training and its final evaluation.
        text_bytes: Bytes of the text after preparation, by the sample.
        sample: The measured text.

    Returns:
        The run, with its promise.

    Raises:
        ConfigError: The minutes are out of range, the text is too small, or the accelerator of
            this machine has no profile.
    """
    from llmsys.calibrate.machine_probe import get_machine_profile
    from llmsys.estimate.scaling.small_run_law import load_small_run_law
    from llmsys.log import get_logger

    require_minutes(minutes)
    profile = get_machine_profile(renew=True)
    law = load_small_run_law()
    seconds = 60 * minutes * (1 - RESERVE)
    options = list(_iter_options(seconds, text_bytes, sample, profile))
    if not options:
        raise ConfigError(
            f"{minutes:g} minutes are too short for a model of {SIZES[0][0]} channels, or "
            f"{text_bytes:,.0f} bytes of text too few for a step. Give more of either."
        )
    most = max(one.tokens * one.bytes_per_token for one in options)
    best = min(options, key=lambda one: one.predict_loss(law, one.tokens, most).p50)
    get_logger(__name__).info("measuring steps of the chosen model")
    return _build_run(best, minutes, _measure_step(best, profile), profile, law, sample, most)


@dataclass(frozen=True)
class _Option:
    """A model with the tokens that fit the time by the profile."""

    vocabulary: int
    size: tuple[int, int, int]
    sequences: int
    tokens: float
    unique_tokens: float
    bytes_per_token: float
    token_length: float | None
    parameters: int
    config: "RunConfig"

    def predict_loss(
        self, law: "SmallRunLaw", tokens: float, most_bytes: float
    ) -> PercentileInterval:
        """Return the bits per byte of the model after some tokens."""
        return law.predict_bits_per_byte(
            parameters=self.parameters,
            tokens=tokens,
            unique_tokens=self.unique_tokens,
            bytes_per_token=self.bytes_per_token,
            token_length=self.token_length,
            most_bytes=most_bytes,
        )


def _iter_options(
    seconds: float,
    text_bytes: float,
    sample: "TextSample",
    profile: "DeviceProfile",
) -> Iterator[_Option]:
    """Yield every model and vocabulary with the tokens of the time."""
    from llmsys.config.loading.load import read_config
    from llmsys.estimate.model_tensors import count_parameters
    from llmsys.estimate.step_time import estimate_step_time

    precision = _find_precision(profile)
    needed = _count_needed_pieces(sample, text_bytes)
    least = needed if text_bytes < PIECE_BYTES * MIN_PIECES else max(needed, MIN_PIECES)
    fitting = [one for one in VOCABULARIES if one[0] >= least] or [VOCABULARIES[-1]]
    least_vocabulary = fitting[0][0]
    for size in SIZES:
        for vocabulary, english_bytes, least_tokens in fitting:
            length = _compare_token_length(sample, vocabulary, text_bytes)
            size_of_token = english_bytes * (length or 1.0)
            unique = text_bytes / size_of_token
            sequences = MIN_STEP_TOKENS // SEQUENCE_LENGTH
            while True:
                words = list_size_overrides(vocabulary, size, sequences)
                config = read_config("model/llama3.2-1b", words).run.resolve_precision(precision)
                step = estimate_step_time(config, config.resolve_layout(1), profile).seconds.p50
                step_tokens = sequences * SEQUENCE_LENGTH
                tokens = min(_count_tokens(seconds, step / step_tokens), MAX_PASSES * unique)
                if tokens < 2 * TARGET_STEPS * step_tokens or step_tokens >= MAX_STEP_TOKENS:
                    break
                sequences *= 2
            is_earned = tokens >= least_tokens and text_bytes >= PIECE_BYTES * vocabulary
            if tokens < 20 * step_tokens or not (is_earned or vocabulary == least_vocabulary):
                continue
            parameters = count_parameters(config.model).total
            yield _Option(
                vocabulary,
                size,
                sequences,
                tokens,
                unique,
                size_of_token,
                length,
                parameters,
                config,
            )


def _find_precision(profile: "DeviceProfile") -> "Precision":
    """Return what `train.precision: auto` becomes on the machine: a processor's profile has a rate
    of bf16 also where it only emulates it.
    """
    import torch

    from llmsys.train.precision import choose_native_precision

    if profile.compute_capability is not None:
        return "bf16" if "bf16" in profile.peak_flops else "fp32"
    return choose_native_precision(torch.device("cpu"))


def _count_needed_pieces(sample: "TextSample", text_bytes: float) -> float:
    """Return the pieces of the smallest vocabulary: SentencePiece refuses one with fewer than the
    text has characters.
    """
    characters = sample.num_characters * _estimate_growth(sample, text_bytes)
    return PIECES_PER_CHARACTER * (characters + OTHER_PIECES)


def _estimate_growth(sample: "TextSample", text_bytes: float) -> float:
    """Return by what factor the text of a tokenizer has more characters than the sample."""
    from llmsys.config.tokenizer import SentencePieceConfig

    seen = min(text_bytes, SentencePieceConfig().sample_bytes)
    growth: float = max(1.0, seen / sample.num_bytes) ** CHARACTER_EXPONENT
    return growth


def _compare_token_length(sample: "TextSample", vocabulary: int, text_bytes: float) -> float | None:
    """Return the bytes of a token of the text by those of English web text; None where the sample
    is too small for any vocabulary.

    A sample has fewer characters, which leaves more pieces for words. So it is asked with a
    smaller vocabulary.
    """
    english = {pieces: length for pieces, length, _ in VOCABULARIES}
    measured = sample.bytes_per_token
    if not measured:
        return None
    wanted = vocabulary / _estimate_growth(sample, text_bytes)
    if vocabulary >= MIN_PIECES:
        measured = {one: size for one, size in measured.items() if one >= MIN_PIECES} or measured
    nearest = min(measured, key=lambda pieces: abs(math.log(pieces / wanted)))
    return measured[nearest] / english[nearest]


def _count_tokens(seconds: float, seconds_per_token: float) -> float:
    """Return the tokens whose training and evaluation take the seconds."""
    return seconds / seconds_per_token / (1 + EVALUATED_SHARE * EVALUATED_COST)


@dataclass(frozen=True)
class _StepTime:
    """Seconds of a step, the deviation of their logarithm in a run, how they are known, and the
    threads that are fastest (0: those of the default).
    """

    seconds: float
    spread: float
    how: str
    threads: int


def _measure_step(option: _Option, profile: "DeviceProfile") -> _StepTime:
    """Return the time of a step of the chosen model."""
    from llmsys.estimate.step_time import estimate_step_time

    if profile.compute_capability is not None:
        found = estimate_step_time(option.config, option.config.resolve_layout(1), profile)
        how = f"by the profile of {profile.name}, not measured"
        return _StepTime(found.seconds.p50, PROFILE_SPREAD, how, 0)
    from llmsys.calibrate.training_steps import measure_fastest_rate
    from llmsys.parallel.process_group import init_process_group

    with init_process_group():
        rate = measure_fastest_rate(option.config, PROBE_SECONDS)
    how = f"{rate.steps} steps measured here on {rate.threads} threads"
    load = LOAD_SPREAD
    if _is_busy():
        load = BUSY_SPREAD
        how += "; other programs keep this machine busy, so the tokens may become others"
    spread = math.hypot(load, rate.spread)
    return _StepTime(rate.seconds, spread, how, rate.threads)


def _is_busy() -> bool:
    """Return whether more programs want to run than there are cores, this one left out."""
    # Windows has no load average.
    average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return average - 1 > (os.cpu_count() or 1)


def _build_run(
    option: _Option,
    minutes: float,
    measured: _StepTime,
    profile: "DeviceProfile",
    law: "SmallRunLaw",
    sample: "TextSample",
    most_bytes: float,
) -> SizedRun:
    """Return the run whose tokens fit the measured step."""
    step = measured.seconds
    step_tokens = option.sequences * SEQUENCE_LENGTH
    seconds = 60 * minutes * (1 - RESERVE)
    wanted = min(_count_tokens(seconds, step / step_tokens), MAX_PASSES * option.unique_tokens)
    tokens = max(10, int(wanted / step_tokens)) * step_tokens
    evaluated = max(step_tokens, int(EVALUATED_SHARE * tokens / step_tokens) * step_tokens)
    took = (tokens + EVALUATED_COST * evaluated) / step_tokens * step / 60 / (1 - RESERVE)
    # Another speed is another number of tokens, and so another loss.
    factor = math.exp(measured.spread)
    slow, middle, fast = (
        option.predict_loss(law, trained, most_bytes)
        for trained in (tokens / factor, tokens, tokens * factor)
    )
    of_speed = abs(math.log(slow.p50 / fast.p50)) / 2
    # Held-out documents may be of another kind than those of the sample.
    heldout_bytes = evaluated * option.bytes_per_token
    of_documents = sample.document_spread * math.sqrt(1 + sample.num_bytes / heldout_bytes)
    loss = _widen_interval(middle, math.hypot(of_speed, of_documents))
    fit = BUSY_FIT_SPREAD if _is_busy() else FIT_SPREAD
    spread = math.hypot(fit, UNPLANNED_SECONDS / (60 * took))
    promise = PromiseConfig(
        minutes=_round_interval(build_log_normal_interval(took, spread)),
        bits_per_byte=_round_interval(loss),
        tokens=tokens,
        machine=profile.sources.get("machine", profile.name),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )
    return SizedRun(
        option.vocabulary,
        *option.size,
        option.sequences,
        tokens,
        evaluated,
        option.unique_tokens,
        option.bytes_per_token,
        option.parameters,
        step,
        measured.how,
        measured.threads,
        minutes,
        promise,
    )


def _widen_interval(interval: PercentileInterval, spread: float) -> PercentileInterval:
    """Return a log-normal interval with one more deviation of the logarithm."""
    own = math.log(interval.p90 / interval.p50) / Z90
    return build_log_normal_interval(interval.p50, math.hypot(own, spread))


def _round_interval(interval: PercentileInterval) -> PromisedInterval:
    low, middle, high = (
        float(f"{value:.3g}") for value in (interval.p10, interval.p50, interval.p90)
    )
    return PromisedInterval(low=low, middle=middle, high=high)
