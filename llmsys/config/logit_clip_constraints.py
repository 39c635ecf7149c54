"""Rules of QK-clip (`optimizer.max_attention_logit`): all logits of a head are computed on the
ranks of its rows.
"""

from collections.abc import Iterator

from llmsys.config.engine import EngineConfig
from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.train import TrainConfig
from llmsys.errors import Violation

NONE = "or set optimizer.max_attention_logit=null"


def find_logit_clip_violations(
    model: ModelConfig,
    engine: EngineConfig,
    layout: ParallelLayout,
    train: TrainConfig,
    optimizer: str,
) -> Iterator[Violation]:
    """Yield a violation for every setting under which logits are not recorded, or weights not
    clipped.

    Args:
        model: the `model:` section.
        engine: the `engine:` section.
        layout: the `layout:` section.
        train: the `train:` section.
        optimizer: kind of the optimizer.
    """
    attention = model.attention
    if optimizer == "schedule_free":
        text = "schedule_free keeps an average of weights that are not clipped. Use another kind"
        yield Violation("optimizer.kind", f"{text}, {NONE}.")
    if engine.kind == "deepspeed":
        text = "deepspeed holds masters in vectors, in which the rows of a head cannot be clipped"
        yield Violation("engine.kind", f"{text}. Use torch or accelerate, {NONE}.")
    for axis in ("context", "pipeline"):
        if (size := getattr(layout, axis)) > 1:
            text = f"{size} ranks share the positions or layers whose largest logits are compared"
            yield Violation(f"layout.{axis}", f"{text}. Use {axis}=1, {NONE}.")
    if train.reproducibility == "bitwise":
        yield Violation(
            "train.reproducibility", f"bitwise does not clip attention logits. Use fast, {NONE}."
        )
    if train.compile == "block":
        text = "block compiles attention without the record of its logits"
        yield Violation("train.compile", f"{text}. Use none, {NONE}.")
    if model.family != "decoder":
        yield Violation(
            "model.family",
            f"{model.family} has attention that QK-clip does not know. Use decoder, {NONE}.",
        )
    if model.rnn is not None or attention.kind not in ("multi_head", "latent"):
        yield Violation(
            "model.attention.kind",
            f"{attention.kind} has no logits for QK-clip. Use multi_head or latent, {NONE}.",
        )
    elif attention.kind == "multi_head" and attention.clip is not None:
        text = "clamped queries and keys do not shrink with their projections"
        yield Violation("model.attention.clip", f"{text}. Use null, {NONE}.")
    elif attention.kind == "multi_head" and attention.qk_norm != "none":
        text = f"{attention.qk_norm} norms bound the logits, whatever the projections are"
        yield Violation("model.attention.qk_norm", f"{text}. Use none, {NONE}.")
