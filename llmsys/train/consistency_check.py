"""Notice while a run trains that a parameter has no gradient, or that replicas have drifted apart.

Both leave the loss finite and the run going: what has no gradient only decays, and replicas that
differ train different models. On logged steps each parameter must have had a gradient; every so
many steps the ranks that hold the same part of a parameter compare a hash of its bits.

Not seen: a gradient that exists and is wrong, and under DeepSpeed a gradient that a rank computed
and that was not summed. Where no two ranks hold the same part (FSDP2 without `layout.replicate`,
the matrices of ZeRO-3) there is nothing to compare.

Invariants:
- Nothing is changed, and a step that is not checked costs one look at its number.
- Every rank finds the same, so every rank ends.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.engine.state_hash import WORDS
from llmsys.errors import LlmsysError
from llmsys.estimate.pipeline_stages import PipelineCut
from llmsys.log import get_logger
from llmsys.model.local_tensor import get_local_tensor
from llmsys.model.moe_layer import MoELayer
from llmsys.model.transformer import Transformer
from llmsys.optim.parameter_groups import get_parameter_role
from llmsys.parallel.ddp import list_unused_parameters
from llmsys.parallel.process_group import (
    all_gather_object,
    all_gather_tensor,
    all_reduce_max,
    get_rank,
)
from llmsys.train.expert_load import ExpertLoad
from llmsys.train.norm_meter import get_layer_name

log = get_logger(__name__)

# Layers that a message names.
MAX_NAMED = 6

KEY = "train.consistency_check_every_steps"


class _Part(NamedTuple):
    """A parameter with the odd factor of its hash."""

    name: str
    parameter: Tensor
    factor: int


class ConsistencyCheck:
    """The checks of a run; every rank calls each method. Collective to build.

    Args:
        every_steps: Steps between comparisons of replicas.
        module: The model of the engine, after its parameters were sharded.
        layout: The resolved layout.
        device: Device of the reductions.
        cut: The stages of a pipeline, None without one.
        expert_rank: Place on the expert axis.
    """

    def __init__(
        self,
        every_steps: int,
        module: Transformer,
        *,
        layout: ParallelLayout,
        device: torch.device,
        cut: PipelineCut | None = None,
        expert_rank: int = 0,
    ) -> None:
        self._every_steps = every_steps
        self._module = module
        self._layout = layout
        self._device = device
        self._cut = cut
        self._expert_rank = expert_rank
        self._never_trained = frozenset(list_unused_parameters(module))
        named = list(module.named_parameters())
        self._names = [name for name, _ in named]
        self._parts = self._group_parts(named)
        found = all_gather_object(list(self._parts))
        self._num_groups = max(map(len, found))
        keys = [key for own in found for key in own]
        self.has_replicas = len(set(keys)) < len(keys)
        """Whether any two ranks hold the same part of some parameters."""

    def check_gradients(self, step: int, absent: Iterable[str], load: ExpertLoad) -> list[str]:
        """Check that every parameter had a gradient. Collective.

        Args:
            step: The step, counted from 1.
            absent: `StepResult.absent` of this rank.
            load: Load of the experts in the step.

        Returns:
            Parameters of routers and experts that no token reached, which need no gradient.

        Raises:
            LlmsysError: Others had none; they are named by stage and layer.
        """
        own = [name for name in absent if name not in self._never_trained]
        if not int(all_reduce_max(torch.tensor(len(own), device=self._device))):
            return []
        reached_by_none = self._list_idle_prefixes(load.list_idle_layers())
        idle = [name for name in own if name.startswith(reached_by_none)]
        missing = self._describe_layers(set(own) - set(idle), get_rank(), self._names)
        by_rank = all_gather_object((idle, missing))
        if places := dict.fromkeys(place for _, found in by_rank for place in found):
            raise LlmsysError(
                f"step {step}: parameters without a gradient, which would only decay: "
                f"{_format_places(list(places))}. Every parameter must take part in the loss, and "
                "every stage and replica in the sum of its gradient. The weights of this step "
                "were not saved. If they are of a module of your own that does not use them, "
                f"remove them or set {KEY}=0. Otherwise report this with the config, and use a "
                "layout without pipeline and replicate until it is solved."
            )
        return list(dict.fromkeys(name for found, _ in by_rank for name in found))

    def check_replicas(self, step: int) -> None:
        """Compare what several ranks hold if a step is checked. Collective then.

        Every rank gathers 16 bytes for each group of each rank: 0.2 MB on 2,000 ranks.

        Args:
            step: The step, counted from 1.

        Raises:
            LlmsysError: They differ; ranks and layers are named.
        """
        if step % self._every_steps or not self.has_replicas:
            return
        own = [[key, self._hash_group(parts)] for key, parts in self._parts.items()]
        own += [[0, 0]] * (self._num_groups - len(own))
        found = all_gather_tensor(
            torch.tensor(own, dtype=torch.int64, device=self._device)
        ).tolist()
        if pair := _find_different_ranks(found):
            self._raise_difference(step, *pair)

    def _group_parts(self, named: Iterable[tuple[str, nn.Parameter]]) -> dict[int, list[_Part]]:
        """Return the parameters of this rank by groups, each of which some ranks hold in the same
        parts.

        A key is a hash of names and places in the full tensors, so equal keys mean replicas.
        """
        groups: dict[str, list[_Part]] = defaultdict(list)
        places: dict[str, list[str]] = defaultdict(list)
        for name, parameter in named:
            sharding = "whole"
            if isinstance(parameter, DTensor):
                sharding = f"{parameter.device_mesh.mesh_dim_names} {parameter.placements}"
            # Ranks with the same embedding (two stages of a pipeline) may differ in all else, and
            # ranks with the same dense parameters in their experts.
            group = f"{sharding} {name == 'embed.weight'} {get_parameter_role(name) == 'experts'}"
            place = f"{name} {self._describe_place(name, parameter)}"
            groups[group].append(_Part(name, parameter, _hash_text(name) | 1))
            places[group].append(place)
        return {_hash_text("\n".join(places[group])): parts for group, parts in groups.items()}

    def _describe_place(self, name: str, parameter: Tensor) -> str:
        """Return the place of this rank's part in the full tensor."""
        if isinstance(parameter, DTensor):
            place = parameter.shape, parameter.device_mesh, parameter.placements
            return str([tuple(one) for one in compute_local_shape_and_global_offset(*place)])
        # DeepSpeed has the experts of a rank as their own tensors.
        expert_rank = self._expert_rank if get_parameter_role(name) == "experts" else 0
        return f"{tuple(parameter.shape)} {expert_rank}"

    @torch.no_grad()
    def _hash_group(self, parts: Sequence[_Part]) -> int:
        """Return a sum over the bits of a group, each parameter times its factor, modulo 2⁶⁴."""
        sums = torch.stack([_sum_words(part.parameter) for part in parts])
        factors = torch.tensor([part.factor for part in parts], dtype=torch.int64)
        return int((sums.cpu() * factors).sum())

    def _raise_difference(self, step: int, first: int, second: int) -> None:
        own = {
            part.name: (
                self._describe_place(part.name, part.parameter),
                int(_sum_words(part.parameter)),
            )
            for parts in self._parts.values()
            for part in parts
        }
        by_rank = all_gather_object(own if get_rank() in (first, second) else {})
        one = by_rank[first]
        other = by_rank[second]
        same_place = [
            name
            for name, (place, bits) in one.items()
            if name in other and other[name][0] == place and other[name][1] != bits
        ]
        raise LlmsysError(
            f"step {step}: ranks {first} and {second} hold the same parts with different bits, "
            "but replicas must be equal: "
            f"{_format_places(self._describe_layers(same_place, first, list(one)))}. Run the same "
            "command again to continue from the last checkpoint. If it happens again at about "
            "the same step, report it with the config; otherwise test the memory of both "
            f"machines. {KEY}=0 turns this check off."
        )

    def _list_idle_prefixes(self, idle_layers: Iterable[int]) -> tuple[str, ...]:
        idle = set(idle_layers)
        return tuple(
            f"{name}.{part}."
            for name, layer in self._module.named_modules()
            if isinstance(layer, MoELayer) and layer.number in idle
            for part in ("router", "experts")
        )

    def _describe_layers(
        self, names: Collection[str], rank: int, every: Iterable[str]
    ) -> list[str]:
        """Return the layers of some of the parameters of a rank, with their stage and the number
        of them.
        """
        found: Counter[str] = Counter()
        totals: Counter[str] = Counter()
        for name in every:
            layer = get_layer_name(name)
            totals[layer] += 1
            found[layer] += name in names
        return [
            f"{self._format_stage(layer, rank)}{layer} ({count} of {totals[layer]})"
            for layer, count in found.items()
            if count
        ]

    def _format_stage(self, layer: str, rank: int) -> str:
        if self._cut is None:
            return ""
        kind, _, number = layer.partition(".")
        if kind == "blocks":
            stage = next(
                index for index, layers in enumerate(self._cut.stages) if int(number) in layers
            )
        else:
            # The others are on the first and on the last rank.
            stage = 0 if rank < self._layout.ranks_per_stage else len(self._cut.stages) - 1
        return f"stage {stage}: "


def _sum_words(parameter: Tensor) -> Tensor:
    local = get_local_tensor(parameter.detach()).contiguous().view(-1)
    return local.view(WORDS[local.element_size()]).sum(dtype=torch.int64)


def _hash_text(text: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True
    )


def _find_different_ranks(found: Sequence[Sequence[Sequence[int]]]) -> tuple[int, int] | None:
    """Return two ranks with an equal key and different hashes; `found` has [key, hash] of each
    group by rank.
    """
    first: dict[int, tuple[int, int]] = {}
    for rank, groups in enumerate(found):
        for key, bits in groups:
            holder, expected = first.setdefault(key, (rank, bits))
            if bits != expected:
                return holder, rank
    return None


def _format_places(places: Sequence[str]) -> str:
    more = f" and {len(places) - MAX_NAMED} more layers" if len(places) > MAX_NAMED else ""
    return ", ".join(places[:MAX_NAMED]) + more
