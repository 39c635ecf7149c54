"""The model equals transformers' Llama and Mixtral with the same weights: logits, loss and every gradient."""

import pytest
import torch
import torch.nn.functional as F

from llmsys.config.model import ModelConfig
from llmsys.model.transformer import Transformer
from tests.helpers.tiny_model import relative_error, tiny_config, tiny_model, tiny_moe_config, tiny_tokens

transformers = pytest.importorskip("transformers")

NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    **{f"attention.{x}_proj.weight": f"self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"feed_forward.{x}_proj.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    "feed_forward.router.weight": "mlp.gate.weight",
}


def oracle_of(config: ModelConfig) -> torch.nn.Module:
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rms_norm_eps": config.norm.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.position.theta},
    }
    if config.moe is None:
        llama = transformers.LlamaConfig(intermediate_size=config.intermediate_size, **fields)
        return transformers.LlamaForCausalLM(llama)
    mixtral = transformers.MixtralConfig(
        intermediate_size=config.moe.moe_intermediate_size,
        num_local_experts=config.moe.num_experts,
        num_experts_per_tok=config.moe.num_experts_per_tok,
        **fields,
    )
    return transformers.MixtralForCausalLM(mixtral)


def as_theirs(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our names and layout to theirs: experts are stacked (expert, out, in) there, gate and up in one."""
    theirs, gates = {}, {}
    for name, tensor in tensors.items():
        if not name.startswith("blocks."):
            theirs[NAMES[name]] = tensor
            continue
        _, layer, rest = name.split(".", 2)
        prefix = f"model.layers.{layer}."
        if ".experts." not in rest:
            theirs[prefix + LAYER_NAMES[rest]] = tensor
        elif rest.endswith("down_proj"):
            theirs[prefix + "mlp.experts.down_proj"] = tensor.transpose(1, 2)
        else:
            gates[prefix, rest.rsplit(".", 1)[1]] = tensor.transpose(1, 2)
    for prefix, which in gates:
        if which == "gate_proj":
            pair = [gates[prefix, "gate_proj"], gates[prefix, "up_proj"]]
            theirs[prefix + "mlp.experts.gate_up_proj"] = torch.cat(pair, dim=1)
    return theirs


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


NO_BALANCE = {"balance": {"kind": "none"}}
CONFIGS = {
    "llama": tiny_config(),
    "llama, tied, theta": tiny_config(tie_word_embeddings=True, position={"kind": "rope", "theta": 500.0}),
    "mixtral": tiny_moe_config(NO_BALANCE, intermediate_size=8),
    "mixtral, top-3 of 5": tiny_moe_config(NO_BALANCE | {"num_experts": 5, "num_experts_per_tok": 3}),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_loss_and_gradients_equal_transformers(config: ModelConfig) -> None:
    model: Transformer = tiny_model(config)
    theirs = oracle_of(config)
    missing, unexpected = theirs.load_state_dict(as_theirs(dict(model.named_parameters())), strict=False)
    assert not unexpected
    assert not [name for name in missing if name != "lm_head.weight" or not config.tie_word_embeddings]

    tokens = tiny_tokens(rows=3, length=33)
    logits, their_logits = model(tokens), theirs(input_ids=tokens, use_cache=False).logits
    assert relative_error(logits, their_logits) < 1e-5
    loss, their_loss = (
        F.cross_entropy(x[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) for x in (logits, their_logits)
    )
    assert float(loss) == pytest.approx(float(their_loss), rel=1e-6)
    loss.backward()
    their_loss.backward()
    ours, expected = as_theirs(gradients(model)), gradients(theirs)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        assert relative_error(ours[name], gradient) < 1e-5, name
