"""ZeRO-3 gathers a block's weights when its forward is called: families that read them elsewhere,
experts nobody asks,
recomputation, compilation and a cache all give the numbers of one process.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.config.objective import LossConfig
from llmsys.config.optimizer import AdamWConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.data.batch import Batch
from llmsys.engine.engine import reduce_token_counts
from llmsys.engine.micro_batch_loss import compute_loss_share
from llmsys.model.initialization import initialize_parameters
from llmsys.model.kv_cache import KeyValueCache
from llmsys.model.transformer import Transformer
from llmsys.parallel.activation_checkpoint import apply_activation_checkpoint
from llmsys.parallel.block_compilation import compile_blocks
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.train.cross_entropy import build_training_loss
from tests.helpers.model_choices import LATENT, build_choice_config
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_model import build_tiny_config, build_tiny_moe_config, build_tiny_tokens

SEED, RATE, LENGTH = 3, 1e-3, 7
OPTIMIZER = AdamWConfig(learning_rate=RATE, max_grad_norm=0.0)
FAMILIES = ["t5", "bart", "two vocabularies, deepnorm", "sandwich, xl", "bert", "latent",
            "scaled embedding, capped head", "sinks, windows"]  # fmt: skip
AUXILIARY = {"kind": "auxiliary_loss", "weight": 0.5, "scope": "sequence"}
DEEPSEEK = build_tiny_moe_config(
    {"first_dense_layers": 1, "num_shared_experts": 1, "balance": AUXILIARY, "z_loss_weight": 0.1},
    attention=LATENT, num_key_value_heads=4, multi_token_prediction={},
)  # fmt: skip
BIASED = build_tiny_moe_config(
    {"router_bias": True, "expert": {"kind": "clamped_swiglu", "bias": True}}
)
CASES: dict[str, tuple[ModelConfig, str, tuple[float, ...]]] = {
    **{name: (build_choice_config(name), "none", ()) for name in FAMILIES},
    "predicts further, tied": (
        build_tiny_config(multi_token_prediction={"depth": 2}, tie_word_embeddings=True), "none",
        (),
    ),
    "deepseek": (DEEPSEEK, "none", ()),
    "deepseek, blocks again": (DEEPSEEK, "full", ()),
    "deepseek, some again": (DEEPSEEK, "selective", ()),
    "original, blocks again": (build_choice_config("original"), "full", ()),
    "tied, compiled": (build_tiny_config(tie_word_embeddings=True), "compiled", ()),
    "two dead experts": (BIASED, "none", (9.0, -9.0, 0.0, -9.0)),
    "all tokens on one": (build_tiny_moe_config({"num_experts_per_tok": 1}), "none", (0.0, 0.0, 9.0,
        0.0)),
}  # fmt: skip
State = dict[str, Any]


def rows_of(config: ModelConfig, first: int, count: int) -> Batch:
    """Some of four rows; the last has nothing to learn."""
    tokens_BT = build_tiny_tokens(4, LENGTH)
    targets_BT = tokens_BT.roll(-1, 1)
    targets_BT[3] = -100
    source = build_tiny_tokens(
        4, 5, vocab_size=config.embedding.source_vocab_size or config.vocab_size, seed=1
    )
    rows = slice(first, first + count)
    sources: dict[str, Any] = (
        {"source_BS": source[rows]} if config.family == "encoder_decoder" else {}
    )
    return Batch(tokens_BT[rows], targets_BT[rows], **sources)


def bend(model: Transformer, bias: tuple[float, ...]) -> None:
    for layer in model.list_moe_layers() if bias else ():
        layer.balance_bias_E.copy_(torch.tensor(bias))


def plain_step(config: ModelConfig, bias: tuple[float, ...]) -> tuple[float, dict[str, Tensor]]:
    """One process: the loss, and every parameter's gradient by its name."""
    model = Transformer(config)
    initialize_parameters(model, SEED)
    bend(model, bias)
    batch = rows_of(config, 0, 4)
    counts = reduce_token_counts([batch], torch.device("cpu"))
    share, nats = compute_loss_share(
        model.train(), model, batch, build_training_loss(LossConfig()), counts
    )
    share.backward()
    return float(nats / counts[0]), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def engine_of(config: ModelConfig, how: Any) -> Any:
    from llmsys.engine.deepspeed_engine import DeepSpeedEngine

    device = torch.device("cpu")
    with torch.device("meta"):
        model = Transformer(config)
    if how == "compiled":
        torch._dynamo.reset()
        compile_blocks(model, backend="aot_eager")
    else:
        apply_activation_checkpoint(model, how)
    meshes = build_device_meshes(
        ParallelLayout().resolve(torch.distributed.get_world_size(), config), device
    )
    return DeepSpeedEngine(
        model, zero_stage=3, meshes=meshes, optimizer=OPTIMIZER,
        loss=build_training_loss(LossConfig()),
        compute_dtype=torch.float32, seed=SEED, device=device,
    )  # fmt: skip


def continued(model: Transformer, config: ModelConfig) -> Tensor:
    """The logits of a text read at once to its middle, then token by token behind a cache."""
    tokens_BT, cache = build_tiny_tokens(2, LENGTH), KeyValueCache(config, 2, LENGTH)
    model.eval()
    with torch.no_grad():
        parts = [model(tokens_BT[:, :4], cache=cache)]
        parts += [model(tokens_BT[:, place : place + 1], cache=cache) for place in range(4, LENGTH)]
    return torch.cat(parts, dim=1)


def run(rank: int, cases: list[Any]) -> list[Any]:
    results = []
    for config, how, bias in cases:
        engine = engine_of(config, how)
        bend(engine.module, bias)
        batches = [rows_of(config, 2 * rank, 1), rows_of(config, 2 * rank + 1, 1)]
        step = engine.train_step(batches, RATE)
        moments = {
            name: tensor.full_tensor().numpy()
            for name, tensor in engine.get_state().tensors.items()
            if name.startswith("first_moment/")
        }
        assert how != "compiled" or not torch._dynamo.utils.counters["graph_break"], (
            "ZeRO-3 has cut a compiled block"
        )
        texts = continued(engine.module, config).numpy() if config.family == "decoder" else None
        whole = engine.compute_logits(rows_of(config, 0, 2)).numpy()
        results.append((step.loss, moments, texts, whole))
    return results


@pytest.fixture(scope="module")
def finished() -> dict[str, list[Any]]:
    """What both ranks have after each case."""
    by_rank = run_ranks(run, 2, list(CASES.values()))
    return dict(zip(CASES, map(list, zip(*by_rank, strict=True)), strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_partitioned_weights_learn_and_continue_as_whole_ones(
    name: str, finished: dict[str, list[Any]]
) -> None:
    config, _, bias = CASES[name]
    expected_loss, gradients = plain_step(config, bias)
    largest = max(float(value.abs().max()) for value in gradients.values())
    for loss, moments, texts, whole in finished[name]:
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        for key, value in gradients.items():
            difference = float(
                (torch.from_numpy(moments[f"first_moment/{key}"]) * 10 - value).abs().max()
            )
            assert difference <= 1e-4 * float(value.abs().max()) + 1e-7 * largest, (key, difference)
        if texts is not None:
            assert abs(texts - finished[name][0][2]).max() == 0
            torch.testing.assert_close(texts, whole, rtol=1e-3, atol=1e-4)


def refuse_middle_step(rank: int, config: ModelConfig) -> list[tuple[bool, float]]:
    engine = engine_of(config, "none")
    batches = [rows_of(config, 2 * rank, 1), rows_of(config, 2 * rank + 1, 1)]
    steps = []
    for accepted in (True, False, True, True):
        result = engine.train_step(batches, RATE, lambda loss, norm, answer=accepted: answer)
        steps.append((result.is_applied, result.loss))
    return steps


@pytest.mark.distributed
@pytest.mark.parametrize("tied", [False, True])
def test_steps_after_a_refused_one_read_the_bias_of_the_head(tied: bool) -> None:
    config = build_tiny_config(head={"kind": "lm", "bias": "trained"}, tie_word_embeddings=tied)
    for steps in run_ranks(refuse_middle_step, 2, config):
        applied, losses = zip(*steps, strict=True)
        assert applied == (True, False, True, True)
        assert losses[2] == losses[1]
        assert losses[3] < losses[2] < losses[0]
