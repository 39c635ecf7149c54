"""Look for silent data corruption: a rank's forward and backward of a step are repeated on another
rank, and compared.

Each rank first computes the step of the next data-parallel rank, then its own; a rank alone
computes its own twice. The gradients of all parameters, before any sum over ranks, are hashed.
Equal inputs on equal machines give equal bits, so other hashes are an error of a processor or a
memory. Dixit 2021 (arXiv:2102.11245) gives rates of such errors.

Invariants:
- The weights of both passes are those before the step, and a step whose hashes differ changes none.
- A step that is not checked costs one look at its number.
"""

import hashlib
import platform
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.data.batch import Batch
from llmsys.data.shuffle import derive_order_key
from llmsys.engine.engine import Engine, RepeatingEngine
from llmsys.engine.state_hash import hash_slice
from llmsys.errors import ConfigError, LlmsysError
from llmsys.model.transformer_block import TransformerBlock
from llmsys.parallel.process_group import all_gather_object, get_rank
from llmsys.train.build_objective import build_step_batches

# Micro-batches of one data-parallel rank in a step counted from 0, as (step, data rank).
ReadBatches = Callable[[int, int], Sequence[Batch]]


def require_comparable_gradients(config: RunConfig, device: torch.device) -> None:
    """Raise unless a step can be repeated bit for bit on another rank.

    Args:
        config: the config of the run.
        device: device of this rank.

    Raises:
        ConfigError: the engine, the layout or the kernels do not allow it.
    """
    key = f"train.corruption_check_every_steps={config.train.corruption_check_every_steps}"
    if config.engine.kind != "torch":
        raise ConfigError(
            f"{key} needs engine.kind=torch, not {config.engine.kind}. Use it, or set the key to 0."
        )
    for axis in ("expert", "tensor", "context", "pipeline"):
        if (size := getattr(config.layout, axis)) > 1:
            raise ConfigError(
                f"{key} compares ranks that compute whole sequences alone, and "
                f"layout.{axis}={size} splits them. Use layout.{axis}=1, or set the key to 0."
            )
    if config.train.precision == "fp16":
        raise ConfigError(
            f"{key}: train.precision=fp16 skips steps that overflow. Use bf16 or fp32, or set the "
            "key to 0."
        )
    if config.train.noise_scale_every_steps:
        raise ConfigError(
            f"{key}: train.noise_scale_every_steps={config.train.noise_scale_every_steps} takes "
            "micro-batches in another order. Set one of the two keys to 0."
        )
    if device.type != "cpu" and config.train.reproducibility != "bitwise":
        raise ConfigError(
            f"{key} compares bits, and the kernels of "
            f"train.reproducibility={config.train.reproducibility} add in any order on "
            f"{device.type}. Set train.reproducibility=bitwise, or the key to 0."
        )


class CorruptionCheck:
    """A check of every `every_steps`-th step.

    Args:
        config: The config of the run.
        engine: The engine that computes gradients.
        read_batches: Reads the micro-batches of any data-parallel rank.
        data_rank: The data-parallel rank of this process.
        ranks: Data-parallel ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: RepeatingEngine,
        read_batches: ReadBatches,
        data_rank: int,
        ranks: int,
    ) -> None:
        self._every_steps = config.train.corruption_check_every_steps
        self._seed = config.run.seed
        self._engine = engine
        self._read_batches = read_batches
        self._data_rank = data_rank
        self._ranks = ranks
        self._step = -1
        self._repeated = ""
        self._hash = GradientHash(engine.module)

    def begin_step(self, step: int) -> None:
        """Compute the gradients of the next rank if step `step`, counted from 0, is checked.
        Collective then.
        """
        if (step + 1) % self._every_steps:
            return
        self._repeated = self._hash_repetition(step, 1)
        self._step = step
        self._hash.start()

    def end_step(self) -> dict[str, Any] | None:
        """Compare, before the weights change, and return the fields of a `corruption_check` event.
        Collective.

        Raises:
            LlmsysError: two ranks computed other gradients from the same data.
        """
        if self._step < 0:
            return None
        step = self._step
        self._step = -1
        found = all_gather_object((self._hash.finish(), self._repeated, platform.node()))
        own, repeated, hosts = zip(*found, strict=True)
        suspects = [
            rank for rank in range(self._ranks) if own[rank] != repeated[(rank - 1) % self._ranks]
        ]
        if suspects:
            third = all_gather_object(self._hash_repetition(step, 2))
            raise LlmsysError(
                " ".join(
                    self._describe_suspect(step, one, own, repeated, third, hosts)
                    for one in suspects
                )
            )
        return {
            "hash": hashlib.blake2b("".join(own).encode(), digest_size=16).hexdigest(),
            "ranks": self._ranks,
        }

    def _hash_repetition(self, step: int, distance: int) -> str:
        """Return the hash of the gradients of the rank `distance` after this one, computed here."""
        data_rank = (self._data_rank + distance) % self._ranks
        batches = self._read_batches(step, data_rank)
        self._hash.start()
        # as seed_dropout
        torch.manual_seed(derive_order_key("dropout", self._seed, step, data_rank) >> 1)
        self._engine.repeat_gradients(batches, data_rank)
        return self._hash.finish()

    def _describe_suspect(
        self,
        step: int,
        rank: int,
        own: Sequence[str],
        repeated: Sequence[str],
        third: Sequence[str],
        hosts: Sequence[str],
    ) -> str:
        """Return what differs for the data of `rank`, the rank at fault if two of three agree,
        and the next step.
        """
        first = rank
        second = (rank - 1) % self._ranks
        last = (rank - 2) % self._ranks
        computed = [(first, own[first]), (second, repeated[second]), (last, third[last])]
        values = [value for _, value in computed]
        lonely = [holder for holder, value in computed if values.count(value) == 1]
        text = (
            f"step {step + 1}: the gradients of rank {rank} have hash {own[first]}, and computed "
            f"again on rank {second} {repeated[second]}."
        )
        if len(lonely) != 1:
            return (
                f"{text} A third computation gave {third[last]}: these kernels do not repeat "
                "their bits. Set train.reproducibility=bitwise, or "
                "train.corruption_check_every_steps=0."
            )
        return (
            f"{text} A third computation agrees with all but rank {lonely[0]} on "
            f"{hosts[lonely[0]]}, whose processor or memory is suspect. No weight was changed. "
            "Test or exclude that machine, and run the same command again to continue from the "
            "last checkpoint."
        )


def build_corruption_check(
    config: RunConfig, engine: Engine, layout: ParallelLayout
) -> CorruptionCheck | None:
    """Return the check of `train.corruption_check_every_steps`, or None where it is 0.

    Args:
        config: the config, accepted by `require_comparable_gradients`.
        engine: the engine of the run.
        layout: the resolved layout.
    """
    if not config.train.corruption_check_every_steps:
        return None
    ranks = layout.data_parallel_size
    own = layout.get_data_rank(get_rank())

    def read_batches(step: int, data_rank: int) -> Sequence[Batch]:
        return build_step_batches(config, ranks, data_rank).get_micro_batches(step)

    return CorruptionCheck(config, cast(RepeatingEngine, engine), read_batches, own, ranks)


class GradientHash:
    """The hash of all parameter gradients between `start` and `finish`, before they are summed over
    ranks.

    Hooks are on the tensors of the forward pass: under FSDP these are gathered parameters, which
    exist inside of it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._units = [
            ("", module),
            *((n, m) for n, m in module.named_modules() if isinstance(m, TransformerBlock)),
        ]
        self._handles: list[RemovableHandle] = []
        self._sums: dict[str, list[int]] = {}

    def start(self) -> None:
        """Watch every parameter from the next forward pass on."""
        self._sums = {}
        seen = set[int]()
        for prefix, unit in self._units:
            self._handles.append(
                unit.register_forward_pre_hook(partial(self._watch_parameters, prefix, seen))
            )

    def finish(self) -> str:
        """Return the hash, and remove every hook."""
        while self._handles:
            self._handles.pop().remove()
        return hashlib.blake2b(repr(sorted(self._sums.items())).encode(), digest_size=8).hexdigest()

    def _watch_parameters(
        self, prefix: str, seen: set[int], unit: nn.Module, arguments: tuple[Any, ...]
    ) -> None:
        for name, parameter in unit.named_parameters(prefix):
            # The blocks' parameters have other tensors inside of their own forward passes.
            if (
                id(parameter) not in seen
                and parameter.requires_grad
                and not hasattr(type(parameter), "to_local")
            ):
                seen.add(id(parameter))
                self._handles.append(parameter.register_hook(partial(self._add_gradient, name)))

    def _add_gradient(self, name: str, gradient: Tensor) -> None:
        _, sums = hash_slice(gradient)
        # A sum: micro-batches may come in any order.
        self._sums[name] = [
            (a + b) % 2**64 for a, b in zip(self._sums.get(name, [0, 0]), sums, strict=True)
        ]
