"""The mixers that `llmsys init` copies equal naive forms of their papers, read nothing that they
must not, are counted as they are built, and learn.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.config.python_blocks import PythonAttentionConfig
from llmsys.config.run import RunConfig
from llmsys.doctor.toy_dataset import VOCABULARY, build_toy_config, write_toy_dataset
from llmsys.estimate.flops import count_flops
from llmsys.estimate.model_tensors import list_model_tensors
from llmsys.model.python_block import MixerContext
from llmsys.model.python_block_check import get_python_block
from llmsys.model.transformer import Transformer
from llmsys.train.build_trainer import train_run
from tests.helpers.counted_flops import SEQUENCES, SOURCE, count_forward_flops
from tests.helpers.model_sections import SHAPE
from tests.helpers.paths import ROOT
from tests.helpers.saved_bytes import compare_saved_bytes
from tests.helpers.step_losses import list_step_losses

TEMPLATES = ROOT / "launch" / "commands" / "templates"
BLOCK, STRIDE, LENGTH = 6, 3, 20
MIXERS: dict[str, dict[str, Any]] = {
    "compressed": {
        "path": f"{TEMPLATES}/memory_compressed_attention.py:MemoryCompressedAttention",
        "options": {"block_length": BLOCK, "stride": STRIDE},
    },
    "gated": {"path": f"{TEMPLATES}/convolution.py:GatedConvolution"},
    "dilated": {"path": f"{TEMPLATES}/convolution.py:DilatedConvolution"},
}
# Documents of a row; the second begins inside a block and inside a compressed key.
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 12 + [2]])


def build_changes(name: str) -> dict[str, Any]:
    return {"attention": {"kind": "python"} | MIXERS[name], "num_key_value_heads": 4}


def build_model(name: str, **changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(
        SHAPE | build_changes(name) | {"position": {"kind": "none"}} | changes
    )


class Mixer:
    """One layer of a mixer in float64."""

    def __init__(self, name: str, *, layer: int = 0, **changes: Any) -> None:
        torch.manual_seed(1)
        self.model, self.layer = build_model(name, **changes), layer
        assert isinstance(self.model.attention, PythonAttentionConfig)
        self.block = get_python_block(self.model.attention)
        self.module = self.block.build_module(self.model, layer).double()
        for weight in self.module.parameters():
            nn.init.normal_(weight, std=0.4)

    def run(self, x_BTD: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        context = self.block.build_context(self.model, x_BTD, documents_BT)
        return self.block.run_module(self.module, x_BTD, context, self.model, self.layer)

    def draw_input(self) -> Tensor:
        return torch.randn(1, LENGTH, self.model.hidden_size, dtype=torch.float64)


def attend_naively(module: Any, x_TD: Tensor, start: int, heads: int) -> Tensor:
    """Attend from each position of one causal document, one query, head and key at a time.

    Args:
        module: its weights.
        x_TD: the document.
        start: place of its first position in the row, which blocks are counted in.
        heads: number of heads.
    """
    q_THK, k_THK, v_THK = (
        (x_TD @ getattr(module, f"{name}_proj").weight.T).unflatten(-1, (heads, -1))
        for name in "qkv"
    )
    rows = []
    for query in range(len(x_TD)):
        block = (start + query) // BLOCK * BLOCK
        own = [key for key in range(query + 1) if start + key >= block]
        far = [
            first - start
            for first in range(0, start + len(x_TD), STRIDE)
            if first >= start and first + STRIDE <= block
        ]
        heads_out = []
        for head in range(heads):
            mine = slice(head * k_THK.shape[2], (head + 1) * k_THK.shape[2])
            keys = [k_THK[key, head] for key in own]
            values = [v_THK[key, head] for key in own]
            for first in far:
                for found, source, name in ((keys, k_THK, "k"), (values, v_THK, "v")):
                    filters_OKS = getattr(module, f"{name}_compress").weight[mine]
                    window_SK = source[first : first + STRIDE, head]
                    found.append(torch.einsum("oks,sk->o", filters_OKS, window_SK))
            scores = torch.stack([q_THK[query, head] @ key for key in keys])
            weights = (scores / math.sqrt(k_THK.shape[2])).softmax(0)
            heads_out.append(sum(w * v for w, v in zip(weights, values, strict=True)))
        rows.append(torch.cat([torch.as_tensor(one) for one in heads_out]))
    return torch.stack(rows) @ module.o_proj.weight.T


def convolve_naively(x_TD: Tensor, layer: Any, kernel: int, dilation: int) -> Tensor:
    """Convolve one causal document by torch's conv1d, whose last tap reads the position itself."""
    weight_ODJ = layer.weight.unflatten(1, (kernel, -1)).mT.flip(-1)
    padded_1DT = F.pad(x_TD.T[None], (dilation * (kernel - 1), 0))
    return F.conv1d(padded_1DT, weight_ODJ, layer.bias, dilation=dilation)[0].T


def run_naively(name: str, mixer: Mixer, x_TD: Tensor, start: int) -> Tensor:
    module: Any = mixer.module
    if name == "compressed":
        return attend_naively(module, x_TD, start, mixer.model.num_attention_heads)
    if name == "gated":
        value, gate = convolve_naively(x_TD, module.taps_proj, 3, 1).chunk(2, dim=-1)
        return value * gate.sigmoid()
    inner = module.in_norm(module.in_proj(x_TD.clamp(min=0))).clamp(min=0)
    inner = convolve_naively(inner, module.taps_proj, 3, 2**mixer.layer)
    return torch.as_tensor(module.o_proj(module.taps_norm(inner).clamp(min=0)))


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["row", "documents"])
@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_equals_its_naive_form(name: str, documents: Tensor | None) -> None:
    mixer = Mixer(name, layer=2)
    x_1TD = mixer.draw_input()
    numbers = torch.zeros(1, LENGTH) if documents is None else documents
    sizes = torch.unique_consecutive(numbers[0], return_counts=True)[1].tolist()
    parts, start = [], 0
    for one in x_1TD[0].split(sizes):
        parts.append(run_naively(name, mixer, one, start))
        start += len(one)
    expected, found = torch.cat(parts), mixer.run(x_1TD, documents)[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    factors, weights = torch.randn_like(found), list(mixer.module.parameters())
    theirs = torch.autograd.grad((expected * factors).sum(), weights)
    for mine, wanted in zip(
        torch.autograd.grad((found * factors).sum(), weights), theirs, strict=True
    ):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["decoder", "encoder"])
@pytest.mark.parametrize("name", MIXERS)
def test_no_position_has_a_gradient_of_what_it_must_not_read(name: str, family: str) -> None:
    head = {"head": {"kind": "mlm"}} if family == "encoder" else {}
    mixer = Mixer(name, layer=1, family=family, **head)
    x_1TD = mixer.draw_input().requires_grad_()
    y_1TD = mixer.run(x_1TD, DOCUMENTS)
    reads_TT = torch.stack(
        [
            torch.autograd.grad(y_1TD[0, t].sum(), x_1TD, retain_graph=True)[0][0].abs().sum(-1) > 0
            for t in range(LENGTH)
        ]
    )
    allowed_TT = DOCUMENTS[0][:, None] == DOCUMENTS[0]
    if family == "decoder":
        allowed_TT = allowed_TT.tril()
    assert not bool((reads_TT & ~allowed_TT).any())
    assert bool(reads_TT.diagonal().all())
    if name == "compressed" and family == "decoder":
        # The second document reads beyond its block: the key of positions 9 to 11.
        assert reads_TT[18].nonzero().flatten().tolist() == [9, 10, 11, *range(12, 18), 18]


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_is_counted_as_it_is_built(name: str) -> None:
    own = ModelConfig.model_validate(SHAPE | build_changes(name))
    built = sum(one.numel() for one in Transformer(own).parameters())
    assert sum(row.num_elements for row in list_model_tensors(own)) == built
    assert count_flops(own, SOURCE, SEQUENCES, "full").forward == count_forward_flops(own)
    measured, estimated = compare_saved_bytes(
        build_changes(name), torch.float32, "none", documents=False
    )
    # The estimate keeps the input of a mixer, which convolutions do not save.
    assert 0.999 * measured <= estimated <= 1.07 * measured


@pytest.mark.parametrize("documents", [(LENGTH,), (7, 12, 1)])
def test_visible_pairs_are_those_of_the_masks(documents: tuple[int, ...]) -> None:
    mixer: Any = Mixer("compressed")
    numbers_1T = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    context = MixerContext(torch.arange(LENGTH)[None], numbers_1T[None], True, None)
    masks = mixer.module._build_masks(LENGTH, context)
    filled = -LENGTH % BLOCK
    shown = sum(int(mask.sum()) for mask in masks)
    # Queries that fill up the last block see themselves.
    assert mixer.block._count_visible_pairs(documents) == shown - filled


@pytest.mark.parametrize("name", MIXERS)
def test_a_model_with_a_mixer_learns(name: str, tmp_path: Path) -> None:
    write_toy_dataset(tmp_path / "data")
    config: RunConfig = build_toy_config(
        tmp_path,
        model={
            "vocab_size": VOCABULARY,
            "moe": None,
            "intermediate_size": 64,
            "attention": {"kind": "python"} | MIXERS[name],
            "num_key_value_heads": 4,
        },
        optimizer={"kind": "adamw", "learning_rate": 0.01},
        schedule={"kind": "constant", "warmup_tokens": 0},
        train={"reproducibility": "fast", "tokens": 20 * 256, "hang_timeout_seconds": 0},
        checkpoint={"every_steps": 0},
        evaluation={"every_steps": 0},
    )
    train_run(config, lambda *_: [])
    losses = list_step_losses(config.run.folder)
    assert losses[-1] < 0.75 * losses[0], losses
