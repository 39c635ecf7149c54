"""The document of each target: against the tokens of the documents, for every kind of window."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmsys.config.run import RunConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.data.target_documents import RowDocuments, SpanSums, build_target_documents
from llmsys.dataset import token_stream
from llmsys.dataset.token_shards import open_tokens
from llmsys.doctor.toy_dataset import build_toy_config, write_toy_chats
from llmsys.train.build_objective import build_step_batches
from tests.helpers.dataset import make_dataset

SEQUENCES, LENGTH = 8, 32
# (source, document) → its targets in the order of the run, with the epoch of each.
Found = dict[tuple[int, int], list[tuple[int, int]]]


def collect_targets(config: RunConfig, ranks: int = 1) -> Found:
    """Collect the targets of each document over all steps and ranks of a run."""
    found: Found = {}
    for step in range(config.num_steps):
        for rank in range(ranks):
            for batch in build_step_batches(config, ranks, rank).get_micro_batches(step):
                add_targets(found, batch)
    return found


def add_targets(found: Found, batch: Batch) -> None:
    assert batch.target_documents is not None
    sums = batch.target_documents.sums
    spans = batch.target_documents.spans_BT.flatten().tolist()
    for span, target in zip(spans, batch.targets_BT.flatten().tolist(), strict=True):
        if target != IGNORED:
            key = int(sums.sources_S[span]), int(sums.documents_S[span])
            found.setdefault(key, []).append((int(sums.epochs_S[span]), target))


def build_config(folder: Path, epochs: int = 2, **changes: Any) -> RunConfig:
    changes["train"] = {
        "record_document_losses": True,
        "reproducibility": "fast",
        "tokens": epochs * 6000,
    } | changes.get("train", {})
    return build_toy_config(folder, **changes)


WINDOWS: dict[str, dict[str, Any]] = {
    "cut from the stream": {},
    "rows read on": {"batch": {"window_order": "consecutive"}},
    "best fit": {"batch": {"packing": "best_fit"}},
    "first fit": {"batch": {"packing": "first_fit"}},
    "shorter rows at first": {
        "batch": {"length_stages": [{"until_tokens": 3000, "sequence_length": 16}]}
    },
    "dealt by cost": {"batch": {"assignment": "balanced", "micro_sequences": 1}},
    "one text per window": {"batch": {"attention_scope": "window"}},
}


@pytest.mark.parametrize("is_paged", [False, True], ids=["cached", "paged"])
@pytest.mark.parametrize("kind", WINDOWS)
def test_the_targets_of_a_document_are_its_tokens(
    tmp_path: Path, kind: str, is_paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_paged:  # as large splits are read
        monkeypatch.setattr(token_stream, "MAX_CACHED_TOKENS", 0)
        monkeypatch.setattr(token_stream, "MAX_CACHED_ENDS", 0)
    make_dataset(tmp_path / "data")
    shards = open_tokens(tmp_path / "data", "train")
    found = collect_targets(build_config(tmp_path, **WINDOWS[kind]), ranks=2)
    in_run = Counter(target for targets in found.values() for _, target in targets)
    assert len(found) == shards.num_documents
    for (source, document), targets in found.items():
        assert source == 0
        own = Counter(shards.get_tokens(document).tolist())
        for epoch in {epoch for epoch, _ in targets}:
            seen = Counter(target for one, target in targets if one == epoch)
            # Once in an epoch at most. The end of an epoch's stream has no window.
            assert seen <= own, (document, epoch)
    whole = sum(
        Counter(target for epoch, target in targets if epoch == 0)
        == Counter(shards.get_tokens(document).tolist())
        for (_, document), targets in found.items()
    )
    # Windows of documents crop some of them; one that is cut may begin or end an epoch.
    assert whole >= shards.num_documents * (0.5 if "fit" in kind else 0.97)
    assert in_run.total() > shards.num_tokens


def test_documents_of_a_mixture_are_those_of_their_source(tmp_path: Path) -> None:
    make_dataset(tmp_path / "large", documents=120)
    make_dataset(tmp_path / "small", documents=20)
    shards = [open_tokens(tmp_path / name, "train") for name in ("large", "small")]
    config = build_config(tmp_path)
    sources = [{"folder": tmp_path / name, "weight": 1} for name in ("large", "small")]
    settings = config.model_dump(mode="json") | {"data": {"kind": "mixture", "sources": sources}}
    found = collect_targets(RunConfig.model_validate(settings))
    assert {source for source, _ in found} == {0, 1}
    for (source, document), targets in found.items():
        own = Counter(shards[source].get_tokens(document).tolist())
        for epoch in {epoch for epoch, _ in targets}:
            assert Counter(target for one, target in targets if one == epoch) <= own
    epochs = [max(e for (s, _), t in found.items() if s == k for e, _ in t) for k in (0, 1)]
    assert epochs[1] > epochs[0], "the small source comes round more often"


def test_targets_of_a_chat_are_its_answers(tmp_path: Path) -> None:
    write_toy_chats(tmp_path / "data")
    shards = open_tokens(tmp_path / "data", "train")
    config = build_config(tmp_path)
    settings = config.model_dump(mode="json")
    settings["data"] = {"kind": "chat", "folder": str(tmp_path / "data")}
    settings["tokenizer"] = {"kind": "file", "path": str(tmp_path / "data" / "tokenizer")}
    found = collect_targets(RunConfig.model_validate(settings))
    size = shards.manifest.vocab_size
    for (_, document), targets in found.items():
        stored = shards.get_tokens(document)
        own: Counter[int] = Counter(stored[stored < size].tolist())
        for epoch in {epoch for epoch, _ in targets}:
            seen = Counter(target for one, target in targets if one == epoch)
            assert seen.keys() <= own.keys()
            # the border that closes a chat is learnt where its last turn is an answer
            assert (seen - own).total() <= 1


def test_without_the_key_batches_name_no_document(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data")
    config = build_config(tmp_path, train={"record_document_losses": False})
    batches = build_step_batches(config, 1, 0).get_micro_batches(0)
    assert all(batch.target_documents is None for batch in batches)


def test_losses_are_summed_by_span_on_copies_of_a_batch() -> None:
    documents = np.array([[4, 4, 7], [7, 7, -1]])
    rows = RowDocuments(np.array([0, 1]), np.array([2, 3]), documents)
    named = build_target_documents(rows)
    copied = named.map_tensors(torch.clone)
    assert copied.spans_BT.tolist() == [[0, 0, 1], [2, 2, 3]]
    losses = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 0.0])
    valid = torch.tensor([True, True, True, True, True, False])
    copied.sums.add_losses(losses, valid, copied.spans_BT.flatten())
    copied.sums.add_losses(losses[:1], valid[:1], copied.spans_BT.flatten()[:1])
    sums: SpanSums = named.sums
    assert sums.sums_2S is not None
    assert sums.sums_2S.tolist() == [4.0, 4.0, 24.0, 0.0, 3.0, 1.0, 2.0, 0.0]
    assert (sums.sources_S.tolist(), sums.epochs_S.tolist()) == ([0, 0, 1, 1], [2, 2, 3, 3])
    assert sums.documents_S.tolist() == [4, 7, 7, -1]
