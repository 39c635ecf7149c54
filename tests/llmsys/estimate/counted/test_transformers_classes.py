"""The estimate of a config.json has the counts of transformers' class where ours differs from
it.
"""

import json
import random

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from llmsys.launch.main import main


@pytest.mark.parametrize("seed", range(3))
def test_marian_has_its_frozen_tables(seed, tmp_path, capsys) -> None:
    draw = random.Random(seed)
    config = transformers.MarianConfig(
        vocab_size=draw.randint(50, 99), d_model=2 * draw.choice((6, 10)),
        encoder_layers=draw.randint(1, 3),
        decoder_layers=draw.randint(1, 3), encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=9,
        decoder_ffn_dim=9, max_position_embeddings=draw.randint(8, 40), pad_token_id=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.MarianMTModel(config)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    assert main(["estimate", str(tmp_path), "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)["parameters"]
    assert counts["total"] == sum(one.numel() for one in model.parameters())
    assert (
        counts["frozen"]
        == sum(one.numel() for one in model.parameters() if not one.requires_grad)
        > 0
    )
    assert sum(counts["by_component"].values()) == counts["total"]
    assert main(["estimate", str(tmp_path)]) == 0
    assert "tables that transformers' class has and does not train" in capsys.readouterr().out


@pytest.mark.parametrize(("sequences", "length"), [(2, 7), (1, 16), (3, 5)])
def test_xlnet_multiplies_what_torch_counts(sequences, length, tmp_path, capsys) -> None:
    config = transformers.XLNetConfig(vocab_size=61, d_model=24, n_layer=3, n_head=4, d_inner=40)
    config.architectures = ["XLNetLMHeadModel"]
    model = transformers.XLNetLMHeadModel(config).eval()
    with FlopCounterMode(display=False) as counter:
        logits = model(torch.full((sequences, length), 5)).logits
        forward = counter.get_total_flops()
        logits.sum().backward()
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    batch = [
        f"batch.sequences={sequences}",
        f"batch.sequence_length={length}",
        "flops.convention=full",
    ]
    assert main(["estimate", str(tmp_path), *batch, "--json"]) == 0
    flops = json.loads(capsys.readouterr().out)["flops"]
    assert (flops["forward"], flops["forward_backward"]) == (forward, counter.get_total_flops())
