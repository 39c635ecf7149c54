"""RunConfig: all settings of a run in one frozen object, with the constraints between sections.

Every package reads it, and every run folder has a copy.
"""

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.batch import BatchConfig
from llmsys.config.bitwise_constraints import find_bitwise_violations
from llmsys.config.checkpoint import CheckpointConfig
from llmsys.config.combinations import find_refused_combinations
from llmsys.config.data import CrawlConfig, DataConfig
from llmsys.config.engine import EngineConfig, TorchEngineConfig
from llmsys.config.evaluation import MAX_DEFAULT_SEQUENCES, EvaluationConfig
from llmsys.config.images import ImagesConfig
from llmsys.config.language import find_code_violations
from llmsys.config.model import ModelConfig
from llmsys.config.objective import (
    LossConfig,
    ObjectiveConfig,
    get_needs,
    infer_objective,
)
from llmsys.config.optimizer import AdamWConfig, OptimizerConfig
from llmsys.config.parallel_layout import (
    ParallelLayout,
    find_expert_violations,
    find_model_sharding_violations,
    find_ring_violations,
    find_sequence_violations,
)
from llmsys.config.pipeline import require_pipeline_micro_batches
from llmsys.config.promise import PromiseConfig
from llmsys.config.python_code import PythonCode, compute_code_digest
from llmsys.config.run_constraints import (
    find_evaluation_violations,
    find_image_violations,
    find_length_violations,
    find_moment_violations,
    find_retention_violations,
    find_rotation_violations,
    resolve_layout,
)
from llmsys.config.schedule import CosineScheduleConfig, MultiplierScheduleConfig, ScheduleConfig
from llmsys.config.section import Section, raise_violations
from llmsys.config.tokenizer import (
    FileTokenizerConfig,
    NoTokenizer,
    PythonTokenizerConfig,
    SentencePieceConfig,
    TokenizerConfig,
)
from llmsys.config.train import (
    FlopsConfig,
    GenerationConfig,
    LaunchConfig,
    Precision,
    RunNameConfig,
    TrackingConfig,
    TrainConfig,
    find_source_violations,
)
from llmsys.errors import ConfigError, Violation, format_choices

# Default for a config without a `model:` section: small enough for one laptop core.
SMALL_MODEL = ModelConfig(
    vocab_size=8192, hidden_size=256, intermediate_size=704,
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip

# Keys of `batch` and `train` that decide the weights of each step.
BATCH_TRAJECTORY = (
    "sequence_length",
    "num_length_buckets",
    "attention_scope",
    "packing",
    "window_order",
    "length_stages",
    "fill_in_middle",
    "ramp",
)
TRAIN_TRAJECTORY = (
    "tokens",
    "init_from",
    "branch_from",
    "grow_model",
    "matmul_dtype",
    "expert_matmul_dtype",
    "ema_half_life_tokens",
)


class RunConfig(Section):
    """Configuration of one run, from raw text to the report."""

    run: RunNameConfig = Field(RunNameConfig(), description="Name, folder and seed.")
    data: DataConfig = Field(
        CrawlConfig(), description="Dataset: from input files to token shards."
    )
    tokenizer: TokenizerConfig = Field(SentencePieceConfig(), description="Tokenizer.")
    model: ModelConfig = Field(SMALL_MODEL, description="Model architecture.")
    objective: ObjectiveConfig = Field(
        default_factory=infer_objective,
        description="Training objective. Default: the one of the model's head.",
    )
    loss: LossConfig = Field(LossConfig(), description="Additions to cross entropy in training.")
    batch: BatchConfig = Field(BatchConfig(), description="Global batch of one optimizer step.")
    optimizer: OptimizerConfig = Field(AdamWConfig(), description="Optimizer.")
    schedule: ScheduleConfig = Field(CosineScheduleConfig(), description="Learning rate schedule.")
    factors: MultiplierScheduleConfig = Field(
        MultiplierScheduleConfig(), description="Schedules of weight decay and load balancing."
    )
    engine: EngineConfig = Field(
        TorchEngineConfig(), description="Library that runs backward and the optimizer step."
    )
    layout: ParallelLayout = Field(ParallelLayout(), description="Parallelism: ranks per axis.")
    launch: LaunchConfig = Field(LaunchConfig(), description="Processes to start on this machine.")
    train: TrainConfig = Field(
        TrainConfig(), description="Token budget, precision, failure handling and logging."
    )
    checkpoint: CheckpointConfig = Field(
        CheckpointConfig(), description="Checkpoint interval and retention."
    )
    evaluation: EvaluationConfig = Field(
        EvaluationConfig(), description="Evaluation on held-out documents and tasks."
    )
    generation: GenerationConfig = Field(GenerationConfig(), description="Text generation.")
    tracking: TrackingConfig = Field(
        TrackingConfig(), description="Experiment trackers, in addition to events.jsonl."
    )
    flops: FlopsConfig = Field(
        FlopsConfig(), description="FLOPs convention and device for utilisation."
    )
    promise: PromiseConfig | None = Field(
        None, description="Promise of `llmsys init --minutes`; the report compares it."
    )

    @model_validator(mode="after")
    def _check_sections(self) -> Self:
        raise_violations(self._find_violations())
        return self

    @property
    def sequence_lengths(self) -> tuple[int, int]:
        """Tokens of one window at the encoder and at the decoder; equal where there is one
        stack.
        """
        length, target = (
            self.batch.sequence_length,
            getattr(self.batch, "target_sequence_length", None),
        )
        is_pair = self.model.family == "encoder_decoder"
        return self.objective.count_lengths(length) or (
            length,
            (target or length) if is_pair else length,
        )

    def _find_violations(self) -> Iterator[Violation]:
        yield from find_length_violations(self.model, self.batch, self.sequence_lengths)
        yield from find_rotation_violations(
            self.model,
            max(self.sequence_lengths),
            pads_rows=self.model.family == "encoder_decoder"
            or (
                self.objective.kind == "classification" and not isinstance(self.data, ImagesConfig)
            ),
        )
        yield from self._find_objective_violations()
        yield from self._find_vocabulary_violations()
        yield from self._find_weight_violations()
        yield from self._find_budget_violations()
        yield from find_retention_violations(self.checkpoint, self.evaluation.every_steps)
        yield from find_evaluation_violations(
            self.evaluation, self.objective.kind, self.batch.sequence_length
        )
        yield from self._find_axis_violations()
        yield from find_moment_violations(self.optimizer, self.layout.tensor, self.model)
        if isinstance(self.data, ImagesConfig) and "model" in self.model_fields_set:
            yield from find_image_violations(self.data, self.model, self.batch.sequence_length)
        if self.train.reproducibility == "bitwise" and self.objective.uses_windows:
            yield from find_bitwise_violations(self.batch)
        if self.train.branch_from is not None:
            yield from find_source_violations(self.train)
        if self.model.parametrization.kind != "standard":
            yield from self.model.parametrization.find_run_violations(self.optimizer.kind)
        yield from find_refused_combinations(self)

    def _find_axis_violations(self) -> Iterator[Violation]:
        layout, model, length = self.layout, self.model, self.batch.sequence_length
        for key, message in (
            *(
                ("expert", one)
                for one in (
                    find_expert_violations(layout.expert, model) if layout.expert > 1 else ()
                )
            ),
            *find_model_sharding_violations(layout.tensor, layout.context, model, layout.ring_size),
            *layout.find_stage_violations(model),
            *find_sequence_violations(layout.tensor, layout.context, length),
            *(find_ring_violations(layout, length) if layout.ring_size > 1 else ()),
        ):
            yield Violation(f"layout.{key}", message)

    def _find_objective_violations(self) -> Iterator[Violation]:
        kind, head = self.objective.kind, self.model.head.kind
        family, wanted_head, legal = get_needs(kind)
        if "objective" in self.model_fields_set and (family, wanted_head) != (
            self.model.family,
            head,
        ):
            yield Violation(
                "objective.kind",
                f"{kind} needs family={family} with head={wanted_head}, but the model is "
                f"{self.model.family} with {head}. Leave objective out, or change model.family "
                "and model.head.",
            )
        elif (
            {"data", "model"} <= self.model_fields_set
            and head == wanted_head
            and self.data.kind not in legal
        ):
            wanted = format_choices([f"data.kind={name}" for name in legal])
            yield Violation(
                "data.kind", f"{self.data.kind} data do not fit objective {kind}. Use {wanted}."
            )
        if self.objective.uses_windows:
            for key, message in self.batch.find_window_violations():
                yield Violation(f"batch.{key}", message)

    def _find_vocabulary_violations(self) -> Iterator[Violation]:
        both_given = {"model", "tokenizer"} <= self.model_fields_set
        if not both_given or isinstance(
            self.tokenizer, FileTokenizerConfig | NoTokenizer | PythonTokenizerConfig
        ):
            return
        trained, rows = self.tokenizer.vocab_size, self.model.vocab_size
        if trained > rows:
            yield Violation(
                "tokenizer.vocab_size",
                f"{trained} pieces exceed the {rows} rows of model.vocab_size. Use "
                f"tokenizer.vocab_size={rows}, or model.vocab_size={trained}.",
            )

    def _find_weight_violations(self) -> Iterator[Violation]:
        weights = getattr(self.tokenizer, "language_weights", {})
        if weights and isinstance(self.data, CrawlConfig):
            # A config that narrows the languages of its base may keep the weights of all of them.
            keys = [(f"tokenizer.language_weights.{code}", code) for code in weights]
            yield from find_code_violations(self.data.language.kind, keys)

    def _find_budget_violations(self) -> Iterator[Violation]:
        budget, schedule = self.train.tokens, self.schedule
        first = self.batch.get_step_tokens(0)
        if "train" in self.model_fields_set and budget < first:
            yield Violation(
                "train.tokens",
                f"{budget} tokens are fewer than one step of {first}. Use at least {first}, or a "
                "smaller batch.",
            )
        if schedule.kind == "noam":
            key, shaped = (
                "schedule.warmup_steps",
                self.batch.count_tokens_before(schedule.warmup_steps),
            )
        else:
            key = "schedule.warmup_tokens"
            shaped = schedule.warmup_tokens + (
                schedule.decay_tokens if schedule.kind == "wsd" else 0
            )
        if shaped > budget:
            yield Violation(
                key,
                f"warmup and decay take {shaped} tokens, more than train.tokens={budget}. Shorten "
                f"them to {budget} in total, or train longer.",
            )

    @property
    def trajectory_settings(self) -> dict[str, Any]:
        """Settings that determine the weights of each step. All other settings may change on
        resume.
        """
        # Stored in checkpoints and compared with them when a run resumes.
        stored = self.model_dump(mode="json")
        sections = {
            name: stored[name] for name in ("model", "objective", "loss", "optimizer", "schedule")
        }
        batch = {key: stored["batch"][key] for key in BATCH_TRAJECTORY}
        batch["tokens"] = self.batch.tokens_per_step
        if self.batch.ramp is not None:
            batch["ramp"] = self.batch.ramp.to_trajectory(self.train.noise_scale_every_steps)
        train = {key: stored["train"][key] for key in TRAIN_TRAJECTORY}
        train["precision"] = self.train.resolved_precision
        if self.train.reproducibility == "bitwise":  # the settings that rounding depends on
            sections["bitwise"] = {
                "threads_per_process": self.train.threads_per_process,
                "micro_sequences": self.batch.micro_sequences,
                "assignment": stored["batch"]["assignment"],
            }
        if self.factors.is_active:
            sections["factors"] = stored["factors"]
        for name, section in (("schedule", self.schedule), ("optimizer", self.optimizer)):
            if isinstance(section, PythonCode):
                sections[name]["digest"] = compute_code_digest(section)
        for name in ("attention", "feed_forward"):
            block = getattr(self.model, name)
            if isinstance(block, PythonCode):
                sections["model"][name]["digest"] = compute_code_digest(block)
        if self.data.kind == "mixture":
            sections["mixture"] = {
                str(start): list(parts) for start, parts in self.data.stage_weights
            }
        return sections | {"batch": batch, "train": train, "seed": self.run.seed}

    def resolve_precision(self, precision: Precision, why: str = "") -> Self:
        """Return the config with `precision` instead of `auto`; unchanged if it names a type
        already.

        Args:
            precision: number type of weights and activations in matmuls.
            why: reason for this type, for the error message.

        Raises:
            ConfigError: another setting does not allow this type.
        """
        if self.train.precision != "auto":
            return self
        resolved = self.model_copy(
            update={"train": self.train.model_copy(update={"precision": precision})}
        )
        # `auto` has passed the checks of the config.
        if problems := list(find_refused_combinations(resolved, about="train.precision")):
            reason = f" ({why})" if why else ""
            listed_problems = "; ".join(f"{problem.key}: {problem.message}" for problem in problems)
            raise ConfigError(
                f"train.precision=auto is {precision} here{reason}, which is invalid: "
                f"{listed_problems}"
            )
        return resolved

    def resolve_compile(self, has_triton: bool) -> Self:
        """Return the config with `block` or `none` instead of `train.compile=auto`; unchanged if it
        names one.

        Args:
            has_triton: whether the device is an accelerator for which torch.compile can generate
                kernels.
        """
        if (train := self.train).compile != "auto":
            return self
        # DeepSpeed gathers weights in hooks inside of blocks; accelerate has its own setting.
        settings = self.engine.kind, train.reproducibility, self.model.rnn
        plain = settings == ("torch", "fast", None) and train.activation_checkpoint != "offload"
        chosen = (
            "block"
            if has_triton
            and plain
            and not (
                self.model.residual.is_reversible
                or self.model.has_python_blocks
                or self.model.has_linear_layers
            )
            else "none"
        )
        return self.model_copy(update={"train": train.model_copy(update={"compile": chosen})})

    def resolve_data_parallel(self, chosen: Literal["fsdp", "plain"]) -> Self:
        """Return the config with `chosen` instead of `engine.data_parallel=auto`; unchanged if it
        names a kind.

        Args:
            chosen: the kind.
        """
        engine = self.engine
        if engine.kind != "torch" or engine.data_parallel != "auto":
            return self
        return self.model_copy(
            update={"engine": engine.model_copy(update={"data_parallel": chosen})}
        )

    def resolve_layout(self, ranks: int) -> ParallelLayout:
        """Return the layout with every axis resolved.

        Args:
            ranks: number of ranks of the run.

        Raises:
            LayoutError: the axes do not divide the ranks, the model or the batch.
        """
        layout = resolve_layout(self.layout, self.engine, self.model, ranks)
        if (stages := layout.pipeline) > 1:
            require_pipeline_micro_batches(
                stages, layout.pipeline_schedule, layout.data_parallel_size, self.batch
            )
        return layout

    @property
    def evaluation_sequences(self) -> int:
        """Sequences per evaluation forward pass, independent of the number of ranks."""
        training = self.batch.resolve_micro_sequences(self.batch.sequences_per_step)
        return self.evaluation.micro_sequences or min(MAX_DEFAULT_SEQUENCES, training)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run; the last one completes the token budget."""
        return self.batch.count_steps_for(self.train.get_budget())
