"""Compare a run with the plain process: its actions, each loss and norm, and every tensor.

Invariants:
- A band is stated here, with the arithmetic that it follows from, or it is that of fp32.
- A number outside its band is wrong unless errors of rounding, planted in the plain process, move
  it as far (llmsys/doctor/rounding.py).
- Numbers are compared in the order in which a step computes them, so the first one that differs is
  the cause.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.doctor.pairs.events import Action, Entry
from llmsys.doctor.pairs.plain_losses import DocumentLosses


@dataclass(frozen=True)
class Bands:
    """Largest relative differences.

    Attributes:
        loss: of a loss.
        norm: of the gradient norm.
        moments: of a tensor of the optimizer's state, by its length.
        rotated: of second moments in a basis that SOAP computed otherwise; 0: as other moments.
        weights: of a parameter or an average, by its length.
        buffers: absolute, of balancing biases and shares of experts.
        small: a tensor shorter than this share of the longest of its kind is mostly rounding, and
            is compared by that share.
        widest: share of a number that rounding may explain at most.
        margin: by what factor a run may be beyond the planted errors of rounding.
    """

    loss: float
    norm: float
    moments: float
    weights: float
    buffers: float
    rotated: float = 0.0
    small: float = 1e-2
    # A step of a tiny model that blows errors up further is a defect itself.
    widest: float = 1e-3
    margin: float = 1.0


# Sums of a few hundred float32 numbers, each rounded by 6e-8.
FP32 = Bands(1e-5, 1e-5, 1e-5, 1e-5, 1e-6)
# One rounding is 2⁻⁹ (bf16) or 2⁻¹² (fp16); a value goes through about 16 of them, and gradients
# through as many again. A weight moves by the rate of 0.01 where it is about 0.1 long. A token may
# choose the other one of two nearly equal experts, which turns its gradient and moves a bias by
# twice its rate: planted errors say how far.
BF16 = Bands(2**-5, 2**-3, 2**-2, 0.1, 0.1, small=0.1, widest=float("inf"))
FP16 = Bands(2**-8, 2**-4, 2**-3, 0.1, 0.1, small=0.1, widest=float("inf"))
# bf16 keeps 8 bits of a moment and rounds up or down by chance, so an element is off by 2⁻⁷ at
# most, and an update by half as much of the rate.
BF16_MOMENTS = Bands(1e-5, 1e-5, 2**-7, 2**-8, 1e-6)
# A code of a first moment is (c / 127)² of its block's largest, of a second (c / 255)⁴: neighbours
# of the largest are 2 / 127 and 4 / 255 apart, and smaller elements are off by more of themselves.
INT8_MOMENTS = Bands(1e-5, 1e-5, 2**-4, 2**-5, 1e-6)

# A step of SOAP is turned back from the basis of the step before, by two products of matrices in
# float32 each way.
SOAP_WEIGHTS = 1e-4
# Over eleven steps bases go apart as far as neighbouring eigenvalues let them, and weights,
# gradients and losses with them: planted errors move a first moment by a third of itself.
SOAP_UNCORRECTED = Bands(1e-3, 1e-2, 3e-2, 3e-2, 1e-6, rotated=0.2, widest=0.5)

# Where the plain process does not take over the state of each step, errors add up over eleven of
# them, and updates that divide a gradient by its own size enlarge them. Planted errors say how far,
# also those of moments in fewer bits; half of a number is never rounding.
UNCORRECTED = {
    FP32: replace(FP32, widest=3e-2),
    BF16_MOMENTS: replace(BF16_MOMENTS, widest=0.5),
    INT8_MOMENTS: replace(INT8_MOMENTS, widest=0.5),
}

# A token may take another of two nearly equal experts, or another bucket of its hash, and moments
# then hold the gradients of other tokens: in eleven steps often, in one step of float32 where two
# scores are as close as their rounding. Planted errors do the same there, and nowhere else. What is
# missing, or counted twice, is off by all of itself.
WIDEST_WITH_CHOICES = 0.9
# In 16 bits a single step has such tokens, more than a sample of errors may have: of a hundred
# tensors in each of eleven steps some are beyond all 64 samples.
MARGIN_WITH_CHOICES = 1.5

# What rounding may change: names of numbers and tensors → absolute error.
Rounding = Mapping[str, float]
LOSS, NORM = "the loss", "the gradient norm"
DOCUMENTS, SUM = "the losses of documents", "the sum of the losses of documents, by target,"

# A tensor that is shorter is zero but for the rounding of numbers of size 1 to float64.
LEAST = 1e-10

# Elements whose sign in Lion's update rounding may decide: a flip moves a weight by twice the rate.
SIGN_FLIPS = 4


@dataclass(frozen=True)
class Difference:
    """The first number of a run that is outside its band.

    Attributes:
        place: index among the actions of the run.
        action: text of the action.
        what: name of the number or tensor.
        found: its value, or its length.
        expected: that of the plain process.
        distance: relative difference.
        band: the largest one that is right.
    """

    place: int
    action: str
    what: str
    found: float
    expected: float
    distance: float
    band: float

    def __str__(self) -> str:
        return (
            f"{self.action}: {self.what} is {self.found:.6g}, plainly {self.expected:.6g} "
            f"(apart by {self.distance:.1e}, allowed {self.band:.0e})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        return asdict(self)


def has_choices(model: ModelConfig) -> bool:
    """Return whether a token's neighbours or experts are chosen by numbers that rounding moves.

    Args:
        model: the architecture.
    """
    return model.moe is not None or model.attention.kind == "lsh"


def select_bands(config: RunConfig, *, is_corrected: bool = True) -> Bands:
    """Return the bands of a run, by its precision and by the dtype of its moments.

    Args:
        config: the config of the run.
        is_corrected: the plain process takes over the state after each step.
    """
    bands = _select_corrected_bands(config)
    margin = MARGIN_WITH_CHOICES if bands in (BF16, FP16) else bands.margin
    if not is_corrected:
        # In 16 bits each step begins with the state of the run.
        bands = UNCORRECTED.get(bands, bands)
    if has_choices(config.model):
        bands = replace(bands, margin=margin, widest=max(bands.widest, WIDEST_WITH_CHOICES))
    if config.optimizer.kind == "soap":
        bands = replace(bands, weights=max(bands.weights, SOAP_WEIGHTS))
        if not is_corrected and config.train.precision == "fp32":
            bands = SOAP_UNCORRECTED
    return bands


def _select_corrected_bands(config: RunConfig) -> Bands:
    match config.train.precision, getattr(config.optimizer, "moments", "fp32"):
        case "fp32", "fp32":
            return FP32
        case "fp32", "bf16":
            return BF16_MOMENTS
        case "fp32", _:
            return INT8_MOMENTS
        case "fp16", "fp32" | "bf16":
            return FP16
        case _:
            return BF16


def format_action(action: Action) -> str:
    """Return an action as text."""
    step = (
        "the initial weights"
        if action.kind == "load" and action.step == 0
        else f"step {action.step}"
    )
    refused = "" if action.is_applied else ", refused"
    return f"{action.kind} {step}{refused}{', in the branch' if action.run else ''}"


def find_action_difference(
    found: Sequence[Action], expected: Sequence[Action]
) -> Difference | None:
    """Return the first action that is another one, or None.

    Args:
        found: actions of the run.
        expected: actions that follow from the events.
    """
    for place in range(max(len(found), len(expected))):
        one = found[place] if place < len(found) else None
        other = expected[place] if place < len(expected) else None
        if one != other:
            texts = [
                format_action(action) if action is not None else "nothing"
                for action in (one, other)
            ]
            return Difference(
                place, texts[0], f"the action; {texts[1]} was expected: it", 1, 0, float("inf"), 0
            )
    return None


def find_difference(
    place: int,
    entry: Entry,
    loss: float,
    norm: float,
    tensors: Mapping[str, Tensor],
    bands: Bands,
    rate: float = 0.0,
    rounding: Rounding = MappingProxyType({}),
    documents: DocumentLosses | None = None,
) -> Difference | None:
    """Return the first number of a step or an evaluation that is outside its band, or None.

    Args:
        place: index among the actions of the run.
        entry: what the run did.
        loss: loss of the plain process.
        norm: its gradient norm.
        tensors: its state.
        bands: the bands.
        rate: learning rate of optimizers whose update is a sign; 0 for others.
        rounding: how far rounding moves each number; what is left out by no more than its band.
        documents: its losses by document; compared where the run has stored its own.
    """
    action = format_action(entry.action)
    if entry.action.kind in ("train", "evaluate"):
        # A step that is refused by its norm has none to compare.
        numbers = [(LOSS, entry.loss, loss, bands.loss)]
        if entry.action.kind == "train" and entry.action.is_applied:
            numbers.append((NORM, entry.norm, norm, bands.norm))
        for what, found, expected, band in numbers:
            size = max(abs(expected), 1e-12)
            allowed = _widen_band(band, rounding.get(what, 0.0) / size, bands)
            distance = abs(found - expected) / size
            if not distance <= allowed:
                return Difference(place, action, what, found, expected, distance, allowed)
    if entry.documents is not None:
        other = _find_document_difference(place, entry, documents or {}, bands, rounding)
        if other is not None:
            return other
    if entry.tensors is None:
        return None
    return _find_tensor_difference(
        place, action, decode_moments(entry.tensors), tensors, bands, rate, rounding
    )


def list_nats(documents: DocumentLosses) -> Tensor:
    """Return the losses of documents in nats, in the order of their numbers."""
    nats = [documents[one][1] for one in sorted(documents)]
    return torch.tensor(nats, dtype=torch.float64)


def _find_document_difference(
    place: int, entry: Entry, expected: DocumentLosses, bands: Bands, rounding: Rounding
) -> Difference | None:
    """Return how stored losses by document differ: in targets, in their sum, or in a loss."""
    found = entry.documents
    assert found is not None
    action = format_action(entry.action)
    for one in sorted(found.keys() | expected.keys()):
        here, there = found.get(one, (0, 0.0))[0], expected.get(one, (0, 0.0))[0]
        if here != there:
            source, epoch, document = one
            what = f"the targets of document {document} of source {source} in epoch {epoch}"
            return Difference(
                place, action, what, here, there, abs(here - there) / max(there, 1), 0
            )
    targets = sum(count for count, _ in found.values())
    mean = float(list_nats(found).sum()) / max(1, targets)
    apart = abs(mean - entry.loss) / max(abs(entry.loss), 1e-12)
    # Losses are in float32 in every precision, and so are their sums.
    if not apart <= FP32.loss:
        return Difference(place, action, SUM, mean, entry.loss, apart, FP32.loss)
    stored, plain = list_nats(found), list_nats(expected)
    size = max(float(plain.norm()), 1e-12)
    distance = float((stored - plain).norm()) / size
    allowed = _widen_band(bands.loss, rounding.get(DOCUMENTS, 0.0) / size, bands)
    if not distance <= allowed:
        lengths = float(stored.norm()), float(plain.norm())
        return Difference(place, action, DOCUMENTS, *lengths, distance, allowed)
    return None


def _widen_band(band: float, rounding: float, bands: Bands) -> float:
    """Return the band, or what rounding explains of it where that is more."""
    return max(band, min(bands.margin * rounding, bands.widest))


def decode_moments(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with 8-bit moments as numbers; scales are left out."""
    decoded = {}
    for name, tensor in tensors.items():
        if name.startswith("scale_of_"):
            continue
        scales = tensors.get(f"scale_of_{name}")
        if scales is None or tensor.is_floating_point():
            decoded[name] = tensor.float()
            continue
        each = scales.repeat_interleave(tensor.shape[-1] // scales.shape[-1], -1)
        code = tensor.float()
        if tensor.dtype == torch.int8:
            decoded[name] = (code / 127).square() * code.sign() * each
        else:
            decoded[name] = (code / 255) ** 4 * each
    return decoded


# State that is no tensor of the model: what it does to a step is compared.
COUNTERS = ("loss_scale", "average_weights")

# Kinds of tensors in the order in which a step computes them; those of a kind by name.
ORDER = ("moment", "parameter", "average", "buffer")


def _iter_in_order(names: Sequence[str]) -> Iterator[str]:
    for kind in ORDER:
        yield from (name for name in names if kind in name.partition("/")[0])


def _find_tensor_difference(
    place: int,
    action: str,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    bands: Bands,
    rate: float,
    rounding: Rounding,
) -> Difference | None:
    names = [name for name in found if name not in COUNTERS]
    if missing := sorted(set(names) ^ (set(expected) - set(COUNTERS))):
        what = f"{missing[0]}, which one of them lacks,"
        return Difference(
            place, action, what, float(missing[0] in found), float(missing[0] in expected), 1.0, 0.0
        )
    longest: dict[str, float] = {}
    for name, tensor in expected.items():
        kind = name.partition("/")[0]
        longest[kind] = max(longest.get(kind, 0.0), float(tensor.norm()))
    worst: Difference | None = None
    for name in _iter_in_order(names):
        kind = name.partition("/")[0]
        one, other = found[name].double(), expected[name].double()
        size = 1.0
        if kind == "buffer":
            band, distance = bands.buffers, float((one - other).abs().max()) if one.numel() else 0.0
        elif kind.endswith("basis_moment"):
            band, distance = bands.moments, _measure_basis_error(one)
        else:
            is_weight = kind in ("parameter", "average")
            band = bands.weights if is_weight else bands.moments
            if kind == "second_moment":
                band = max(band, bands.rotated)
            flips = 2 * rate * SIGN_FLIPS**0.5 if is_weight else 0.0
            # Below zero where signs explain all of it; max(0, NaN) would be 0.
            apart = float((one - other).norm()) - flips
            # A distance between two weights of schedule-free is as exact as they are.
            scale = longest["parameter" if kind == "lookahead_moment" else kind]
            size = max(float(other.norm()), bands.small * scale, LEAST)
            distance = apart / size
        band = _widen_band(band, rounding.get(name, 0.0) / size, bands)
        if not distance <= band:
            difference = Difference(
                place, action, name, float(one.norm()), float(other.norm()), distance, band
            )
            is_same_kind = worst is not None and get_order(name) == get_order(worst.what)
            if worst is None or (is_same_kind and distance > worst.distance):
                worst = difference
    return worst


def get_order(name: str) -> int:
    """Return the place of a tensor's kind in `ORDER`."""
    return next(place for place, kind in enumerate(ORDER) if kind in name.partition("/")[0])


def _measure_basis_error(basis: Tensor) -> float:
    """Return how far a basis is from orthonormal; signs and equal eigenvalues leave it free."""
    if not basis.any():  # before the first step
        return 0.0
    unit = torch.eye(basis.shape[-1], dtype=basis.dtype)
    return float((basis.mT @ basis - unit).abs().max()) / 10
