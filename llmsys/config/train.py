"""Sections of the run itself: name, processes, budget, bad steps, generation, tracking and FLOP
counting.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from llmsys.config.section import FolderPath, LocalPath, Section, raise_violation
from llmsys.errors import ConfigError, Violation


class SpikeDetectionConfig(Section):
    """Limits on the ratio of a step's loss and gradient norm to the median of previous steps.

    The median covers the last `window_steps` steps that were applied. No step is a spike before
    there are that many.
    """

    max_grad_norm_ratio: float = Field(
        0.0,
        ge=0,
        validate_default=False,
        description="Skip a step whose gradient norm (before clipping) exceeds this multiple of "
        "the median, such as 10. 0: off.",
    )
    max_loss_ratio: float = Field(
        0.0,
        ge=0,
        validate_default=False,
        description="Skip a step whose loss exceeds this multiple of the median, such as 1.5. 0: "
        "off.",
    )
    window_steps: int = Field(100, ge=2, description="Number of last applied steps for the median.")

    @field_validator("max_grad_norm_ratio", "max_loss_ratio")
    @classmethod
    def _check_ratio(cls, ratio: float) -> float:
        if 0 < ratio <= 1:
            raise_violation(
                "",
                f"{ratio:g} times the median would skip ordinary steps. Use more than 1, or 0 "
                "to turn it off.",
            )
        return ratio


class ProfileConfig(Section):
    """`train.profile:` — steps that torch's profiler records into `profile/` of the run folder.

    SIGUSR2 to a running job records its next step too.
    """

    steps: tuple[PositiveInt, ...] = Field(
        (), description="Steps to record, counted from 1, such as [10, 500]."
    )
    ranks: tuple[NonNegativeInt, ...] = Field(
        (0,), description="Ranks that record. Each rank writes its own files."
    )
    memory: bool = Field(
        False,
        description="Record memory as well: a snapshot of the allocator on CUDA devices, a curve "
        "in the trace.",
    )


# Time of an evaluated token by that of a trained one. The forward pass is a third; in small models
# the loss and the most likely token of each position cost as much again (measured: 0.6 and 0.65).
EVALUATED_COST = 2 / 3


class FittedBudget(Section):
    """A budget that a run with `train.fit_minutes` took while it trained."""

    after_step: int = Field(ge=0, description="Last step of the budget before it.")
    tokens: int = Field(ge=1, description="Tokens of the whole run.")


MatmulDtype = Literal["compute", "fp8", "fp8_block"]
# Number types of weights and activations in matmuls.
Precision = Literal["bf16", "fp16", "fp32"]


class RunNameConfig(Section):
    """`run:` — name, output folder and seed of the run."""

    name: str = Field("run", min_length=1, description="Name in logs, reports and trackers.")
    folder: FolderPath = Field(
        Path("runs/run"),
        description="Run folder for all outputs, relative to the working directory.",
    )
    # torch.manual_seed takes no larger one
    seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of the initial weights and of the data order."
    )


class LaunchConfig(Section):
    """`launch:` — processes that `llmsys train` starts on this machine."""

    processes: int = Field(1, ge=0, description="Number of processes. 0: one per accelerator.")
    port: int = Field(
        0, ge=0, le=65535, description="TCP port of the rendezvous. 0: any free port."
    )


class TrainConfig(Section):
    """`train:` — budget, precision and log."""

    tokens: int = Field(1_000_000_000, ge=1, description="Total training tokens.")
    fit_minutes: float = Field(
        0.0,
        ge=0,
        description="Minutes in which training and its final evaluation shall end: `tokens` is a "
        "first guess, and the budget follows the measured speed, up to sixteen times of it. 0: "
        "`tokens` are trained.",
    )
    fitted_budgets: tuple[FittedBudget, ...] = Field(
        (),
        description="Budgets that `fit_minutes` took, as the run records them. The schedule of a "
        "step is that of the budget before it.",
    )
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto",
        description="Dtype of weights and activations in forward and backward; master weights and "
        "moments are always fp32. auto: bf16 if the device supports it natively, else fp32; a "
        "resumed run keeps its dtype. fp16 uses loss scaling.",
    )
    matmul_dtype: MatmulDtype = Field(
        "compute",
        description="Dtype of the inputs of linear layers in blocks. compute: that of "
        "`precision`. fp8: 8 bits with rowwise scales; needs torchao and a GPU with fp8 "
        "matmuls. fp8_block: 8 bits with scales per 128 neighbours, and per 128 x 128 tile of "
        "weights; needs a Hopper GPU or newer.",
    )
    expert_matmul_dtype: MatmulDtype = Field(
        "compute", description="Dtype of the inputs of routed experts, as `matmul_dtype`."
    )
    reproducibility: Literal["fast", "bitwise"] = Field(
        "fast",
        description="fast: the libraries' order of summation; layouts agree up to rounding. "
        "bitwise: bit-identical weights and moments on any power of two of processes, slower "
        "(llmsys/engine/README.md).",
    )
    activation_checkpoint: Literal["none", "selective", "full", "offload"] = Field(
        "none",
        description="Activation checkpointing. selective: save the outputs of matmuls and "
        "attention and recompute the rest. full: save only the inputs of each block. offload: "
        "recompute nothing, and keep saved tensors in host memory.",
    )
    compile: Literal["auto", "none", "block"] = Field(
        "auto",
        description="block: apply torch.compile to each block; needs a C++ compiler, or Triton on "
        "GPUs. auto: block under engine.kind=torch on CUDA devices with Triton, else none.",
    )
    init_from: LocalPath | None = Field(
        None,
        description="Run folder, RUN@STEP or checkpoint to initialize the weights of a new run "
        "from, matched by name.",
    )
    branch_from: LocalPath | None = Field(
        None,
        description="RUN@STEP to continue in a new run folder with other settings: takes weights, "
        "moments, balance bias and position in the data of that step.",
    )
    grow_model: bool = Field(
        False,
        description="Grow the tensors of init_from or branch_from to a deeper or wider model, or "
        "to experts that are copies of a dense layer.",
    )
    restart: bool = Field(
        False,
        description="Start at step 0 if the run folder has saved checkpoints but none can be "
        "resumed; they are moved away. A complete checkpoint is still resumed.",
    )
    must_export: bool = Field(
        False,
        description="Refuse a config whose model no model type of Hugging Face can represent, so "
        "that `llmsys convert` could not write it.",
    )
    on_bad_step: Literal["skip", "rewind", "stop"] = Field(
        "skip",
        description="Action on a step with a non-finite loss or norm, or a spike. skip: keep the "
        "weights and continue with the next step. rewind: load the last checkpoint and skip "
        "the data of the step. stop: end the run.",
    )
    max_consecutive_bad_steps: int = Field(
        10, ge=1, description="Maximum consecutive bad steps before the run ends."
    )
    spike_detection: SpikeDetectionConfig = Field(
        SpikeDetectionConfig(),
        description="Spike detection: finite steps to treat as bad. Default: none.",
    )
    hang_timeout_seconds: float = Field(
        600.0,
        ge=0,
        description="Seconds without progress of a rank after which the run ends and names it. 0: "
        "no limit.",
    )
    time_limit_minutes: float = Field(
        0.0,
        ge=0,
        description="Minutes after which the run saves a checkpoint and exits, to be resumed. 0: "
        "no limit except Slurm's.",
    )
    ema_half_life_tokens: int = Field(
        0,
        ge=0,
        description="Half-life of the exponential moving average (EMA) of the weights, in tokens; "
        "evaluation, generation and conversion use the average. 0: no EMA.",
    )
    noise_scale_every_steps: int = Field(
        0,
        ge=0,
        description="Steps between measurements of the gradient noise scale (the critical batch "
        "size, in tokens). 0: off.",
    )
    norms_every_steps: int = Field(
        0,
        ge=0,
        description="Steps between measurements of norms by layer: activations, gradients, "
        "weights, updates. 0: off.",
    )
    record_document_losses: bool = Field(
        False,
        description="Record the loss of each document's tokens in every step, into "
        "`document_losses/` of the run folder; `llmsys inspect RUN --by-loss` and `llmsys trace "
        "--worst` read it.",
    )
    corruption_check_every_steps: int = Field(
        0,
        ge=0,
        description="Steps between checks for silent data corruption, in which every rank repeats "
        "the step of another one and gradients are compared bit for bit. 0: off.",
    )
    consistency_check_every_steps: int = Field(
        100,
        ge=0,
        description="Steps between comparisons of the weights of replicas, by a hash; a "
        "difference ends the run. On logged steps a parameter without a gradient ends it too. "
        "0: neither is checked.",
    )
    profile: ProfileConfig = Field(
        ProfileConfig(), description="Steps to record with torch's profiler. Default: none."
    )
    log_every_steps: int = Field(10, ge=1, description="Steps between log entries.")
    threads_per_process: int = Field(
        0, ge=0, description="CPU threads per process. 0: available cores / processes."
    )

    def get_budget(self, step: int | None = None) -> int:
        """Return the tokens of the whole run, as they were planned when a step was trained.

        Args:
            step: The step, counted from 1; None for the newest plan.
        """
        tokens = self.tokens
        for one in self.fitted_budgets:
            if step is None or one.after_step < step:
                tokens = one.tokens
        return tokens

    @property
    def resolved_precision(self) -> Precision:
        """Number type of matmuls.

        Raises:
            ConfigError: the precision is still `auto`.
        """
        if self.precision == "auto":
            raise ConfigError(
                "train.precision=auto needs a device. Set train.precision=bf16 or fp32, or name a "
                "device profile: flops.device=NAME."
            )
        return self.precision


class GenerationConfig(Section):
    """`generation:` — prompts and sampling options of `llmsys generate` and of the samples after
    a run.
    """

    prompts: tuple[str, ...] = Field((), description="Prompts.")
    format: Literal["auto", "text", "chat"] = Field(
        "auto",
        description="text: continue a prompt. chat: answer it, as a user's message in the chat "
        "template. auto: chat after training with data.kind=chat.",
    )
    prefix_pieces: tuple[str, ...] | None = Field(
        None,
        description="Tokens prepended to every prompt. Default: the token that ends documents, as "
        "in training.",
    )
    max_new_tokens: int = Field(64, ge=1, description="Maximum number of generated tokens.")
    temperature: float = Field(0.8, ge=0, description="Divisor of the logits. 0: greedy decoding.")
    top_k: int = Field(0, ge=0, description="Sample from this many most likely tokens. 0: all.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample from the most likely tokens with this total probability.",
    )
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Sample from tokens with at least this share of the highest probability.",
    )
    repetition_penalty: float = Field(
        1.0, gt=0, description="Penalty on tokens that already occur in the text. 1: none."
    )
    num_beams: int = Field(1, ge=1, description="Beam width of beam search. 1: sampling.")
    length_penalty: float = Field(
        0.6,
        ge=0,
        description="Length penalty of beam search (Wu 2016, section 7). 0 prefers short texts.",
    )
    seed: int = Field(0, ge=0, description="Seed of sampling.")


class TrackingConfig(Section):
    """`tracking:` — experiment trackers in addition to events.jsonl, which is always written."""

    tensorboard: bool = Field(False, description="Write TensorBoard files to the run folder.")
    wandb: bool = Field(False, description="Send metrics to Weights & Biases.")
    mlflow: bool = Field(
        False,
        description="Send metrics to MLflow: to $MLFLOW_TRACKING_URI, else to `mlflow.db` in the "
        "run folder.",
    )
    project: str = Field(
        "llmsys", min_length=1, description="Weights & Biases project, MLflow experiment."
    )


class FlopsConfig(Section):
    """`flops:` — convention for counting floating-point operations, and the device profile."""

    convention: Literal["causal", "full", "hardware"] = Field(
        "causal",
        description="causal: attention over the visible positions only. full: over all positions "
        "(PaLM). hardware: full, plus recomputation.",
    )
    device: str | None = Field(
        None,
        description="Device profile with the peak FLOP/s for utilisation: a name, or a file of "
        "`llmsys calibrate`. Default: the profile of this accelerator; without one, "
        "utilisation is unknown.",
    )


def find_source_violations(train: TrainConfig) -> Iterator[Violation]:
    """Yield the violations of what a run takes its first state from.

    Args:
        train: the `train:` section.

    Returns:
        An iterator over violations.
    """
    if train.branch_from is not None and not re.search(r"@\d+$", str(train.branch_from)):
        yield Violation(
            "train.branch_from",
            f"{train.branch_from} does not name a step. Append the step of a checkpoint, such as "
            f"{train.branch_from}@1000.",
        )
