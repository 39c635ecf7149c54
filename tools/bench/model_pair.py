"""The models that tools/bench/model_step.py races: ours, and transformers' with the same shapes and copied weights."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.config.objective import LossConfig
from llmsys.data.batch import IGNORED
from llmsys.model.init import initialize_parameters
from llmsys.model.transformer import Transformer
from llmsys.train.head_loss import build_training_loss

# B rows, T positions
WIDTH, LAYERS, HEADS, EXPERTS, CHOSEN, EXPERT_WIDTH = 512, 4, 8, 8, 2, 704
# Wide enough that the losses depend on every layer; at 0.02 any model gives the logarithm of the vocabulary.
DEVIATION = 0.05
NAMES = {
    "blocks.": "model.layers.",
    "embed.": "model.embed_tokens.",
    "head.": "lm_head.",
    "attention_norm.": "input_layernorm.",
    "feed_forward_norm.": "post_attention_layernorm.",
    ".attention.": ".self_attn.",
    ".feed_forward.router.": ".mlp.gate.",
    ".feed_forward.": ".mlp.",
}


@dataclass(frozen=True)
class Contender:
    """A model, and the function that runs it forward and gives the mean loss."""

    name: str
    model: nn.Module
    loss: Callable[[], Tensor]

    def measure_step(self, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
        """Seconds and loss of one forward and backward."""
        start = clock()
        self.model.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        return clock() - start, float(loss.detach())


def build_model_config(kind: str, length: int, vocabulary: int) -> ModelConfig:
    """The shapes of both sides, in our words."""
    moe = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": EXPERT_WIDTH}
    fields = {
        "vocab_size": vocabulary,
        "hidden_size": WIDTH,
        "intermediate_size": CHOSEN * EXPERT_WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": length,
        "initializer_range": DEVIATION,
        "moe": moe | {"balance": {"kind": "none"}} if kind == "moe" else None,
    }
    return ModelConfig.model_validate(fields)


def build_their_model(config: ModelConfig, ours: Transformer) -> Any:
    """LlamaForCausalLM or MixtralForCausalLM in training mode, with our weights."""
    shared = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    fields: dict[str, Any] = {name: getattr(config, name) for name in shared}
    fields["max_position_embeddings"] = config.max_position_embeddings
    fields |= {"rms_norm_eps": config.norm.eps, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    fields["attn_implementation"] = "sdpa"
    if config.moe is None:
        llama = transformers.LlamaConfig(intermediate_size=config.intermediate_size, **fields)
        theirs: Any = transformers.LlamaForCausalLM(llama)
    else:
        fields |= {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "intermediate_size": EXPERT_WIDTH}
        mixtral = transformers.MixtralConfig(**fields)
        theirs = transformers.MixtralForCausalLM(mixtral)
    theirs.load_state_dict(convert_weights(ours.state_dict()))
    return theirs.train()


def convert_weights(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our names and layout in theirs: experts are stacked (expert, out, in) there, gate and up in one."""
    theirs = {}
    for name, weight in ours.items():
        if name.endswith((".experts.up_proj", ".balance_bias_E")):
            continue
        if ".experts." in name:
            if name.endswith("gate_proj"):
                weight = torch.cat([weight, ours[name.replace("gate_proj", "up_proj")]], dim=2)
            weight = weight.transpose(1, 2)
        for word, their_word in NAMES.items():
            name = name.replace(word, their_word)
        name = name.replace("experts.gate_proj", "experts.gate_up_proj")
        theirs["model.norm.weight" if name == "norm.weight" else name] = weight
    return theirs


def build_contenders(
    kind: str, tokens_BT: Tensor, vocabulary: int, experts: list[str], dtype: torch.dtype = torch.bfloat16
) -> list[Contender]:
    """Ours first, then theirs; all weights in `dtype`."""
    config = build_model_config(kind, tokens_BT.shape[1], vocabulary)
    ours = Transformer(config)
    initialize_parameters(ours, seed=0)
    theirs = build_their_model(config, ours).to(dtype)
    ours = ours.to(dtype).train()
    targets_BT = tokens_BT.roll(-1, dims=1)
    targets_BT[:, -1] = IGNORED
    num_targets = int((targets_BT != IGNORED).sum())
    in_training = build_training_loss(LossConfig())

    def compute_our_loss() -> Tensor:
        """As an engine takes it: where the head is."""
        loss: Tensor = ours(tokens_BT, finish=lambda head, x_BTD, _: in_training(head, x_BTD, targets_BT))
        return loss / num_targets

    def compute_their_loss(implementation: str | None) -> Tensor:
        if implementation is not None:
            theirs.set_experts_implementation(implementation)
        loss: Tensor = theirs(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
        return loss

    found = [Contender(f"llmsys {kind}", ours, compute_our_loss)]
    if kind == "dense":
        return [*found, Contender("LlamaForCausalLM", theirs, partial(compute_their_loss, None))]
    return found + [Contender(f"MixtralForCausalLM {e}", theirs, partial(compute_their_loss, e)) for e in experts]
