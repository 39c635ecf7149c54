"""The peak of a step: against tensors that are alive while FSDP2 runs it, and against torch's own
tracker of memory.

Both run one of several pretended ranks, whose collectives do nothing, on a CPU: nothing is reserved
there.

Laws of the derived micro-batch: the largest that fits, by the arithmetic of the estimate, and no
silent overflow.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import FSDPModule

from llmsys.config.loading.load import load_run_config
from llmsys.config.objective import LossConfig
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.estimate.activation_memory import compute_micro_batch
from llmsys.estimate.peak_memory import USABLE_SHARE, estimate_peak_memory, find_largest_micro_batch
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.model.local_tensor import get_local_tensor
from llmsys.model.transformer import Transformer
from llmsys.parallel.activation_checkpoint import apply_activation_checkpoint
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.parallelize import apply_expert_parallel, apply_fsdp, materialize_parameters
from llmsys.parallel.plain import PlainModel
from llmsys.train import cross_entropy
from tests.helpers.fake_ranks import pretend_ranks
from tests.helpers.live_memory import Followed

CPU = MemoryProfile(device="cpu")


def config(*overrides: str) -> RunConfig:
    return load_run_config(
        "train/demo",
        ["batch.sequences=48", "batch.micro_sequences=auto", "train.precision=bf16", *overrides],
    )


def peak(one: RunConfig, ranks: int, sequences: int) -> int:
    batch = one.batch.model_copy(update={"micro_sequences": sequences})
    one = one.model_copy(update={"batch": batch})
    return estimate_peak_memory(one, one.layout.resolve(ranks, one.model), system=CPU).peak_bytes


@pytest.mark.parametrize("sequences", [1, 2, 3, 4, 6, 8, 12, 24])
def test_the_largest_divisor_that_fits_is_taken(sequences: int) -> None:
    one, ranks = config(), 2
    memory = int(peak(one, ranks, sequences) / USABLE_SHARE) + 1
    choice = find_largest_micro_batch(one, one.layout.resolve(ranks, one.model), memory, CPU)
    assert (choice.sequences, choice.share) == (sequences, 24)
    assert choice.peak_bytes <= USABLE_SHARE * memory
    assert f"selects {sequences} of a rank's 24 sequences per forward pass" in str(choice)


def test_a_micro_batch_divides_every_size_of_a_ramp() -> None:
    one = config("batch.ramp={start_tokens: 6144, ramp_tokens: 90000}")
    choice = find_largest_micro_batch(one, one.layout.resolve(2, one.model), 1 << 40, CPU)
    assert choice.sequences == 6
    assert all(size // 2 % choice.sequences == 0 for size in one.batch.step_sizes)


def test_when_nothing_fits_the_message_says_what_binds_and_what_would_help() -> None:
    one = config()
    with pytest.raises(
        ConfigError, match=r"auto finds no size that fits; .* runs out .* GiB over capacity .*"
    ):
        find_largest_micro_batch(one, one.layout.resolve(2, one.model), 1 << 26, CPU)


ON_CPU = MemoryProfile(device="cpu", measured="allocated", evaluation="none")
MODEL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
LARGE = {"hidden_size": 256, "intermediate_size": 1024}


def run_of(sequences: int = 2, length: int = 128, shard: int = 4, **changes: Any) -> RunConfig:
    """`sequences` for each rank; changes of the model, `train` and `batch_more` for the run."""
    batch_more = changes.pop("batch_more", None)
    engine = {"kind": "torch"} | changes.pop("engine", {})
    train = {"precision": "bf16"} | changes.pop("train", {})
    return RunConfig.model_validate(
        {
            "model": MODEL | changes,
            "batch": {
                "sequence_length": length,
                "sequences": sequences * shard,
                "attention_scope": "window",
            }
            | (batch_more or {}),
            "engine": {"kind": "torch", "data_parallel": "plain"} if batch_more else engine,
            "layout": {"shard": shard},
            "train": train,
        }
    )


class Rank:
    """Rank 0 of the layout with its model in shards, and a step."""

    def __init__(self, config: RunConfig) -> None:
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        meshes = build_device_meshes(config.layout, torch.device("cpu"))
        with torch.device("meta"):
            self.model = Transformer(config.model)
        apply_activation_checkpoint(self.model, config.train.activation_checkpoint)
        apply_expert_parallel(self.model, meshes)
        apply_fsdp(self.model, meshes, dtype)
        for module in self.model.modules():
            if isinstance(module, FSDPModule) and config.engine.keeps_weights_in_micro_batch:
                module.set_reshard_after_forward(False, recurse=False)
        materialize_parameters(
            self.model,
            torch.device("cpu"),
            lambda name, shape, region: torch.zeros([size for _, size in region or ()]).normal_(
                std=0.02
            ),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        shape = (
            config.batch.sequences_per_step // config.layout.data_parallel_size,
            config.batch.sequence_length,
        )
        self.tokens_BT = torch.randint(0, config.model.vocab_size, shape)
        self._loss = cross_entropy.build_training_loss(LossConfig())
        cross_entropy._logits_buffers.clear()  # buffers that larger tests left

    def backward(self) -> None:
        loss: Tensor = self.model(
            self.tokens_BT, finish=lambda head, x, places: self._loss(head, x, self.tokens_BT)
        )
        loss.backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_bytes(self) -> int:
        """Masters and both moments."""
        return 3 * sum(one.to_local().nbytes for one in self.model.parameters())  # type: ignore[attr-defined]


class PlainRank(Rank):
    """Rank 0 with whole weights, two micro-batches and a step."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        with torch.device("meta"):
            self.model = Transformer(config.model)
        apply_activation_checkpoint(self.model, config.train.activation_checkpoint)
        self.plain = PlainModel(
            self.model,
            build_device_meshes(config.layout, torch.device("cpu")),
            compute_dtype=dtype,
            device=torch.device("cpu"),
            initial=lambda name, shape, region: torch.zeros(
                list(shape) if region is None else [size for _, size in region]
            ).normal_(std=0.02),
        )
        self.optimizer = torch.optim.AdamW([*self.plain.masters.values()], foreach=False)
        size = compute_micro_batch(config, config.layout)[0]
        self.tokens_BT = self.tokens_BT[:size]
        self.count = compute_micro_batch(config, config.layout)[1]

    def backward(self) -> None:
        for number in range(self.count):
            with self.plain.enter_micro_batch(last=number == self.count - 1):
                super().backward()
        self.plain.finish_gradients()

    def state_bytes(self) -> int:
        masters = {id(one): one for one in self.plain.masters.values()}
        weights = [one for one in self.model.parameters() if id(one) not in masters]
        local = sum(get_local_tensor(one).nbytes for one in masters.values())
        return 3 * local + sum(one.nbytes for one in weights)


PLAIN_CHANGES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "blocks again": {"train": {"activation_checkpoint": "full"}},
    "fp32": {"train": {"precision": "fp32"}},
    "weights": LARGE | {"train": {"activation_checkpoint": "full"}},
    "experts": {"moe": MOE},
}
PLAIN: dict[str, RunConfig] = {
    f"{name}, {ranks} ranks, {count} micro-batches": run_of(
        2, shard=ranks, **changes, batch_more={"micro_sequences": 2 // count}
    )
    for name, changes in PLAIN_CHANGES.items()
    for ranks in (1, 4)
    for count in (1, 2)
}


@pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN)
def test_the_peak_without_a_wrapper_is_that_of_living_tensors(config: RunConfig) -> None:
    with pretend_ranks(config.layout.world_size):
        rank = PlainRank(config)
        rank.step()
        with Followed(*rank.model.parameters(), *rank.plain.masters.values()) as followed:
            rank.backward()
    measured = followed.peak_bytes + rank.state_bytes()
    ledger = estimate_peak_memory(config, config.layout, system=ON_CPU)
    assert measured * 0.99 < ledger.peak_bytes < measured * 1.12, ledger.peak_instant


CASES: dict[str, RunConfig] = {
    "nothing again": run_of(),
    "blocks again": run_of(train={"activation_checkpoint": "full"}),
    "selected again": run_of(train={"activation_checkpoint": "selective"}),
    "fp32": run_of(train={"precision": "fp32"}),
    "vocabulary": run_of(vocab_size=8192),
    "batch": run_of(sequences=6),
    "weights": run_of(1, 64, 8, **LARGE, train={"activation_checkpoint": "full"}),
    "experts": run_of(moe=MOE),
    "kept weights": run_of(1, 64, 8, **LARGE, engine={"reshard": "never"}),
    "kept weights, blocks again": run_of(
        1, 64, 8, **LARGE, engine={"reshard": "never"}, train={"activation_checkpoint": "full"}
    ),
    "a branch that saves nothing": run_of(
        2,
        512,
        residual={"kind": "parallel"},
        feed_forward_chunk=32,
        max_position_embeddings=512,
    ),
    "two ranks": run_of(
        1, 256, 2, **LARGE, vocab_size=2048, train={"activation_checkpoint": "selective"}
    ),
}


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_the_peak_is_that_of_living_tensors_or_up_to_a_tenth_above(config: RunConfig) -> None:
    with pretend_ranks(config.layout.world_size):
        rank = Rank(config)
        rank.step()
        with Followed(*rank.model.parameters()) as followed:
            rank.backward()
    measured = followed.peak_bytes + rank.state_bytes()
    ledger = estimate_peak_memory(config, config.layout, system=ON_CPU)
    assert measured * 0.99 < ledger.peak_bytes < measured * 1.12, ledger.peak_instant


@pytest.mark.parametrize("name", ["nothing again", "selected again", "fp32", "vocabulary"])
@pytest.mark.filterwarnings("ignore")
def test_the_peak_is_that_of_torchs_tracker_within_a_few_percent(name: str) -> None:
    config = CASES[name]
    with pretend_ranks(config.layout.world_size):
        rank = Rank(config)
        rank.step()
        tracker = FSDPMemTracker(rank.model, rank.optimizer)
        tracker.track_inputs((rank.tokens_BT,))
        with tracker:
            rank.step()
        peak = {
            str(kind): size
            for kind, size in tracker.get_tracker_snapshot("peak")[torch.device("cpu")].items()
        }
    ledger = estimate_peak_memory(config, config.layout, system=ON_CPU)
    items = {item.name: item.bytes for item in ledger.peak.items}
    by_kind = {kind.rpartition(".")[2]: size for kind, size in peak.items()}
    assert items["masters"] == by_kind["SHARDED_PARAM"]
    assert items["moments"] == pytest.approx(by_kind["OPT"], rel=1e-3)  # it counts the steps too
    assert ledger.peak_bytes == pytest.approx(by_kind["Total"], rel=0.05)
