"""One rank's training program on the pretended device, with a record of all that it does.

Invariants:
- The code of the step is the trainer's: engine, loss, expert balancing, evaluation and the host
  copy of a save.
"""

import gc
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _disable_current_modes

from llmsys.config.engine import TorchEngineConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.data.batch import Batch
from llmsys.dryrun.categories import (
    BACKWARD,
    BATCH,
    BUFFERS,
    EVALUATION,
    FORWARD,
    GRADIENTS,
    LOSS,
    MOMENTS,
    PARAMETERS,
    SAVED,
    SAVING,
    UPDATE,
)
from llmsys.dryrun.dry_run_request import DryRunRequest
from llmsys.dryrun.expected_messages import RankContext
from llmsys.dryrun.expected_passes import ONCE, REPEATED, list_passes
from llmsys.dryrun.fake_cluster import (
    CompiledSignatures,
    build_fake_mode,
    choose_cuda_kernels,
    compute_meshes_on_real_tensors,
    join_fake_group,
    pause_for_sharding_rules,
    reduce_buckets_at_once,
    replace_chunks,
    set_pipeline_shapes,
    track_resizes,
)
from llmsys.dryrun.forced_routing import build_forced_routing, replace_routing
from llmsys.dryrun.module_names import track_modules
from llmsys.dryrun.operation_watch import OperationWatch, replace_tolist
from llmsys.dryrun.position_probe import find_position_probe
from llmsys.dryrun.pretended_device import DEVICE, build_device_properties, install_device
from llmsys.dryrun.rank_parameters import ParameterCounts, compute_parameter_counts
from llmsys.dryrun.recorder import DryRunRecorder
from llmsys.dryrun.shard_check import STATE
from llmsys.dryrun.synthetic_batch import SyntheticRows, build_synthetic_batch
from llmsys.dryrun.table_makers import KEPT_TABLE
from llmsys.engine.engine import Engine, Loss
from llmsys.estimate.activation_memory import compute_micro_batch
from llmsys.estimate.data_parallel_choice import resolve_data_parallel_for_profile
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.peak_memory import find_largest_micro_batch
from llmsys.estimate.pipeline_stages import cut_layers, list_rank_stages
from llmsys.estimate.rank_parameters import PipelineStage
from llmsys.estimate.software_profile import MemoryProfile, has_triton
from llmsys.model.transformer import Transformer
from llmsys.optim.lr_schedule import compute_balance_factor, compute_learning_rate
from llmsys.parallel.device_mesh import DeviceMeshes, build_device_meshes
from llmsys.parallel.fp8 import require_fp8
from llmsys.train import build_engine as build_engine_module
from llmsys.train.checkpoint_saver import HostStateCopy
from llmsys.train.evaluator import RowRanks, sum_over_rows
from llmsys.train.expert_load import set_balance_factor, update_expert_balance
from llmsys.train.precision import find_bf16_support, select_precision
from llmsys.train.step_metrics import read_resident_memory

PASS = re.compile(r"(forward|backward) of micro-batch (\d+) in stage (\d+)")
NUMBERS = re.compile(r"(?<=[\[ ])\d+")
# The first step makes the optimizer's state and FSDP's buffers; the second is a steady one.
NUM_STEPS = 2
# Of storages that no parameter, moment or gradient has.
KEPT = (BUFFERS, FORWARD, SAVED, LOSS, BACKWARD)


@dataclass(frozen=True)
class SessionOutcome:
    """Numbers of a session at its end, besides its recorder.

    Attributes:
        parameters: elements that every rank holds.
        host_copy_bytes: copy of this rank's state in host memory.
        process_bytes: peak memory of this process.
        local_sizes: elements of each parameter that this rank holds, by name, and of its master and
            moments, by kind and name, such as `first_moment/embed.weight`.
    """

    parameters: ParameterCounts
    host_copy_bytes: int
    process_bytes: int
    local_sizes: dict[str, int]


class RankSession:
    """A dry run of one rank.

    Args:
        request: what to run.
        config: its config.
        profile: its device.
    """

    def __init__(self, request: DryRunRequest, config: RunConfig, profile: DeviceProfile) -> None:
        self.request = request
        self.profile = profile
        self.recorder = DryRunRecorder()
        install_device(build_device_properties(profile), self.recorder.waits)
        if config.train.matmul_dtype != "compute":
            require_fp8(DEVICE)
        precision, why = select_precision(config.run.folder, find_bf16_support(DEVICE))
        config = config.resolve_precision(precision, why).resolve_compile(has_triton(profile))
        self.layout: ParallelLayout = config.resolve_layout(request.world_size)
        config = resolve_data_parallel_for_profile(config, self.layout, profile)
        self.config = self._resolve_micro_sequences(config)
        self.num_micro_batches = compute_micro_batch(self.config, self.layout)[1]
        self.probe = find_position_probe(self.config, self.layout)
        self.seconds: dict[str, float] = {}
        self.step = 0
        self.is_compared = False
        """Set when all of a step has been recorded that is compared with the config."""
        self.first_sizes: dict[str, int] = {}
        """Elements of each parameter that this rank holds before the first step."""
        self.state_sizes: dict[str, int] = {}
        """Elements of each master and moment, after the last step."""
        self.signatures = CompiledSignatures()
        self.watch = OperationWatch(self.recorder)

    @property
    def stage(self) -> PipelineStage:
        """The layers and the ends of the model that this rank has; all without a pipeline."""
        config = self.config
        if self.layout.pipeline == 1:
            return PipelineStage(frozenset(range(config.model.num_hidden_layers)), True, True, 1.0)
        stages = list_rank_stages(
            config.model, self.layout, config.batch.sequence_length, self.num_micro_batches
        )
        return stages[self.request.rank // self.layout.ranks_per_stage]

    @property
    def context(self) -> RankContext:
        """All that the expected messages of the rank follow from."""
        layout = self.layout
        model = self.config.model
        stages: tuple[range, ...] = (range(model.num_hidden_layers),)
        if layout.pipeline > 1:
            cut = cut_layers(model, layout, self.config.batch.sequence_length)
            own = cut.list_rank_stages(self.request.rank // layout.ranks_per_stage)
            stages = tuple(cut.stages[stage] for stage in own)
        return RankContext(
            self.config,
            layout,
            self.request.rank,
            self.stage,
            stages,
            list_passes(layout, self.request.rank, self.num_micro_batches, self.parts),
            compute_micro_batch(self.config, layout)[0],
            self.config.sequence_lengths[1],
            self.request.documents,
            self.request.expert_skew,
        )

    def _resolve_micro_sequences(self, config: RunConfig) -> RunConfig:
        if config.batch.micro_sequences != "auto":
            return config
        choice = find_largest_micro_batch(
            config, self.layout, int(self.profile.memory_bytes), MemoryProfile()
        )
        batch = config.batch.model_copy(update={"micro_sequences": choice.sequences})
        return config.model_copy(update={"batch": batch})

    def run(self) -> SessionOutcome:
        """Run everything: build, steps, evaluation and the copy of a save."""
        self._prepare_torch()
        began = time.process_time()
        join_fake_group(self.request.rank, self.request.world_size)
        meshes = build_device_meshes(self.layout, DEVICE)
        self.recorder.collectives.name_axes(meshes)
        replace_routing(
            build_forced_routing(meshes, self.request.expert_skew, self.config.model.moe)
        )
        self._record_seconds("meshes", began)
        with build_fake_mode(), self.watch:
            engine = self._build_engine(meshes)
            self._run_steps(engine)
            self._run_evaluation(engine)
            host_bytes = self._copy_state(engine)
            self.is_compared = True
            self._find_tables(engine)
        counts = compute_parameter_counts(engine.module, self.layout, self.request.rank)
        sizes = measure_shards(engine.module) | self.state_sizes
        torch.distributed.destroy_process_group()
        return SessionOutcome(counts, host_bytes, read_resident_memory("VmHWM"), sizes)

    def _prepare_torch(self) -> None:
        recorder = self.recorder
        compute_meshes_on_real_tensors()
        replace_chunks()
        reduce_buckets_at_once()
        pause_for_sharding_rules(recorder)
        choose_cuda_kernels()
        set_pipeline_shapes()
        track_resizes(recorder.memory)
        replace_tolist(recorder.waits)
        self.signatures.install()
        functions = vars(build_engine_module)
        build_model = build_engine_module.build_model
        build_loss = functions["build_training_loss"]

        def build_meta_model(config: RunConfig) -> Transformer:
            # meta tensors have no storage either, and are made faster
            with _disable_current_modes():
                return build_model(config)

        def build_marked_loss(config: Any) -> Any:
            loss: Loss = build_loss(config)

            def compute_loss(*arguments: Any) -> Tensor:
                self.watch.enter_loss()
                return loss(*arguments)

            return compute_loss

        # build_engine looks these names up in its module's globals.
        functions |= {"build_model": build_meta_model, "build_training_loss": build_marked_loss}
        register_optimizer_step_pre_hook(self._begin_update)
        register_optimizer_step_post_hook(self._end_update)

    def _begin_update(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        gradients = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        self.recorder.memory.set_category(map(get_local, gradients), GRADIENTS)
        self.recorder.enter_phase(f"step {self.step}: optimizer", UPDATE)

    def _end_update(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        states = [
            one
            for state in optimizer.state.values()
            for one in state.values()
            if isinstance(one, Tensor)
        ]
        self.recorder.memory.set_category(map(get_local, states), MOMENTS, "moments")

    def _build_engine(self, meshes: DeviceMeshes) -> Engine:
        began = time.process_time()
        self.recorder.enter_phase("build", PARAMETERS)
        engine = build_engine_module.build_engine(self.config, meshes, DEVICE, initialize=False)
        buffers = [buffer for buffer in engine.module.buffers() if buffer.device.type == "cuda"]
        self.recorder.memory.set_category(map(get_local, buffers), BUFFERS, "buffers")
        track_modules(engine.module, self.recorder.modules, self.recorder.count_block)
        if (pipeline := getattr(engine, "pipeline", None)) is not None:
            pipeline.report_passes(self._begin_pass)
        self.first_sizes = measure_shards(engine.module)
        self._record_seconds("build", began)
        return engine

    def _begin_pass(self, text: str) -> None:
        """Follow the passes of a pipeline: one name for those of a stage in each direction."""
        if (begun := PASS.fullmatch(text)) is not None:
            self.recorder.collectives.record_pass(begun[1], int(begun[2]), int(begun[3]))
        if text.startswith("forward"):
            self.watch.begin_forward(f"step {self.step}, {text}", "once")
        elif not text:
            self.watch.end_forward()

    def _run_steps(self, engine: Engine) -> None:
        for step in range(1, NUM_STEPS + 1):
            gc.collect()
            began = time.process_time()
            # The first step too: what a step that fails has sent until then is named.
            self.recorder.start_recording()
            self.signatures.is_recording = step == NUM_STEPS
            self._run_step(engine, step)
            self._record_seconds(f"step {step}", began)
        self.recorder.stop_recording()
        self.signatures.is_recording = False

    def _run_step(self, engine: Engine, step: int) -> None:
        config = self.config
        self.step = step
        set_balance_factor(engine.module, compute_balance_factor(config, step))
        self.recorder.enter_phase(f"step {step}: start", BATCH)
        engine.train_step(
            self._build_micro_batches(step), compute_learning_rate(config, step), extras=(0.0, 0.0)
        )
        self.recorder.enter_phase(f"step {step}: end", UPDATE)
        update_expert_balance(engine.module, True)

    def _build_micro_batches(self, step: int) -> list[Batch]:
        """Return the first and the last micro-batch of a step, and one of those between where
        they are different.

        In a pipeline all of them: several are under way at a time.
        """
        sequences = compute_micro_batch(self.config, self.layout)[0]
        if self.layout.pipeline > 1:
            batch: Batch = build_synthetic_batch(self.config, sequences, self.request.documents)
            return [batch] * self.num_micro_batches

        def build_batch(name: str, part: str) -> Batch:
            def mark() -> None:
                self.watch.begin_forward(f"step {step}, {name} micro-batch", part)

            return build_synthetic_batch(
                self.config, sequences, self.request.documents
            ).attach_mark(mark)

        parts = self.parts
        names = {1: ("last",), 2: ("first", "last"), 3: ("first", "middle", "last")}[len(parts)]
        return [build_batch(name, part) for name, part in zip(names, parts, strict=True)]

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts of the step of the micro-batches that run: two, of which the first stands for all
        but the last; three where the first one alone gathers weights.
        """
        engine = self.config.engine
        keeps_weights = isinstance(engine, TorchEngineConfig) and engine.keeps_weights_in_step
        if self.num_micro_batches == 1:
            return (ONCE,)
        if keeps_weights and self.num_micro_batches > 2:
            return (ONCE, REPEATED, ONCE)
        return (REPEATED, ONCE)

    @property
    def num_recorded(self) -> int:
        """Micro-batches that run in a step."""
        return self.num_micro_batches if self.layout.pipeline > 1 else len(self.parts)

    def count_repeats(self, part: str) -> int:
        """Return the number of times that a part of the logs occurs in a step."""
        return self.num_micro_batches - len(self.parts) + 1 if part == REPEATED else 1

    def _run_evaluation(self, engine: Engine) -> None:
        began = time.process_time()
        self.recorder.enter_phase("evaluation", EVALUATION)
        sequences = self.config.evaluation_sequences
        length = self.config.evaluation.resolve_sequence_length(self.config.batch.sequence_length)
        batch = self.config.batch.model_copy(update={"sequence_length": length})
        heldout = self.config.model_copy(update={"batch": batch})
        rows = SyntheticRows(
            heldout, sequences * self.layout.data_parallel_size, self.request.documents
        )
        ranks = RowRanks(self.layout.sequence_parallel_size, self.layout.pipeline)
        sum_over_rows(rows, engine.compute_logits, engine.device, ranks, sequences)
        self._record_seconds("evaluation", began)

    def _copy_state(self, engine: Engine) -> int:
        """Copy the state as an asynchronous save does, and return the bytes in host memory."""
        began = time.process_time()
        self.recorder.enter_phase("checkpoint", SAVING)
        tensors = engine.get_state().tensors
        self.state_sizes = measure_state_shards(tensors)
        copies = HostStateCopy().copy_from_device(tensors)
        self._record_seconds("save", began)
        return sum(get_local(one).numel() * one.element_size() for one in copies.values())

    def _list_kept_tables(self) -> list[tuple[str, str, str]]:
        """List the tables of positions by positions that outlive a step: buffers, and what a
        forward pass keeps for the next. A probe does not make them again.
        """
        gc.collect()
        model = self.config.model
        # Rotations have a row of a head's channels for each position.
        lengths = {*self.config.sequence_lengths, model.max_position_embeddings}
        lengths.discard(model.head_dim)
        return [
            (one.owner, one.tensor, KEPT_TABLE)
            for one in self.recorder.memory.list_live(KEPT)
            if sum(int(size) in lengths for size in NUMBERS.findall(one.tensor)) >= 2
        ]

    def _find_tables(self, engine: Engine) -> None:
        """Take a step of one micro-batch whose length marks the dimensions of positions. Nothing of
        it but tables is recorded.
        """
        if self.probe is None:
            return
        began = time.process_time()
        kept = self._list_kept_tables()
        sequences = compute_micro_batch(self.config, self.layout)[0]
        self.recorder.memory.is_closed = self.signatures.is_closed = True
        self.recorder.probe = self.probe
        documents = self.request.documents
        engine.train_step(
            [build_synthetic_batch(self.config, sequences, documents, self.probe.lengths)],
            compute_learning_rate(self.config, self.step),
            extras=(0.0, 0.0),
        )
        update_expert_balance(engine.module, True)
        for key in kept:
            self.recorder.squares.setdefault(key, 1)
        self._record_seconds("tables", began)

    def _record_seconds(self, name: str, began: float) -> None:
        self.seconds[name] = time.process_time() - began


def measure_shards(module: nn.Module) -> dict[str, int]:
    """Count the elements of each parameter that this rank holds.

    Args:
        module: The model of an engine, with no parameter gathered.

    Returns:
        Counts by name.
    """
    return {name: get_local(one).numel() for name, one in module.named_parameters()}


def measure_state_shards(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Count the elements of each master and moment that this rank holds, of those that are as large
    as their parameter.

    Args:
        tensors: The state of an engine that has taken a step.

    Returns:
        Counts by kind and name of the parameter, such as `first_moment/embed.weight`.
    """
    sizes = {}
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        master = tensors.get(f"parameter/{name}")
        if kind in STATE and master is not None and tensor.shape == master.shape:
            sizes[key] = get_local(tensor).numel()
    return sizes


def get_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local
