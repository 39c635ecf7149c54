"""Attention and feed-forward of the user's own code: equal to the built-in ones that they write
down again, and refused where they are wrong.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.config.python_blocks import PythonAttentionConfig, PythonFeedForwardConfig
from llmsys.errors import ConfigError
from llmsys.estimate.model_tensors import count_parameters
from llmsys.model.initialization import (
    build_initializer,
    compute_initial_value,
    initialize_parameters,
)
from llmsys.model.kv_cache import KeyValueCache
from llmsys.model.python_block_check import check_python_block, get_python_block
from llmsys.model.transformer import Transformer
from tests.helpers.own_blocks import GATED, SOFTMAX
from tests.helpers.paths import ROOT
from tests.helpers.rounding import USUAL, assert_within_rounding
from tests.helpers.tiny_model import build_tiny_config, build_tiny_model, compute_relative_error

OWN: dict[str, Any] = {"attention": SOFTMAX, "feed_forward": GATED}
CHOICES: dict[str, dict[str, Any]] = {
    "rope": {},
    "positions that are learned": {"position": {"kind": "learned"}},
    "windows in every second layer": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "bidirectional": {"family": "encoder", "head": {"kind": "mlm"}},
    "experts after a dense layer": {
        "moe": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "first_dense_layers": 1,
        }
    },
    "parallel branches": {"residual": {"kind": "parallel"}},
    "chunks of the feed-forward": {"feed_forward_chunk": 5},
}


def run_model(
    config: ModelConfig, documents: bool, mode: AbstractContextManager[Any] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and gradients of a loss, computed in a mode of torch."""
    model = build_tiny_model(config)
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(0, 37, (2, 12), generator=generator)
    documents_BT = torch.tensor([[0] * 5 + [1] * 7, [0] * 2 + [1] * 8 + [-1] * 2])
    with mode or nullcontext():
        logits_BTV = model(tokens_BT, documents_BT=documents_BT if documents else None)
        torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT.flatten()).backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return logits_BTV.detach(), gradients


@pytest.mark.parametrize("documents", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("changes", CHOICES.values(), ids=CHOICES)
def test_logits_and_gradients_are_those_of_the_built_in_kinds(
    changes: dict[str, Any], documents: bool
) -> None:
    own, built_in = build_tiny_config(**changes, **OWN), build_tiny_config(**changes)
    logits_BTV, gradients = run_model(own, documents)
    wanted_BTV, wanted = run_model(built_in, documents)

    def compute_logits(mode: AbstractContextManager[Any]) -> dict[str, Tensor]:
        return {"logits": run_model(own, documents, mode)[0]}

    def compute_gradients(mode: AbstractContextManager[Any]) -> dict[str, Tensor]:
        return run_model(own, documents, mode)[1]

    # Both sides are in float32. Apart: the size of logits says nothing about that of gradients.
    assert_within_rounding(
        {"logits": logits_BTV}, {"logits": wanted_BTV}, compute_logits, computations=2
    )
    assert_within_rounding(gradients, wanted, compute_gradients, computations=2)


def test_initial_values_follow_the_name_as_those_of_the_model_do() -> None:
    own, built_in = Transformer(build_tiny_config(**OWN)), Transformer(build_tiny_config())
    initialize_parameters(own, 3)
    initialize_parameters(built_in, 3)
    wanted = dict(built_in.named_parameters())
    for name, parameter in own.named_parameters():
        assert torch.equal(parameter, wanted.pop(name)), name
    assert not wanted


@pytest.mark.parametrize("padded", [False, True])
def test_generation_with_a_cache_computes_the_whole_prefix_anew(padded: bool) -> None:
    model = build_tiny_model(build_tiny_config(**OWN)).eval()
    built_in = build_tiny_model(build_tiny_config()).eval()
    tokens_BT = torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(1))
    padding_B = torch.tensor([0, 3]) if padded else None
    found: list[Tensor] = []
    wanted: list[Tensor] = []
    for one, results in ((model, found), (built_in, wanted)):
        cache = KeyValueCache(one.config, 2, 9, padding_B=padding_B)
        with torch.no_grad():
            for start, stop in ((0, 5), (5, 6), (6, 9)):
                results.append(one(tokens_BT[:, start:stop], cache=cache))
    found_BTV, wanted_BTV = torch.cat(found, 1), torch.cat(wanted, 1)
    if padding_B is not None:
        found_BTV, wanted_BTV = found_BTV[:, 3:], wanted_BTV[:, 3:]
    assert compute_relative_error(found_BTV, wanted_BTV) < USUAL


HEADER = """
import torch
from torch import nn
from llmsys.model.python_block import PythonFeedForward, PythonMixer

class Layer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x, context=None):
        return self.proj(x)
"""


def write_block(tmp_path: Path, base: str, body: str, header: str = HEADER) -> dict[str, Any]:
    """Write the file of a user, and return the section of a model with it."""
    path = tmp_path / "own.py"
    path.write_text(f"{header}\n\nclass Own({base}):\n{body}")
    key = "attention" if base == "PythonMixer" else "feed_forward"
    return {key: {"kind": "python", "path": f"{path}:Own"}}


BUILD = "    def build(self, shape):\n        return Layer(shape)\n"


def build_forward(body: str, extra: str = "") -> str:
    """Return a class whose module has another forward."""
    return (
        f"    def build(self, shape):\n        layer = Layer(shape)\n        {extra or 'pass'}\n"
        f"        layer.forward = lambda x, context=None: {body}\n        return layer\n"
    )


MIXER, FEED = "PythonMixer", "PythonFeedForward"
WRONG: dict[str, tuple[str, str, str]] = {
    "parameters": (
        MIXER,
        BUILD + "    def list_parameters(self, shape):\n        return {'proj.weight': (3, 16)}\n",
        r"Own.list_parameters declares proj.weight as \(3, 16\), and the module of layer 0 has "
        r"it as \(16, 16\)",
    ),
    "a parameter that is missing": (
        MIXER,
        BUILD + "    def list_parameters(self, shape):\n        return {}\n",
        r"declares proj.weight as no parameter, and the module of layer 0 has it as \(16, 16\)",
    ),
    "FLOPs": (
        FEED,
        BUILD + "    def count_flops(self, shape, length, documents):\n        return 7\n",
        r"Own.count_flops declares 7 FLOPs for a row of 4 positions, and torch counts 2,048",
    ),
    "saved bytes": (
        FEED,
        BUILD + "    def count_saved_bytes(self, shape, length, value_bytes):\n        return 9\n",
        r"count_saved_bytes declares 9 bytes for a row of 4 positions of 4 bytes, and 0 are saved",
    ),
    "a shape": (
        MIXER,
        build_forward("x[:, :1]"),
        r"Own returned \(1, 1, 16\) in torch.float32 for an input of \(1, \d, 16\) in",
    ),
    "no tensor": (MIXER, build_forward("None"), r"Own returned NoneType for an input of"),
    "a dtype": (FEED, build_forward("x.double()"), r"in torch.float64 for an input of"),
    "an error in build": (
        MIXER,
        "    def build(self, shape):\n        raise RuntimeError('no kernel')\n",
        r"model.attention: Own.build failed for layer 0: RuntimeError: no kernel, line 17",
    ),
    "no module": (
        MIXER,
        "    def build(self, shape):\n        return 3\n",
        "Own.build returned int",
    ),
    "an error in forward": (
        FEED,
        build_forward("x @ x"),
        "model.feed_forward: Own failed on an input of",
    ),
    "values read in Python": (
        FEED,
        build_forward("layer.proj(x) * x.sum().item()"),
        "register_fake",
    ),
    "a number that is not finite": (
        FEED,
        build_forward("layer.proj(x) / 0.0"),
        "Own returned -?(inf|nan) for normal inputs",
    ),
    "a buffer": (
        MIXER,
        build_forward("x", "layer.register_buffer('table', torch.zeros(3))"),
        "Own has the buffer table, which would be empty",
    ),
    "half precision": (
        MIXER,
        build_forward("x", "layer.half()"),
        "the parameter proj.weight is torch.float16. Use a",
    ),
    "a frozen parameter": (
        MIXER,
        build_forward("x", "layer.requires_grad_(False)"),
        "proj.weight is torch.float32 without a gradient",
    ),
    "an unused parameter": (
        MIXER,
        build_forward("layer.proj(x)", "layer.gate = nn.Parameter(torch.zeros(3))"),
        "the parameter gate gets no gradient, and data-parallel ranks would wait for it",
    ),
    "the name of experts": (
        MIXER,
        build_forward("layer.experts(x)", "layer.experts = nn.Linear(16, 16, bias=False)"),
        "the parameter experts.weight has the name of routed experts",
    ),
    "layers with other parameters": (
        FEED,
        build_forward("layer.proj(x)", "layer.proj = nn.Linear(16, 16, bias=bool(shape.layer))"),
        r"layer 0 has proj.bias as no parameter, and the module of layer 1 has it as \(16,\)",
    ),
    "later positions": (
        MIXER,
        build_forward("layer.proj(x) + x.mean(1, keepdim=True)"),
        "Own reads later positions, which model.family=decoder predicts",
    ),
    "other documents": (
        MIXER,
        "    masks_documents = True\n" + build_forward("layer.proj(x).cumsum(1)"),
        "sets masks_documents, and reads other documents",
    ),
    "other positions in a feed-forward": (
        FEED,
        build_forward("layer.proj(x) + x.mean(1, keepdim=True)"),
        "A feed-forward sees one position",
    ),
    "a state between calls": (
        FEED,
        build_forward(
            "(layer.calls.append(1), layer.proj(x) * len(layer.calls))[1]",
            "layer.calls = []",
        ),
        "returns other numbers when it is called again",
    ),
    "no build": (MIXER, "    pass\n", "has no build. Write def build"),
    "an initial value": (
        FEED,
        BUILD
        + "    def compute_initial_value(self, shape, name, size):\n        return torch.ones(3)\n",
        r"returned \(3,\) in torch.float32 for proj.weight, which is \(16, 16\)",
    ),
}


@pytest.mark.parametrize(("base", "body", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_class_is_named(tmp_path: Path, base: str, body: str, message: str) -> None:
    config = build_tiny_config(**write_block(tmp_path, base, body))
    with pytest.raises(ConfigError, match=message):
        build_as_a_run_does(config)


def build_as_a_run_does(config: ModelConfig) -> None:
    count_parameters(config)
    initialize_parameters(Transformer(config), 0)


FILES = {
    "no class": ("x = 3\n", "has no class Own that extends PythonMixer. Write class Own"),
    "another class": (
        "from llmsys.model.python_block import PythonFeedForward\n\n\n"
        "class Own(PythonFeedForward):\n    pass\n",
        "has no class Own that extends PythonMixer",
    ),
    "a syntax error": ("def build(:\n", "cannot be imported: SyntaxError"),
    "an import": ("import no_such_module\n", "No module named 'no_such_module', line 1"),
}


@pytest.mark.parametrize(("text", "message"), FILES.values(), ids=FILES)
def test_a_file_without_a_mixer_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(text)
    config = build_tiny_config(attention={"kind": "python", "path": f"{path}:Own"})
    with pytest.raises(ConfigError, match=message):
        Transformer(config)


def test_a_mixer_that_masks_no_documents_refuses_rows_of_several(tmp_path: Path) -> None:
    model = build_tiny_model(build_tiny_config(**write_block(tmp_path, MIXER, BUILD)))
    tokens_BT = torch.zeros(1, 4, dtype=torch.int64)
    assert model(tokens_BT).shape == (1, 4, 37)
    with pytest.raises(ConfigError, match="Own does not mask documents"):
        model(tokens_BT, documents_BT=tokens_BT)


def test_the_initial_values_of_a_class_are_cut_by_index(tmp_path: Path) -> None:
    body = BUILD + (
        "    def compute_initial_value(self, shape, name, size):\n"
        "        return torch.arange(256.0).view(16, 16) + shape.layer\n"
    )
    config = build_tiny_config(**write_block(tmp_path, MIXER, body))
    name, shape = "blocks.1.attention.proj.weight", torch.Size([16, 16])
    whole = compute_initial_value(config, name, shape, 0)
    assert torch.equal(whole, torch.arange(256.0).view(16, 16) + 1)
    part = build_initializer(config, 0)(name, shape, [(4, 3), (2, 5)])
    assert torch.equal(part, whole[4:7, 2:7])


TEMPLATES = {
    "mixer": ("attention", "LinearAttention"),
    "feed_forward": ("feed_forward", "SquaredRelu"),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_templates_pass_the_test_with_numbers(template: str) -> None:
    key, name = TEMPLATES[template]
    path = ROOT / "launch" / "commands" / "templates" / f"{template}.py"
    config = build_tiny_config(**{key: {"kind": "python", "path": f"{path}:{name}"}})
    section = config.attention if key == "attention" else config.feed_forward
    assert isinstance(section, PythonAttentionConfig | PythonFeedForwardConfig)
    check_python_block(get_python_block(section), config)
