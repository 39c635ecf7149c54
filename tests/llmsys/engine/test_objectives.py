"""Every objective under every engine against one process and torch's own cross entropy, gradients
included.

Batches are what the steps of real pairs give: uneven, padded, and on the second rank sometimes
empty.
"""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from llmsys.config.model import ModelConfig
from llmsys.config.objective import LossConfig
from llmsys.config.optimizer import AdamWConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.data.batch import IGNORED, Batch
from llmsys.engine.engine import Engine, reduce_token_counts
from llmsys.engine.micro_batch_loss import compute_loss_share
from llmsys.model.initialization import initialize_parameters
from llmsys.model.output_head import get_next_sentence_head
from llmsys.model.transformer import Transformer
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.train.cross_entropy import build_training_loss
from llmsys.train.expert_load import measure_next_sentence
from tests.helpers.objective_batches import MODELS, SHAPE, build_batch
from tests.helpers.ranks import run_ranks

SMOOTHING, RATE, STEPS = 0.1, 1e-2, 2
OPTIMIZER = AdamWConfig(learning_rate=RATE, betas=(0.9, 0.98), eps=1e-9, max_grad_norm=0.5)


def groups(step: int) -> list[list[int]]:
    """The rows of a step's two groups; one has a single row, so that one of two ranks has none."""
    return [list(range(7)), [step]]


def plain_run(objective: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The oracle: every row by itself, torch's cross entropy with smoothing by its definition,
    torch's Adam.
    """
    model = Transformer(ModelConfig.model_validate(MODELS[objective]))
    initialize_parameters(model, seed=7)
    named = dict(model.named_parameters())
    decays = [{"params": [p for p in named.values() if (p.ndim >= 2) is matrix],
               "weight_decay": 0.1 if matrix else 0.0} for matrix in (True, False)]  # fmt: skip
    optimizer = torch.optim.AdamW(decays, lr=RATE, betas=(0.9, 0.98), eps=1e-9)
    losses, norms = [], []
    for step in range(STEPS):
        total, count = torch.zeros(()), 0
        further, pairs = torch.zeros(()), 0  # next sentences have their own mean
        for group, rows in enumerate(groups(step)):
            for row in rows:
                batch = build_batch(objective, step, group, [row])
                logits, targets = (
                    model(**batch.to_model_inputs()).flatten(0, -2),
                    batch.targets_BT.flatten(),
                )
                classes, valid = logits.shape[-1], targets != IGNORED
                plain = cross_entropy(logits, targets, reduction="sum")
                others = -(logits.log_softmax(-1).sum(-1)[valid]).sum() - plain
                total = total + (1 - SMOOTHING) * plain + SMOOTHING / (classes - 1) * others
                count += int(valid.sum())
                if batch.next_sentence_B is not None:
                    further = further + get_next_sentence_head(model).take_loss()
                    pairs += batch.token_counts.labelled_pairs
        (total / count + further / max(1, pairs)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / count)
    moments = {f"first_moment/{name}": optimizer.state[p]["exp_avg"] for name, p in named.items()}
    return losses, norms, moments | {f"parameter/{name}": p.detach() for name, p in named.items()}


def build(kind: str, objective: str) -> Engine:
    device, config = torch.device("cpu"), ModelConfig.model_validate(MODELS[objective])
    with torch.device("meta"):
        model = Transformer(config)
    if objective == "masked_next_sentence":
        get_next_sentence_head(model).is_trained = True  # as build_engine does
    ranks = torch.distributed.get_world_size()
    layout = ParallelLayout(replicate=ranks if kind == "ddp" else 1)
    common: dict[str, Any] = {
        "meshes": build_device_meshes(layout.resolve(ranks, config), device),
        "optimizer": OPTIMIZER, "loss": build_training_loss(LossConfig(label_smoothing=SMOOTHING)),
        "compute_dtype": torch.float32, "seed": 7, "device": device,
    }  # fmt: skip
    if kind in ("torch", "ddp"):
        from llmsys.engine.torch_engine import TorchEngine

        return TorchEngine(model, **common, data_parallel="ddp" if kind == "ddp" else "fsdp")
    if kind == "accelerate":
        from llmsys.engine.accelerate_engine import AccelerateEngine

        return AccelerateEngine(model, **common)
    from llmsys.engine.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(model, **common | {"zero_stage": int(kind.removeprefix("zero"))})


def engine_run(rank: int, cases: list[tuple[str, str]]) -> list[Any]:
    from torch.distributed.tensor import DTensor

    size, results = torch.distributed.get_world_size(), []
    for kind, objective in cases:
        engine = build(kind, objective)
        done = []
        for step in range(STEPS):
            batches = [
                build_batch(objective, step, group, rows[rank::size])
                for group, rows in enumerate(groups(step))
            ]
            done.append(engine.train_step(batches, RATE))
        state = engine.get_state().tensors
        whole = {
            n: (t.full_tensor() if isinstance(t, DTensor) else t).numpy() for n, t in state.items()
        }
        results.append(
            ([s.loss for s in done], [s.gradient_norm for s in done], whole) if rank == 0 else None
        )
    return results


KINDS = ("torch", "ddp", "zero2", "zero3", "accelerate")
# One process has no part of a step to lose: each engine and each objective once.
CASES = {
    1: list(zip(KINDS, MODELS, strict=True)),
    2: [(kind, objective) for objective in MODELS for kind in KINDS],
}


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_objective_follows_the_plain_run(world_size: int) -> None:
    cases = CASES[world_size]
    for (kind, objective), (losses, norms, state) in zip(
        cases, run_ranks(engine_run, world_size, cases)[0], strict=True
    ):
        expected_losses, expected_norms, expected = plain_run(objective)
        name = f"{objective} under {kind}"
        torch.testing.assert_close(
            losses, expected_losses, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
        torch.testing.assert_close(
            norms, expected_norms, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
        for key, value in expected.items():
            allowed = (
                0.02 * RATE
                if key.startswith("parameter/")
                else 1e-4 * float(value.abs().max()) + 1e-9
            )
            assert float((torch.from_numpy(state[key]) - value).abs().max()) <= allowed, (
                f"{name}: {key}"
            )


def test_the_next_sentence_is_learnt_with_the_masks() -> None:
    """The sum of both mean losses (Devlin 2018, A.2), over two micro-batches of unequal size."""
    batches = [build_batch("masked_next_sentence", 0, 0, rows) for rows in (range(5), range(5, 7))]
    results: list[dict[str, torch.Tensor | None]] = []
    for is_plain in (False, True):
        model = Transformer(ModelConfig.model_validate(MODELS["masked_next_sentence"]))
        initialize_parameters(model, seed=1)
        model.train()
        if is_plain:
            hidden = [
                model(**b.to_model_inputs(), finish=lambda head, hidden, places: hidden)
                for b in batches
            ]
            logits = torch.cat([model.get_submodule("head")(one).flatten(0, 1) for one in hidden])
            pairs = torch.cat([model.compute_next_sentence_logits(one) for one in hidden])
            labels = torch.cat(
                [batch.next_sentence_B for batch in batches if batch.next_sentence_B is not None]
            )
            masked = cross_entropy(
                logits, torch.cat([batch.targets_BT.flatten() for batch in batches])
            )
            second = cross_entropy(pairs, labels)
            (masked + second).backward()
            expected = {
                "next_sentence_loss": second,
                "next_sentence_accuracy": (pairs.argmax(1) == labels).double().mean(),
            }
        else:
            counts = reduce_token_counts(batches, torch.device("cpu"))
            for batch in batches:
                compute_loss_share(model, model, batch, build_training_loss(LossConfig()), counts)[
                    0
                ].backward()
            measured = measure_next_sentence(model)
        results.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(measured, expected, check_dtype=False)
    for name, gradient in results[0].items():
        torch.testing.assert_close(gradient, results[1][name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("documents", [False, True])
def test_further_tokens_are_learnt_within_their_document(documents: bool) -> None:
    """DeepSeek-V3's equations 24 and 25 against torch's cross entropy on whole logits, gradients
    included.
    """
    weight, depth = 0.3, 2
    config = ModelConfig.model_validate(
        SHAPE
        | {
            "multi_token_prediction": {"depth": depth, "weight": weight},
            "norm": {"kind": "rmsnorm"},
        }
    )
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(0, 40, (3, 12), generator=generator)
    documents_BT = (
        torch.tensor([[0] * 4 + [1] * 7, [0] * 11, [0, 1, 2] + [3] * 8]) if documents else None
    )
    batch = Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), documents_BT)
    gradients = []
    for fused in (True, False):
        model = Transformer(config)
        initialize_parameters(model, seed=1)
        model.train()
        if fused:
            counts = reduce_token_counts([batch], torch.device("cpu"))
            share, nats = compute_loss_share(
                model, model, batch, build_training_loss(LossConfig()), counts
            )
        else:
            logits = model(**batch.to_model_inputs())
            nats = cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten(), reduction="sum")
            further = []
            for k, predicted in enumerate(model.predicted, start=1):
                loss = torch.zeros(())
                for row in range(3):
                    for place in range(11 - k):
                        if (
                            documents_BT is None
                            or documents_BT[row, place] == documents_BT[row, place + k]
                        ):
                            target = batch.targets_BT[row, place + k]
                            loss = loss + cross_entropy(predicted[row, place], target)
                further.append(loss)
            share = (nats + weight * sum(further) / depth) / batch.num_valid_targets
        share.backward()
        gradients.append((share, nats, {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(gradients[0][:2], gradients[1][:2])
    for name, gradient in gradients[0][2].items():
        torch.testing.assert_close(gradient, gradients[1][2][name], rtol=1e-4, atol=1e-6, msg=name)
