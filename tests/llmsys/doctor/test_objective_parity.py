"""Experts and every kind of attention learn the same on any number of ranks, whatever is learnt.

Rows of pairs are padded by those beside them, and ranks may have none; one process with a row at a
time has neither.
"""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from llmsys.config.model import ModelConfig
from llmsys.data import sequence_pairs
from llmsys.data.batch import Batch
from llmsys.doctor.parity_check import TrajectoryDistance, compare_to_reference
from llmsys.doctor.parity_matrix import ParityCase
from llmsys.doctor.parity_models import CHATS, LABELS, MASKED, TRANSLATION, ParityModel
from llmsys.doctor.parity_reference import Trajectory, compute_reference_trajectory
from llmsys.doctor.parity_rows import build_micro_batches, list_rows
from llmsys.estimate import model_tensors
from llmsys.model.transformer import Transformer
from tests.helpers.ranks import run_ranks

BALANCES: dict[str, dict[str, Any]] = {
    "bias": {"balance": {"kind": "bias", "rate": 0.01}},
    "sequence loss": {"balance": {"kind": "auxiliary_loss", "weight": 0.5, "scope": "sequence"}},
    "batch loss": {"balance": {"kind": "auxiliary_loss", "weight": 0.5, "scope": "batch"}},
    "z loss": {"balance": {"kind": "none"}, "z_loss_weight": 0.1},
    "capacity": {"routing": {"kind": "capacity", "factor": 0.7}},
}
PLAIN: dict[str, Any] = {
    "balance": {"kind": "none"},
    "routing": {"kind": "token_choice"},
    "z_loss_weight": 0.0,
}
OBJECTIVES = {"translation": TRANSLATION, "classification": LABELS, "masked": MASKED}
KINDS = {f"{name}, {kind}": (subject, PLAIN | changes)
         for name, subject in OBJECTIVES.items() for kind, changes in BALANCES.items()}  # fmt: skip


def _change_experts(subject: ParityModel, name: str, changes: dict[str, Any]) -> ParityModel:
    values = subject.model.model_dump()
    return ParityModel(
        name,
        ModelConfig.model_validate(
            values | {"num_hidden_layers": 1, "moe": values["moe"] | changes}
        ),
    )


PARITY_MODELS = {
    name: _change_experts(subject, name, changes) for name, (subject, changes) in KINDS.items()
}
UNIVERSAL = ParityModel(
    "translation, adaptive depth",
    ModelConfig.model_validate(
        TRANSLATION.model.model_dump()
        | {
            "moe": None,
            "num_hidden_layers": 3,
            "recurrence": {"kind": "adaptive", "threshold": 0.8, "ponder_weight": 0.5},
        }
    ),
)
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 16,
    "initializer_range": 0.1,
}
RECURRENT = ParityModel(
    "translation, recurrent",
    ModelConfig.model_validate(
        SMALL
        | {
            "family": "encoder_decoder",
            "num_attention_heads": 1,
            "position": {"kind": "none"},
            "rnn": {"kind": "lstm", "score": "additive"},
        }
    ),
)
NEXT_SENTENCE = ParityModel(
    "masked, next sentence",
    ModelConfig.model_validate(
        SMALL
        | {
            "family": "encoder",
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "head": {"kind": "mlm", "pooler": True, "next_sentence": True},
            "embedding": {"token_types": 2},
        }
    ),
)
IMAGES = ParityModel(
    "labels of images",
    ModelConfig.model_validate(
        LABELS.model.model_dump()
        | {
            "moe": None,
            "vocab_size": 256,
            "position": {"kind": "learned"},
            "max_position_embeddings": 5,
        }
        | {"patches": {"image_size": 4, "patch_size": 2}, "num_hidden_layers": 1}
        | {"head": {"kind": "classification", "num_labels": 3, "pooling": "mean"}}
    ),
)
NARROW: dict[str, Any] = SMALL | {"intermediate_size": 24, "num_attention_heads": 2}
HIDING: dict[str, Any] = {
    "family": "encoder",
    "head": {"kind": "mlm"},
    "position": {"kind": "learned"},
}
RELATIVE: dict[str, Any] = {"position": {"kind": "transformer_xl"}}
ATTENTIONS: dict[str, dict[str, Any]] = {
    "segments with memory": {
        **RELATIVE,
        "attention": {"kind": "segment_memory", "segment_length": 4, "memory_length": 6},
    },
    "two streams": {**RELATIVE, "family": "encoder", "head": {"kind": "permutation"}},
    "hashed, reversible": {
        "position": {"kind": "learned"},
        "attention": {"kind": "lsh", "num_hashes": 2, "chunk_length": 4},
        "residual": {"kind": "reversible"},
        "feed_forward_chunk": 8,
    },
    "windows and global tokens": {
        **HIDING,
        "attention": {
            "kind": "longformer",
            "windows": [4],
            "dilations": [1, 2],
            "num_global_tokens": 1,
        },
    },
    "mixed positions": {**HIDING, "attention": {"kind": "linformer", "projected_length": 6}},
}
ATTENTION_MODELS = tuple(
    ParityModel(name, ModelConfig.model_validate(NARROW | changes))
    for name, changes in ATTENTIONS.items()
)
# Each model under FSDP2 and under two of the others in turn; all pairs of models with engines are
# in the covering array (llmsys/doctor/pairs).
TURNS: dict[str, tuple[ParityModel, ...]] = {
    "fsdp": (RECURRENT, NEXT_SENTENCE, *ATTENTION_MODELS),
    "ddp": (RECURRENT, *ATTENTION_MODELS[2:4]),
    "bitwise": (NEXT_SENTENCE, *ATTENTION_MODELS[:3]),
    "zero-2": (RECURRENT, *ATTENTION_MODELS[3:]),
    "accelerate": (NEXT_SENTENCE, ATTENTION_MODELS[0], ATTENTION_MODELS[4]),
}
OTHER_ENGINES = (
    {
        f"{engine}, {subject.name}": ParityCase(2, engine, (), "fp32", "none", subject, 2)
        for engine, subjects in TURNS.items()
        for subject in subjects
        # The other engines run permutations in tests/llmsys/engine/test_objectives.py.
        if engine == "bitwise" or subject.model.head.kind != "permutation"
    }
    | {
        f"{engine}, adaptive depth": ParityCase(2, engine, (), "fp32", recompute, UNIVERSAL, 2)
        for engine, recompute in (
            ("fsdp", "full"),
            ("bitwise", "none"),
            ("accelerate", "selective"),
        )
    }
    | {
        f"{engine}, images": ParityCase(2, engine, (), "fp32", recompute, IMAGES, 2)
        for engine, recompute in (
            ("fsdp", "full"),
            ("ddp", "none"),
            ("zero-3", "none"),
        )
    }
    | {
        f"{engine} {layout}, chats": ParityCase(2, engine, layout, "fp32", "none", CHATS, 2)
        for engine, layout in (
            ("fsdp", (("tensor", 2),)),
            ("fsdp", (("pipeline", 2),)),
            ("zero-2", ()),
        )
    }
    | {
        "fsdp expert=2": ParityCase(
            2, "fsdp", (("expert", 2),), "fp32", "selective", TRANSLATION, 2
        ),
        "bitwise": ParityCase(2, "bitwise", (), "fp32", "none", TRANSLATION, 2),
        "zero-2 expert=2": ParityCase(
            2, "zero-2", (("expert", 2),), "fp32", "none", TRANSLATION, 2
        ),
        "zero-3": ParityCase(2, "zero-3", (), "fp32", "none", TRANSLATION, 2),
        "accelerate": ParityCase(2, "accelerate", (), "fp32", "none", TRANSLATION, 2),
    }
)


@pytest.fixture(scope="module")
def expected() -> bytes:
    """One process, a row at a time; by value, since ranks get at most 256 tensors by reference."""
    subjects = {subject.name: subject for subject in PARITY_MODELS.values()}
    subjects |= {cell.parity_model.name: cell.parity_model for cell in OTHER_ENGINES.values()}
    return pickle.dumps(
        {name: compute_reference_trajectory(subject) for name, subject in subjects.items()}
    )


def measure_cells(
    rank: int, cells: dict[str, ParityCase], expected: bytes
) -> dict[str, TrajectoryDistance]:
    """All cells in one set of processes."""
    trajectories: dict[str, Trajectory] = pickle.loads(expected)
    return {
        name: compare_to_reference(cell, trajectories[cell.parity_model.name])
        for name, cell in cells.items()
    }


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_change_nothing_of_experts(ranks: int, expected: bytes) -> None:
    # Two and four ranks share out the objectives of each way of balancing.
    cells = {
        name: ParityCase(ranks, "fsdp", (), "fp32", "none", subject, 2)
        for number, (name, subject) in enumerate(PARITY_MODELS.items())
        if number % 2 == ranks // 2 - 1
    }
    found = run_ranks(
        measure_cells, ranks, cells | (OTHER_ENGINES if ranks == 2 else {}), expected
    )[0]
    assert len(found) == (8 + len(OTHER_ENGINES) if ranks == 2 else 7)
    for name, distance in found.items():
        assert distance.passed, f"{name}: {distance}"
        assert distance.gradient < 1e-4, f"{name}: {distance}"


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_are_dealt_once_and_some_rank_has_none(ranks: int) -> None:
    for subject in (TRANSLATION, LABELS):
        alone = list_rows(subject, 1)
        for is_bitwise in (False, True):
            assigned = [
                batch
                for rank in range(ranks)
                for batch in build_micro_batches(
                    subject, 1, rank=rank, ranks=ranks, micro=2, is_bitwise=is_bitwise
                )
            ]
            for count in ("num_valid_targets", "num_tokens", "num_source_tokens"):
                assert sum(getattr(one, count) for one in assigned) == sum(
                    getattr(one, count) for one in alone
                ), count
            assert any(not batch.num_tokens for batch in assigned) != is_bitwise
            assert any(batch.tokens_BT.numel() > batch.num_tokens > 0 for batch in assigned)


def ignore_padding_of_targets() -> Any:
    """Padded target positions count as tokens."""
    make = sequence_pairs.TranslationCollator.__call__

    def disable_term(self: Any, given: Any, numbers: Any) -> Batch:
        batch = make(self, given, numbers)
        return Batch(
            batch.tokens_BT, batch.targets_BT, None, batch.source_BS, batch.source_documents_BS
        )

    return patch.object(sequence_pairs.TranslationCollator, "__call__", disable_term)


def add_phantom_tokens() -> Any:
    """A rank without rows has a token."""
    padded = sequence_pairs.pad_sequences

    def replace_token(sequences: Any, filler: int = 0) -> Any:
        tokens_BT, documents_BT = padded(sequences, filler)
        return tokens_BT, documents_BT if sequences else torch.zeros_like(documents_BT)

    return patch.object(sequence_pairs, "pad_sequences", replace_token)


BUGS = {
    "padding": (ignore_padding_of_targets, TRANSLATION),
    "phantoms": (add_phantom_tokens, LABELS),
}


def weigh_source_by_targets() -> Any:
    """The encoder's losses are divided by the tokens of the targets."""
    share = Transformer.compute_auxiliary_share
    return patch.object(
        Transformer, "compute_auxiliary_share", lambda self, tokens, *_: share(self, tokens, tokens)
    )


@contextmanager
def put_experts_into_encoders() -> Iterator[None]:
    """An encoder beside a decoder has experts too, which no config asks for yet."""
    shape = ModelConfig.encoder_model.fget  # type: ignore[attr-defined]
    with (
        patch.object(
            ModelConfig,
            "encoder_model",
            property(lambda self: shape(self).model_copy(update={"moe": self.moe})),
        ),
        # without its cache
        patch.object(model_tensors, "_list_tensors", model_tensors._list_tensors.__wrapped__),
    ):
        yield


def measure_bugs(rank: int, pickled: bytes) -> dict[str, TrajectoryDistance]:
    """Each bug alone, and what is right between them."""
    expected, of_both = pickle.loads(pickled)
    found = {}
    for name, (bug, subject) in BUGS.items():
        with bug():
            found[name] = compare_to_reference(
                ParityCase(2, "fsdp", (), "fp32", "none", subject, 2), expected[subject.name]
            )
    cell = ParityCase(2, "fsdp", (), "fp32", "none", TRANSLATION, 2)
    with put_experts_into_encoders():
        found["healthy"] = compare_to_reference(cell, of_both)
        with weigh_source_by_targets():
            found["weights"] = compare_to_reference(cell, of_both)
    return found


@pytest.mark.distributed
def test_parity_sees_padding_phantom_tokens_and_wrong_weights() -> None:
    """Each would train another model on two ranks."""
    expected = {
        subject.name: compute_reference_trajectory(subject) for subject in (TRANSLATION, LABELS)
    }
    with put_experts_into_encoders():
        of_both = compute_reference_trajectory(TRANSLATION)
    assert any("encoder" in name and "router" in name for name in of_both.weights)
    found = run_ranks(measure_bugs, 2, pickle.dumps((expected, of_both)))[0]
    assert found.pop("healthy").passed
    assert [name for name, distance in found.items() if distance.passed] == []


def test_the_oracle_has_every_auxiliary_loss() -> None:
    """Without its weight, the routers' gradients are others; the batch loss begins even, and
    pulls from step 2 on.
    """
    for name in ("sequence loss", "batch loss", "z loss"):
        subject = PARITY_MODELS[f"translation, {name}"]
        without = _change_experts(subject, "without", PLAIN)
        moment = "1/blocks.0.feed_forward.router.weight"
        assert not torch.allclose(
            compute_reference_trajectory(subject).moments[moment],
            compute_reference_trajectory(without).moments[moment],
            rtol=1e-2,
        )
