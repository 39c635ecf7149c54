"""Every family equals transformers with the same weights: logits, loss, every gradient, and what it
generates.

The weights go through files and `llmsys convert`, theirs into ours; the gradients go the same way,
so that nothing here knows how a family lays out its tensors.
"""

from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmsys.config.loading.load import load_run_config
from llmsys.convert.from_hugging_face import HuggingFaceImport, convert_from_hugging_face
from llmsys.model.kv_cache import KeyValueCache
from llmsys.model.transformer import Transformer
from llmsys.train.trained_model import load_trained_model
from tests.helpers.rounding import assert_within_rounding
from tests.helpers.transformers_models import CASES, build, build_images

transformers = pytest.importorskip("transformers")

LENGTH, SOURCE_LENGTH, ROWS = 24, 19, 3
TOLERANCE = 1e-5
GENERATING = [case for case in CASES if not case.startswith(("bert", "roberta", "roformer", "vit"))]
# Theirs keeps keys in the cache that were turned by the waves of a shorter sequence; ours computes
# them anew.
THEIRS_KEEPS_OLD_KEYS = {"llama, dynamic", "llama, longrope"}
# Theirs limits the steps of state spaces in passes of several tokens, and not in those of one.
THEIRS_FORGETS_LIMITS = {"nemotron_h, dense, long steps", "mamba2, one group, tied"}
OTHER_TEXTS = THEIRS_KEEPS_OLD_KEYS | THEIRS_FORGETS_LIMITS
# Theirs makes as many caches as the encoder has layers.
THEIRS_FAILS = {"t5, deeper decoder"}


@cache
def pair(case: str, folder: Path) -> tuple[Any, Transformer]:
    theirs = build(case)
    theirs.save_pretrained(folder / "theirs")
    convert_from_hugging_face(folder / "theirs", folder / "ours")
    # With a base that follows the length, a config.json means the length before.
    longer = ["model.max_position_embeddings=64"] if "dynamic" in case else []
    config = load_run_config(
        str(folder / "ours" / "config.yaml"), ["train.precision=fp32", *longer]
    )
    return theirs, load_trained_model(config)[0]


@pytest.fixture(scope="module", params=CASES)
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Any, Any]:
    folder = tmp_path_factory.mktemp("oracle")
    return request.param, folder, *pair(request.param, folder)


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    """Without the ids that mean padding in some family."""
    return torch.randint(3, 46, (rows, length), generator=torch.Generator().manual_seed(seed))


def both_logits(theirs: Any, ours: Transformer) -> tuple[Tensor, Tensor]:
    tokens_BT = tokens(ROWS, LENGTH)
    if ours.config.family == "encoder_decoder":
        source_BS = tokens(ROWS, SOURCE_LENGTH, seed=1)
        source_BS[1, -7:], real_BS = 46, torch.ones(ROWS, SOURCE_LENGTH, dtype=torch.int64)
        real_BS[1, -7:] = 0
        expected = theirs(
            input_ids=source_BS,
            attention_mask=real_BS,
            decoder_input_ids=tokens_BT,
            use_cache=False,
        )
        return ours(
            tokens_BT, source_BS=source_BS, source_documents_BS=real_BS - 1
        ), expected.logits
    if ours.config.family == "decoder":
        return ours(tokens_BT), theirs(input_ids=tokens_BT, use_cache=False).logits
    if (patches := ours.config.patches) is not None:
        patches_BNP, pixels = build_images(patches, ROWS)
        expected = theirs(pixels)
        return ours(patches_BNP), expected.get("logits", expected.get("last_hidden_state"))
    real_BT = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    real_BT[1, -5:] = 0
    types_BT = torch.zeros_like(tokens_BT)
    types_BT[:, LENGTH // 2 :] = max(0, ours.config.embedding.token_types - 1)
    expected = theirs(input_ids=tokens_BT, attention_mask=real_BT, token_type_ids=types_BT)
    output = ours(tokens_BT, documents_BT=real_BT - 1, token_types_BT=types_BT)
    logits = expected.get(
        "logits", expected.get("prediction_logits", expected.get("last_hidden_state"))
    )
    return (output, logits) if output.dim() == 2 else (output[real_BT == 1], logits[real_BT == 1])


def loss_of(logits: Tensor) -> Tensor:
    """Cross entropy against arbitrary targets, which reaches every logit."""
    flat = logits.flatten(0, -2)
    return F.cross_entropy(flat, torch.arange(flat.shape[0]) * 7 % flat.shape[1])


def error(value: Tensor, reference: Tensor) -> float:
    """Of the norms; a reference that is rounding error itself counts as 1e-2."""
    value, reference = value.detach().double(), reference.detach().double()
    return float((value - reference).norm() / reference.norm().clamp_min(1e-2))


def their_gradients(theirs: Any, folder: Path) -> dict[str, Tensor]:
    """By our names: saved instead of the weights, and read as weights are."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.data = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            )
    theirs.save_pretrained(folder / "gradients")
    reading = HuggingFaceImport(folder / "gradients")
    found: dict[str, list[Tensor]] = {}
    for piece in reading.list_tensors():
        found.setdefault(piece.part.name, []).append(reading.read_tensor(piece.part).clone())
    return {
        name: torch.stack(parts) if ".experts." in name and len(parts) > 1 else parts[0]
        for name, parts in found.items()
    }


def test_logits_loss_and_gradients_equal_transformers(models: tuple[str, Path, Any, Any]) -> None:
    _, folder, theirs, ours = models
    logits, expected = both_logits(theirs, ours)
    assert error(logits, expected) < TOLERANCE
    loss, their_loss = loss_of(logits), loss_of(expected)
    assert loss.item() == pytest.approx(their_loss.item(), rel=TOLERANCE)
    loss.backward()
    their_loss.backward()
    weights = [parameter.data for parameter in theirs.parameters()]
    gradients = their_gradients(theirs, folder)
    for parameter, weight in zip(theirs.parameters(), weights, strict=True):
        parameter.data, parameter.grad = weight, None

    def compute(errors: AbstractContextManager[Any]) -> dict[str, Tensor]:
        ours.zero_grad()
        with errors:
            loss_of(both_logits(theirs, ours)[0]).backward()
        return get_gradients(ours)

    expectation = {name: gradients[f"parameter/{name}"] for name, _ in ours.named_parameters()}
    assert_within_rounding(get_gradients(ours), expectation, compute, computations=2)
    ours.zero_grad()


def get_gradients(model: Transformer) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


@torch.no_grad()
@pytest.mark.parametrize("models", ["bert, pretraining", "bert, features"], indirect=True)
def test_what_a_pooler_gives_equals_transformers(models: tuple[str, Path, Any, Any]) -> None:
    case, _, theirs, ours = models
    tokens_BT = tokens(ROWS, LENGTH)
    expected = theirs(input_ids=tokens_BT, output_hidden_states=True)
    hidden_BTD = expected.hidden_states[-1]
    if case == "bert, features":
        assert error(ours.pool_first_position(ours(tokens_BT)), expected.pooler_output) < TOLERANCE
    else:
        assert (
            error(ours.compute_next_sentence_logits(hidden_BTD), expected.seq_relationship_logits)
            < TOLERANCE
        )


@torch.no_grad()
@pytest.mark.parametrize("models", ["vit"], indirect=True)
def test_images_of_another_size_have_interpolated_positions_as_in_transformers(
    models: tuple[str, Path, Any, Any],
) -> None:
    _, _, theirs, ours = models
    assert ours.config.patches is not None
    for size in (8, 20):
        patches_BNP, pixels = build_images(ours.config.patches, ROWS, size)
        assert (
            error(ours(patches_BNP), theirs(pixels, interpolate_pos_encoding=True).logits)
            < TOLERANCE
        )


@torch.no_grad()
def greedy(
    model: Transformer, prompt_BT: Tensor, count: int, **source: Tensor
) -> tuple[Tensor, Tensor]:
    """(tokens, logits of every step) with a cache."""
    cache = KeyValueCache(model.config, prompt_BT.shape[0], prompt_BT.shape[1] + count)
    logits, text = [model(prompt_BT, cache=cache, **source)[:, -1]], prompt_BT
    for _ in range(count - 1):
        text = torch.cat([text, logits[-1].argmax(-1, keepdim=True)], dim=1)
        logits.append(model(text[:, -1:], cache=cache)[:, -1])
    return torch.cat([text, logits[-1].argmax(-1, keepdim=True)], dim=1), torch.stack(logits, dim=1)


@pytest.mark.parametrize("models", GENERATING, indirect=True)
def test_a_cache_changes_nothing_and_greedy_texts_equal_those_of_transformers(
    models: tuple[str, Path, Any, Any],
) -> None:
    case, _, theirs, ours = models
    prompt, source, count = tokens(2, 6), {}, 14
    settings = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    if ours.config.family == "encoder_decoder":
        source = {"source_BS": tokens(2, SOURCE_LENGTH, seed=1)}
        prompt = torch.full((2, 1), theirs.config.decoder_start_token_id)
        expected = (
            None if case in THEIRS_FAILS else theirs.generate(source["source_BS"], **settings)
        )
    else:
        expected = theirs.generate(prompt, **settings)
    text, cached = greedy(ours, prompt, count, **source)
    assert expected is None or case in OTHER_TEXTS or text.tolist() == expected.tolist()
    with torch.no_grad():
        steps = range(prompt.shape[1], text.shape[1])
        plain = torch.stack([ours(text[:, :step], **source)[:, -1] for step in steps], dim=1)
    assert error(cached, plain) < TOLERANCE
