"""Write a run that was sized to minutes: the sections of its config, and its promise for people."""

from collections.abc import Iterator

from llmsys.config.promise import PromisedInterval
from llmsys.launch.commands.init_minutes import (
    MAX_PASSES,
    SEQUENCE_LENGTH,
    SizedRun,
    compute_intermediate_size,
)


def iter_sized_lines(run: SizedRun) -> Iterator[str]:
    """Yield the sections of the config from the model to the promise, with their reasons.

    Args:
        run: The sized run.

    Yields:
        Lines of YAML.
    """
    hidden, promise = run.hidden_size, run.promise
    step_tokens = run.sequences * SEQUENCE_LENGTH
    yield (
        f"model:                             # {run.parameters / 1e6:.3g}M parameters: of the "
        f"sizes that {run.asked_minutes:g} minutes allow,"
    )
    yield f"  vocab_size: {run.vocabulary}                 # the one with the lowest predicted loss"
    yield f"  hidden_size: {hidden}"
    yield f"  intermediate_size: {compute_intermediate_size(hidden)}"
    yield f"  num_hidden_layers: {run.blocks}"
    yield f"  num_attention_heads: {run.heads}"
    yield f"  max_position_embeddings: {SEQUENCE_LENGTH}"
    yield "  tie_word_embeddings: true"
    yield "  norm: {kind: rmsnorm}"
    yield "  position: {kind: rope}"
    yield ""
    yield (
        f"batch: {{sequence_length: {SEQUENCE_LENGTH}, sequences: {run.sequences}}}   # "
        f"{step_tokens:,} tokens a step, {run.tokens // step_tokens:,} steps of "
        f"{run.step_seconds:.3g} s ({run.how})"
    )
    yield "optimizer:                         # rates that fit every width, by the recipes"
    yield "  kind: adamw"
    yield f"  learning_rate: {0.2 / hidden:.3g}          # 0.2 / hidden_size"
    yield f"  embedding_lr_multiplier: {0.4 * hidden:.3g}  # 0.08 for embeddings"
    yield "  betas: [0.9, 0.99]"
    yield "  weight_decay: 0.1"
    yield (
        f"schedule: {{kind: linear, warmup_tokens: {run.tokens // 50 or 1}, min_lr_factor: 0.0}}"
    )
    passes = run.tokens / run.unique_tokens
    yield "train:"
    yield f"  tokens: {run.tokens}                # {passes:.2g} passes over the text, by a sample"
    yield (
        f"  fit_minutes: {promise.minutes.middle:.3g}              # the run plans its tokens anew "
        "to end then; 0 trains those above"
    )
    if passes > 0.95 * MAX_PASSES:
        yield f"  # {MAX_PASSES} passes are the most: the text is too small for more minutes"
    if run.threads:
        yield f"  threads_per_process: {run.threads}          # the fastest of one, half and all"
    yield (
        f"evaluation: {{max_tokens: {run.evaluated_tokens}}}   # at the end: a fifteenth of the "
        "time"
    )
    yield "checkpoint: {every_steps: 200}"
    yield "# launch: {processes: 2}           # the promise holds for one process"
    yield ""
    yield "promise:                           # of eight in ten runs; the report shows the outcome"
    yield f"  minutes: {_format_interval(promise.minutes)}   # training and its evaluation"
    yield f"  bits_per_byte: {_format_interval(promise.bits_per_byte)}   # of held-out documents"
    yield f"  tokens: {promise.tokens}"
    yield f'  machine: "{promise.machine}"'
    yield f'  date: "{promise.date}"'


def _format_interval(one: PromisedInterval) -> str:
    return f"{{low: {one.low}, middle: {one.middle}, high: {one.high}}}"


def format_promise(run: SizedRun) -> str:
    """Return the promise as a line for people.

    Args:
        run: The sized run.
    """
    minutes, loss = run.promise.minutes, run.promise.bits_per_byte
    return (
        f"promised: {minutes.middle:.3g} minutes ({minutes.low:.3g} to {minutes.high:.3g}) of "
        f"training, {loss.middle:.3g} bits per byte ({loss.low:.3g} to {loss.high:.3g}); "
        f"{run.parameters / 1e6:.3g}M parameters, {run.tokens:,} tokens; {run.how}"
    )
