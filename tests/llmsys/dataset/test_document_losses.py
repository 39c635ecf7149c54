"""Losses summed by document: against sums in plain Python."""

from collections import defaultdict

import pytest

from llmsys.dataset import document_losses
from llmsys.dataset.document_losses import (
    DocumentLosses,
    load_document_losses,
    read_side_columns,
    select_extremes,
)
from llmsys.dataset.token_shards import TokenShards, open_tokens
from tests.helpers.recorded_losses import RecordedLosses, write_recorded_losses


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedLosses:
    return write_recorded_losses(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def sources(recorded: RecordedLosses) -> tuple[TokenShards, ...]:
    return (open_tokens(recorded.data, "train"),)


@pytest.fixture(scope="module")
def losses(recorded: RecordedLosses, sources: tuple[TokenShards, ...]) -> DocumentLosses:
    return load_document_losses(recorded.run, sources)


def test_a_document_is_compared_with_the_means_of_its_steps(
    recorded: RecordedLosses, losses: DocumentLosses, sources: tuple[TokenShards, ...]
) -> None:
    rows = [row for row in recorded.rows if row["applied"]]
    for place, document in enumerate(losses.documents_D.tolist()):
        own = [row for row in rows if row["document"] == document]
        expected = 0.0
        for row in own:
            step = [one for one in rows if one["step"] == row["step"]]
            nats, tokens = (sum(one[key] for one in step) for key in ("nats", "tokens"))
            expected += row["tokens"] * nats / tokens
        assert losses.tokens_D[place] == sum(row["tokens"] for row in own)
        assert losses.nats_D[place] == pytest.approx(sum(row["nats"] for row in own), rel=1e-6)
        assert losses.expected_D[place] == pytest.approx(expected, rel=1e-6)
    assert losses.nats_D.sum() == pytest.approx(losses.expected_D.sum())
    ids = read_side_columns(losses, sources, "id")
    assert ids == [f"{document:032x}" for document in losses.documents_D.tolist()]


def test_epochs_are_told_apart_and_sums_do_not_depend_on_how_often_they_are_summed(
    recorded: RecordedLosses,
    sources: tuple[TokenShards, ...],
    losses: DocumentLosses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_epoch: dict[int, dict[int, list[float]]] = defaultdict(dict)
    for row in recorded.rows:
        if row["applied"]:
            sums = by_epoch[row["document"]].setdefault(row["epoch"], [0.0, 0.0])
            sums[0] += row["nats"]
            sums[1] += row["tokens"]
    assert losses.documents_D.tolist() == sorted(by_epoch)
    assert (losses.num_steps, losses.num_skipped) == (29, 1)
    for place, document in enumerate(losses.documents_D.tolist()):
        epochs = by_epoch[document]
        first, last = (nats / tokens for nats, tokens in (epochs[min(epochs)], epochs[max(epochs)]))
        assert losses.epochs_D[place] == len(epochs)
        assert losses.first_D[place] == pytest.approx(first, rel=1e-6)
        assert losses.last_D[place] == pytest.approx(last, rel=1e-6)
    monkeypatch.setattr(document_losses, "_MAX_ROWS", 7)
    again = load_document_losses(recorded.run, sources)
    assert again.nats_D == pytest.approx(losses.nats_D, rel=1e-12)
    assert (again.tokens_D == losses.tokens_D).all()


def test_extremes_have_enough_tokens_and_are_in_one_list(losses: DocumentLosses) -> None:
    highest, lowest = select_extremes(losses, 4)
    long_enough = [n for n, tokens in enumerate(losses.tokens_D) if tokens >= 32]
    ordered = sorted(long_enough, key=lambda place: losses.excesses[place])
    assert (highest, lowest) == (ordered[::-1][:4], ordered[:4])
    assert {int(losses.documents_D[place]) % 3 for place in highest} == {2}
    highest, lowest = select_extremes(losses, 1_000)
    assert sorted([*highest, *lowest]) == sorted(long_enough)
