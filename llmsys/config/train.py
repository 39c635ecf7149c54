"""Sections of the run itself: name, processes, budget, bad steps, generation, tracking and FLOP counting."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from llmsys.config.section import LocalPath, Section, Violation, raise_violations
from llmsys.errors import ConfigError


class SpikeDetectionConfig(Section):
    """Limits on the ratio of a step's loss and gradient norm to the median of previous steps.

    The median covers the last `window_steps` steps that were applied. No step is a spike before there are that many.
    """

    max_grad_norm_ratio: float = Field(
        0.0, ge=0, description="Times the median gradient norm (before clipping), such as 10; 0: norms are not judged."
    )
    max_loss_ratio: float = Field(
        0.0, ge=0, description="Times the median loss, such as 1.5; 0: losses are not judged."
    )
    window_steps: int = Field(100, ge=2, description="Steps whose median is taken.")

    @model_validator(mode="after")
    def _check_ratios(self) -> Self:
        raise_violations(
            Violation(
                name, f"{value:g} times the median would refuse ordinary steps. Use more than 1, or 0 for no rule."
            )
            for name, value in (
                ("max_grad_norm_ratio", self.max_grad_norm_ratio),
                ("max_loss_ratio", self.max_loss_ratio),
            )
            if 0 < value <= 1
        )
        return self


Precision = Literal["bf16", "fp16", "fp32"]
"""Number types of weights and activations in matmuls."""


class RunNameConfig(Section):
    """`run:` — name, output folder and seed of the run."""

    name: str = Field("run", min_length=1, description="Name in logs, reports and trackers.")
    folder: LocalPath = Field(
        Path("runs/run"), description="Everything the run writes; relative to the working directory."
    )
    seed: int = Field(0, ge=0, description="Seed of the starting weights and of the order of the data.")


class LaunchConfig(Section):
    """`launch:` — processes that `llmsys train` starts on this machine."""

    processes: int = Field(1, ge=0, description="Processes to start; 0 starts one per accelerator.")
    port: int = Field(0, ge=0, le=65535, description="TCP port where they meet; 0 takes any free one.")


class TrainConfig(Section):
    """`train:` — budget, precision and log."""

    tokens: int = Field(1_000_000_000, ge=1, description="Tokens to train on, from the first step.")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto",
        description="Type of weights and activations in products; masters and moments are always fp32. "
        "auto is bf16 where the device multiplies it natively, else fp32, and a resumed run keeps its type. "
        "fp16 scales the loss so that small gradients survive.",
    )
    matmul_dtype: Literal["compute", "fp8"] = Field(
        "compute",
        description="Type that enters the linear maps of blocks: compute is that of `precision`; fp8 rounds rows to 8 "
        "bits with a scale each, and needs torchao and a GPU that multiplies them.",
    )
    reproducibility: Literal["fast", "bitwise"] = Field(
        "fast",
        description="fast sums as the libraries do, and every layout rounds in its own way. bitwise gives the same "
        "weights and moments bit for bit on any power of two of processes, and costs time (llmsys/engine/README.md).",
    )
    activation_checkpoint: Literal["none", "selective", "full"] = Field(
        "none",
        description="What backward computes again instead of keeping it: selective keeps the outputs of large "
        "products and of attention, full keeps only what enters each block.",
    )
    compile: Literal["none", "block"] = Field(
        "none", description="block: each block goes through torch.compile; needs a C++ compiler, or Triton on GPUs."
    )
    init_from: LocalPath | None = Field(
        None, description="Run folder or checkpoint whose weights a new run begins with, by name."
    )
    restart: bool = Field(
        False,
        description="Begin at step 0 in a run folder that has saved checkpoints of which none can be resumed; they are "
        "moved aside. A whole checkpoint is resumed all the same.",
    )
    on_bad_step: Literal["skip", "rewind", "stop"] = Field(
        "skip",
        description="What becomes of a step that is not finite, or a spike: skip leaves the weights as they are and "
        "goes on with the next; rewind goes back to the last checkpoint and leaves the step's data out; stop ends.",
    )
    max_consecutive_bad_steps: int = Field(
        10, ge=1, description="Bad steps without a good one between them that end the run."
    )
    spike_detection: SpikeDetectionConfig = Field(
        SpikeDetectionConfig(), description="Which finite steps are bad too; none by default."
    )
    hang_timeout_seconds: float = Field(
        600.0, ge=0, description="A rank that gets no further for so long is named, and the run ends; 0: never."
    )
    time_limit_minutes: float = Field(
        0.0, ge=0, description="The run saves and ends after so long, to be continued; 0: no limit but Slurm's."
    )
    ema_half_life_tokens: int = Field(
        0,
        ge=0,
        description="Keep an exponential mean of the weights in which a step counts half after so many tokens; it is "
        "what is evaluated and used. 0 keeps none.",
    )
    noise_scale_every_steps: int = Field(
        0,
        ge=0,
        description="Steps between two measurements of the gradient noise scale, the batch size in tokens beyond "
        "which more of them stop helping; 0 measures none.",
    )
    log_every_steps: int = Field(10, ge=1, description="Steps between two logged steps.")
    threads_per_process: int = Field(
        0, ge=0, description="CPU threads of each process; 0 shares the cores out over the processes."
    )

    @property
    def resolved_precision(self) -> Precision:
        """Number type of matmuls.

        Raises:
            ConfigError: the precision is still `auto`.
        """
        if self.precision == "auto":
            raise ConfigError(
                "train.precision=auto is known only on a device. "
                "Set train.precision=bf16 or fp32, or name a device profile: flops.device=NAME."
            )
        return self.precision


class GenerationConfig(Section):
    """`generation:` — prompts and sampling options of `llmsys generate` and of the samples after a run."""

    prompts: tuple[str, ...] = Field((), description="Texts to continue.")
    prefix_pieces: tuple[str, ...] | None = Field(
        None, description="Pieces that open every text. Left out: the one that ends documents, as in training."
    )
    max_new_tokens: int = Field(64, ge=1, description="Longest continuation, in tokens.")
    temperature: float = Field(0.8, ge=0, description="Divides the logits; 0 always takes the likeliest token.")
    top_k: int = Field(0, ge=0, description="Choose among this many likeliest tokens; 0 chooses among all.")
    top_p: float = Field(1.0, gt=0, le=1, description="Choose among the likeliest tokens with this total probability.")
    min_p: float = Field(0.0, ge=0, le=1, description="Choose among tokens at least this share as likely as the first.")
    repetition_penalty: float = Field(
        1.0, gt=0, description="Makes tokens that the text already has less likely; 1 changes nothing."
    )
    num_beams: int = Field(1, ge=1, description="Beginnings followed in a beam search; 1 draws tokens instead.")
    length_penalty: float = Field(
        0.6, ge=0, description="Of beam search: 0 prefers short texts; see Wu 2016, section 7."
    )
    seed: int = Field(0, ge=0, description="Seed of the choices.")


class TrackingConfig(Section):
    """`tracking:` — experiment trackers in addition to events.jsonl, which is always written."""

    tensorboard: bool = Field(False, description="Write TensorBoard files into the run folder.")
    wandb: bool = Field(False, description="Send metrics to Weights & Biases.")
    project: str = Field("llmsys", min_length=1, description="Project name there.")


class FlopsConfig(Section):
    """`flops:` — convention for counting floating-point operations, and the device profile."""

    convention: Literal["causal", "full", "hardware"] = Field(
        "causal",
        description="causal: attention over the positions a token may see; full: over all of them (PaLM); "
        "hardware: full, and what recomputation repeats.",
    )
    device: str | None = Field(
        None,
        description="Device profile whose peak utilisation is a share of: its name, or the file that llmsys calibrate "
        "wrote. Left out: the profile of this very accelerator; without one, utilisation is unknown.",
    )
