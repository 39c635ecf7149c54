"""ESM and ProGen2 equal transformers' EsmForMaskedLM and GPTJForCausalLM with the same weights:
logits, and the gradient of every weight. Neither has a mapping for `llmsys convert`.
"""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from llmsys.config.loading.load import load_model_config
from llmsys.config.model import ModelConfig
from llmsys.estimate.model_tensors import list_model_tensors
from llmsys.model.transformer import Transformer

transformers = pytest.importorskip("transformers")

LAYERS, HEADS, WIDTH, ROWS, LENGTH = 2, 4, 64, 3, 19
SIZES = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "hidden_size": WIDTH,
    "head_dim": WIDTH // HEADS,
    "intermediate_size": 4 * WIDTH,
    "max_position_embeddings": 32,
}
ESM = {
    r"embed\.": "esm.embeddings.word_embeddings.",
    r"positions\.": "esm.embeddings.position_embeddings.",
    r"embedding_norm\.": "esm.embeddings.layer_norm.",
    r"norm\.": "esm.encoder.emb_layer_norm_after.",
    r"blocks\.": "esm.encoder.layer.",
    r"(.*)attention_norm\.": r"\1attention.LayerNorm.",
    r"(.*)feed_forward_norm\.": r"\1LayerNorm.",
    r"(.*)attention\.q_proj\.": r"\1attention.self.query.",
    r"(.*)attention\.k_proj\.": r"\1attention.self.key.",
    r"(.*)attention\.v_proj\.": r"\1attention.self.value.",
    r"(.*)attention\.o_proj\.": r"\1attention.output.dense.",
    r"(.*)feed_forward\.up_proj\.": r"\1intermediate.dense.",
    r"(.*)feed_forward\.down_proj\.": r"\1output.dense.",
    r"head\.norm\.": "lm_head.layer_norm.",
    r"head\.": "lm_head.",
}
GPTJ = {
    r"embed\.": "transformer.wte.",
    r"norm\.": "transformer.ln_f.",
    r"blocks\.": "transformer.h.",
    r"(.*)attention_norm\.": r"\1ln_1.",
    r"(.*)attention\.o_proj\.": r"\1attn.out_proj.",
    r"(.*)attention\.": r"\1attn.",
    r"(.*)feed_forward\.up_proj\.": r"\1mlp.fc_in.",
    r"(.*)feed_forward\.down_proj\.": r"\1mlp.fc_out.",
    r"head\.": "lm_head.",
}


def build_esm(vocab_size: int, **fields: Any) -> Any:
    sizes: dict[str, Any] = {
        key: SIZES[key] for key in SIZES if key not in ("head_dim", "num_key_value_heads")
    }
    sizes |= {"vocab_size": vocab_size, "pad_token_id": 1, "mask_token_id": 32}
    sizes |= {"layer_norm_eps": 1e-5} | fields  # as the releases have it
    return transformers.EsmForMaskedLM(transformers.EsmConfig(**sizes, token_dropout=False))


def build_theirs(name: str, vocab_size: int) -> tuple[Any, dict[str, str]]:
    if name == "esm-1b":
        absolute = {"position_embedding_type": "absolute", "max_position_embeddings": 34}
        return build_esm(vocab_size, emb_layer_norm_before=True, **absolute), ESM
    if name == "esm2-650m":
        return build_esm(vocab_size, position_embedding_type="rotary"), ESM
    config = transformers.GPTJConfig(
        vocab_size=vocab_size, n_positions=32, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        rotary_dim=4, bos_token_id=1, eos_token_id=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    return transformers.GPTJForCausalLM(config), GPTJ


def rename(name: str, rules: dict[str, str]) -> str:
    for pattern, theirs in rules.items():
        name = re.sub("^" + pattern, theirs, name)
    return name


@pytest.mark.parametrize("name", ["esm-1b", "esm2-650m", "progen2-xlarge"])
def test_a_protein_model_equals_the_published_class(name: str) -> None:
    torch.manual_seed(0)
    published = load_model_config(f"model/{name}").model_dump()
    config = ModelConfig.model_validate(published | SIZES | {"dropout": {}})
    theirs, rules = build_theirs(name, config.vocab_size)
    theirs.eval()  # its dropout is not ours
    named: dict[str, Tensor] = dict(theirs.named_parameters())
    for weight in named.values():
        torch.nn.init.normal_(weight.data, std=0.2)
    ours = Transformer(config)
    with torch.no_grad():
        for key, weight in ours.named_parameters():
            weight.copy_(named[rename(key, rules)])
    tokens_BT = torch.randint(4, 31, (ROWS, LENGTH))
    logits = ours(tokens_BT)
    expected = theirs(input_ids=tokens_BT, attention_mask=torch.ones_like(tokens_BT)).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    factors = torch.randn_like(expected)
    (logits * factors).sum().backward()
    (expected * factors).sum().backward()
    expected_gradients = {key: named[rename(key, rules)].grad for key, _ in ours.named_parameters()}
    # Of all: a bias of keys has a gradient of zero, and rounding.
    scale = max(
        float(wanted.abs().max()) for wanted in expected_gradients.values() if wanted is not None
    )
    for key, weight in ours.named_parameters():
        wanted = expected_gradients[key]
        assert weight.grad is not None
        assert wanted is not None
        torch.testing.assert_close(weight.grad, wanted, rtol=1e-5, atol=1e-6 * scale)


# Published counts without what a release adds: ESM's regression that reads contacts from attention
# maps has one weight for each head and a bias.
COUNTS = {
    "esm-1b": 652_359_094 - (33 * 20 + 1),
    "esm2-650m": 651_043_254 - (33 * 20 + 1),
    "progen2-xlarge": 6_443_638_816,
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_protein_model_has_the_parameters_of_its_release(name: str) -> None:
    rows = list_model_tensors(load_model_config(f"model/{name}"))
    assert sum(row.num_elements for row in rows) == COUNTS[name]
