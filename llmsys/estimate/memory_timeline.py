"""A ledger of memory: what one rank holds at named instants of a step, and whether that fits a
device.

Each instant is a list of items in bytes; the peak is the fullest instant. Promises that an answer
about a device names the instant that binds, its largest items, and what would help by how much.

Some items are the tensors that a policy of recomputation saves.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from llmsys.config.module_tensors import SavedTensor
from llmsys.estimate.json_output import MemoryInstant, StepMemory
from llmsys.estimate.software_profile import MemoryProfile

GIB = 2**30


@dataclass(frozen=True)
class MemoryItem:
    """Something that takes memory, in bytes."""

    name: str
    bytes: int


def reduce_item_bytes(items: list[MemoryItem], name: str, free: int) -> list[MemoryItem]:
    """Return the items, with one of them in a place that was `free` before."""
    return [
        MemoryItem(one.name, max(0, one.bytes - free)) if one.name == name else one for one in items
    ]


@dataclass(frozen=True)
class MemorySnapshot:
    """A moment of a step, and all that is in memory then."""

    name: str
    items: tuple[MemoryItem, ...]

    @property
    def bytes(self) -> int:
        """The sum of its items."""
        return sum(item.bytes for item in self.items)


@dataclass(frozen=True)
class SuggestedFix:
    """A change of the config, and the bytes by which it lowers the peak."""

    change: str
    saved_bytes: int


@dataclass(frozen=True)
class FitResult:
    """Result of a fit check; `spare_bytes` is below zero where the rank does not fit."""

    fits: bool
    spare_bytes: int
    text: str


@dataclass(frozen=True)
class MemoryTimeline:
    """The instants of one rank. `driver_bytes` is what the device's driver and its communication
    take in addition.
    """

    instants: tuple[MemorySnapshot, ...]
    driver_bytes: int = 0
    remedies: Callable[[], tuple[SuggestedFix, ...]] = field(
        default=tuple, compare=False, repr=False
    )

    @property
    def peak(self) -> MemorySnapshot:
        """The fullest instant; of equal ones the first."""
        return max(self.instants, key=lambda instant: instant.bytes)

    @property
    def peak_bytes(self) -> int:
        """Bytes of the fullest instant."""
        return self.peak.bytes

    @property
    def peak_instant(self) -> str:
        """Name of the fullest instant."""
        return self.peak.name

    def list_largest_items(self, count: int) -> list[MemoryItem]:
        """Return the largest items of the fullest instant, largest first.

        Args:
            count: number of items.
        """
        return sorted(self.peak.items, key=lambda item: -item.bytes)[:count]

    def compute_fit_result(self, capacity_bytes: int) -> FitResult:
        """Compare the peak with the memory of a device.

        Args:
            capacity_bytes: memory of the device.

        Returns:
            Whether it fits, the bytes to spare, and a sentence; where it does not fit, with the
            causes
            and fixes.
        """
        spare = capacity_bytes - self.driver_bytes - self.peak_bytes
        largest = ", ".join(
            f"{item.name} {item.bytes / GIB:.1f} GiB" for item in self.list_largest_items(3)
        )
        peak = f"{(self.peak_bytes + self.driver_bytes) / GIB:.1f} GiB"
        if spare >= 0:
            return FitResult(
                True,
                spare,
                f"rank 0 fits: {peak} of {capacity_bytes / GIB:.1f} GiB {self.peak_instant} "
                f"({largest}).",
            )
        return FitResult(
            False,
            spare,
            f"rank 0 runs out {self.peak_instant}: {peak} on a device of "
            f"{capacity_bytes / GIB:.1f} GiB, {-spare / GIB:.1f} GiB over capacity ({largest})."
            f" {_format_suggested_fixes(self.remedies(), -spare)}",
        )

    def to_output(self) -> StepMemory:
        """Return the instants as `llmsys estimate --json` prints them."""
        return StepMemory(
            peak_bytes=self.peak_bytes,
            driver_bytes=self.driver_bytes,
            peak_instant=self.peak_instant,
            instants=[
                MemoryInstant(
                    name=one.name,
                    bytes=one.bytes,
                    items={item.name: item.bytes for item in one.items},
                )
                for one in self.instants
            ],
        )


def _format_suggested_fixes(remedies: tuple[SuggestedFix, ...], missing_bytes: int) -> str:
    """Remedies that are enough alone come first, the smallest change in memory before larger
    ones.
    """
    helpful = [one for one in remedies if one.saved_bytes > 0]
    if not helpful:
        return (
            "No single change of activation checkpointing, micro-batch, sharding or offload "
            "reduces it; use more ranks."
        )
    enough = sorted(
        (one for one in helpful if one.saved_bytes >= missing_bytes),
        key=lambda one: one.saved_bytes,
    )
    others = sorted(
        (one for one in helpful if one.saved_bytes < missing_bytes),
        key=lambda one: -one.saved_bytes,
    )
    told = [f"{one.change} saves {one.saved_bytes / GIB:.1f} GiB" for one in (enough + others)[:3]]
    return f"{'; '.join(told)}{'' if enough else '; none of them is enough alone'}."


# Names of what a program may compute again, or keep in 8 bits.
CHEAP_OUTPUTS = (
    "normed input of ",
    "normed query latent",
    "normed key-value latent",
    "gate times up",
)
UP_PROJECTIONS = ("keys and values", "whole queries", "whole keys")
LINEAR_INPUTS = (*CHEAP_OUTPUTS, "gate", "up", "sorted visits")
# A byte, or 12 bits, and a float32 scale for 128 values, over the 2 bytes of a value.
FP8_SHARE, WIDE_FP8_SHARE = (1 + 4 / 128) / 2, (1.5 + 4 / 128) / 2


def compute_saved_bytes(
    tensors: Iterable[SavedTensor], policy: str, compiled: bool, system: MemoryProfile
) -> int:
    """Return the bytes that a block saves under a recompute policy: none, selective or block."""
    return sum(tensor.bytes for tensor in select_saved_tensors(tensors, policy, compiled, system))


def compute_temporary_bytes(
    branch: list[SavedTensor], policy: str, compiled: bool, system: MemoryProfile
) -> int:
    """Return the bytes of tensors that a branch makes and does not save."""
    made = sum(one.bytes for one in branch if not (compiled and one.producer == "fused"))
    return max(0, made - compute_saved_bytes(branch, policy, compiled, system))


def select_saved_tensors(
    tensors: Iterable[SavedTensor], policy: str, compiled: bool, system: MemoryProfile
) -> list[SavedTensor]:
    """Return the tensors that a block saves under a recompute policy, with the bytes that the
    program keeps of them.
    """
    found = _select_by_policy(list(tensors), policy, compiled, system)
    if policy == "full" or system.saves_plainly:
        return found
    return [
        _reduce_tensor_bytes(tensor, system)
        for tensor in found
        if not _is_computed_again(tensor, system)
    ]


def _is_computed_again(tensor: SavedTensor, system: MemoryProfile) -> bool:
    """Return whether the program frees a tensor that autograd would save."""
    if tensor.name == "expert outputs":
        return system.expert_weights == "inputs"
    if tensor.name in UP_PROJECTIONS:
        return system.recomputed == "latent"
    if tensor.producer == "fused":
        return system.recomputed != "nothing"
    is_gathered = tensor.producer == "gather" and system.gathered == "kept"
    is_cheap = tensor.name.startswith(CHEAP_OUTPUTS) and not is_gathered
    return is_cheap and system.recomputed in ("elementwise", "latent")


def _reduce_tensor_bytes(tensor: SavedTensor, system: MemoryProfile) -> SavedTensor:
    """Return a saved tensor in the type that the program keeps it in."""
    if system.linear_inputs == "compute":
        return tensor
    if tensor.name == "attention output":
        return replace(tensor, bytes=int(WIDE_FP8_SHARE * tensor.bytes))
    is_input = tensor.name.startswith(LINEAR_INPUTS)
    return replace(tensor, bytes=int(FP8_SHARE * tensor.bytes)) if is_input else tensor


def _select_by_policy(
    tensors: list[SavedTensor], policy: str, compiled: bool, system: MemoryProfile
) -> list[SavedTensor]:
    if policy == "full":
        return [tensor for tensor in tensors if tensor.producer == "input"]
    if policy == "selective":
        return _apply_selective_policy(tensors, compiled, system)
    # Compiled, what only further pointwise operations read is computed again; what a matmul reads
    # stays (min-cut partitioner, which computes nothing again that backward would have to write to
    # memory).
    return [
        tensor
        for tensor in tensors
        if tensor.is_saved and not (compiled and tensor.producer == "fused")
    ]


def _apply_selective_policy(
    tensors: list[SavedTensor], compiled: bool, system: MemoryProfile
) -> list[SavedTensor]:
    if system.selective == "attention":
        return [
            tensor for tensor in tensors if tensor.is_saved and not tensor.name.startswith("scores")
        ]
    products = [tensor for tensor in tensors if tensor.producer == "product"]
    if system.selective == "alternate":
        products = products[::2]
    others = [
        tensor for tensor in tensors if tensor.producer in ("input", "attention", "collective")
    ]
    return [tensor for tensor in [*products, *others] if tensor.is_needed or not compiled]
