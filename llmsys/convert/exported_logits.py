"""Compare the logits of an exported Hugging Face folder, as transformers computes them, with those
of the run.

Reads the exported folder and the checkpoint that it was written from.

Invariants:
- Both models compute in float32 on the CPU, from weights that were rounded alike: what is left is
  the order of sums.
"""

import importlib
import inspect
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmsys.convert.conversion_plan import TensorPart
from llmsys.convert.to_hugging_face import HuggingFaceExport
from llmsys.convert.weight_dtype import cast_weight
from llmsys.engine.engine import iter_persistent_buffers
from llmsys.estimate.model_tensors import count_parameters
from llmsys.log import get_logger
from llmsys.model.transformer import Transformer
from llmsys.train.build_engine import build_model

# Two models in float32: 8 GB.
MAX_PARAMETERS = 1_000_000_000
ROWS, LENGTH = 2, 64
# Relative to the largest logit. Sums in another order differ by 1e-6 to 1e-5.
TOLERANCE = 1e-3

log = get_logger(__name__)


@dataclass(frozen=True)
class LogitsComparison:
    """Logits of an export beside those of its run, or the reason that they were not compared.

    Attributes:
        largest_difference: over all positions and tokens.
        largest_logit: absolute, of the run.
        reader: the program that read the export, with its version.
        skipped: reason; empty where logits were compared.
    """

    largest_difference: float = 0.0
    largest_logit: float = 0.0
    reader: str = ""
    skipped: str = ""

    @property
    def is_equal(self) -> bool:
        """The export computes what the run does, or nothing was compared."""
        return bool(self.skipped) or self.largest_difference <= TOLERANCE * self.largest_logit

    def format(self) -> str:
        """Return one line."""
        if self.skipped:
            return f"logits were not compared: {self.skipped}"
        return (
            f"logits of {self.reader} differ from the run's by at most "
            f"{self.largest_difference:.1e}; the largest is {self.largest_logit:.3g}"
        )

    def to_values(self) -> dict[str, Any]:
        """Return values for JSON."""
        if self.skipped:
            return {"skipped": self.skipped}
        return {
            "reader": self.reader,
            "largest_difference": self.largest_difference,
            "largest_logit": self.largest_logit,
        }


def compare_exported_logits(
    source: Path, folder: Path, dtype: str | None = None, *, is_asked: bool = False
) -> LogitsComparison:
    """Compute the logits of random tokens with the run's model and with transformers'.

    Args:
        source: run folder or checkpoint that was exported.
        folder: what `convert_to_hugging_face` wrote.
        dtype: the dtype that was asked for there.
        is_asked: compare a model of more than `MAX_PARAMETERS` too. Default: it is skipped.

    Returns:
        The comparison. A difference beyond rounding is logged as a warning.
    """
    export = HuggingFaceExport(source, None, dtype)
    found = _compare(export, folder, is_asked=is_asked)
    if not found.is_equal:
        log.warning(
            "%s computes other logits than the run. Do not use it, and report this: %s",
            folder,
            found.format(),
        )
    return found


def _compare(export: HuggingFaceExport, folder: Path, *, is_asked: bool) -> LogitsComparison:
    model = export.run.model
    number = count_parameters(model).total
    if number > MAX_PARAMETERS and not is_asked:
        limit = f"{MAX_PARAMETERS:,}"
        return LogitsComparison(
            skipped=f"{number:,} parameters are more than {limit}; --compare does it, in "
            f"{8 * number / 1e9:.0f} GB of memory"
        )
    if model.patches is not None or model.head.kind not in ("lm", "mlm"):
        return LogitsComparison(
            skipped=f"model.head.kind={model.head.kind} does not predict tokens of a text"
        )
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        return LogitsComparison(
            skipped="transformers is not installed (pip install transformers); --no-compare says "
            "nothing"
        )
    architecture = str((export.values.get("architectures") or [""])[0])
    reader = f"transformers {transformers.__version__}"
    # the name is that of a file, which may come from a stranger
    found = getattr(transformers, architecture, object)
    if not (inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)):
        return LogitsComparison(skipped=f"{reader} has no {architecture or 'architectures'}")
    transformers.utils.logging.disable_progress_bar()
    theirs: Any = found
    loaded = theirs.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        tokens, sources = _draw_tokens(export)
        expected = _load_rounded_model(export)(
            tokens, **({} if sources is None else {"source_BS": sources})
        )
        inputs = (
            {"input_ids": tokens}
            if sources is None
            else {"input_ids": sources, "decoder_input_ids": tokens}
        )
        # heads of two objectives name the logits of tokens
        output = loaded(**inputs)
    logits = output.get("logits", output.get("prediction_logits"))
    difference = float((logits - expected).abs().max())
    return LogitsComparison(
        math.inf if math.isnan(difference) else difference, float(expected.abs().max()), reader
    )


def _draw_tokens(export: HuggingFaceExport) -> tuple[Tensor, Tensor | None]:
    """Return random token ids, and those of a source for an encoder-decoder."""
    model = export.model
    generator = torch.Generator().manual_seed(0)
    sources = model.embedding.source_vocab_size or model.vocab_size
    shape = (ROWS, min(LENGTH, model.max_position_embeddings))

    def draw(size: int) -> Tensor:
        ids = torch.randint(size, shape, generator=generator)
        # some classes count positions from the ids of padding
        padding = export.values.get("pad_token_id")
        return torch.where(ids == padding, (ids + 1) % size, ids) if padding is not None else ids

    tokens = draw(model.vocab_size)
    return tokens, draw(sources) if model.family == "encoder_decoder" else None


def _load_rounded_model(export: HuggingFaceExport) -> Transformer:
    """Return the run's model in float32, with weights rounded to the exported dtypes."""
    model = build_model(export.run).to_empty(device="cpu")
    # Buffers that are not saved, such as RoPE frequencies, have no values after to_empty.
    model.reset_buffers()
    dtypes = export.list_written_dtypes()
    named = {f"parameter/{name}": one.data for name, one in model.named_parameters()}
    named |= {f"buffer/{name}": one for name, one in iter_persistent_buffers(model)}
    for name, tensor in named.items():
        value = export.reader.read(TensorPart(name, tuple(tensor.shape)))
        tensor.copy_(cast_weight(name, value, dtypes.get(name, value.dtype)))
    return model.float().eval()
