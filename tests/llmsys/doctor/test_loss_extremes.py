"""The documents that a run found hardest and easiest, with text from documents/ or from tokens."""

import json
from pathlib import Path

import pytest

from llmsys.config.loading.load import load_run_config
from llmsys.dataset.document_losses import load_document_losses
from llmsys.dataset.token_shards import open_tokens
from llmsys.doctor.loss_extremes import format_loss_extremes, list_loss_extremes
from llmsys.errors import DataError
from llmsys.launch.main import main
from llmsys.vocabulary.tokenizer import load_tokenizer
from tests.helpers.recorded_losses import RecordedLosses, write_recorded_losses


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedLosses:
    return write_recorded_losses(tmp_path)


def test_worst_documents_have_their_url_and_the_begin_of_their_text(
    recorded: RecordedLosses, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(recorded.config), "--worst", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    losses = load_document_losses(recorded.run, [open_tokens(recorded.data, "train")])
    numbers = losses.documents_D.tolist()
    ordered = sorted(
        (n for n in range(len(numbers)) if losses.tokens_D[n] >= 32),
        key=lambda place: losses.excesses[place],
    )
    assert [row["document"] for row in found["highest"]] == [numbers[n] for n in ordered[::-1][:3]]
    assert [row["document"] for row in found["lowest"]] == [numbers[n] for n in ordered[:3]]
    for row in found["highest"] + found["lowest"]:
        document = recorded.documents[row["id"]]
        assert row["url"] == document["url"]
        assert row["text"] == document["text"][:200]
        place = numbers.index(row["document"])
        assert row["loss"] == pytest.approx(losses.mean_losses[place])
        assert row["tokens"] == losses.tokens_D[place]


def test_a_text_that_is_gone_is_decoded_from_its_tokens(
    recorded: RecordedLosses, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (recorded.data / "documents").iterdir():
        path.unlink()
    found = list_loss_extremes(load_run_config(str(recorded.config)), 2)
    tokenizer = load_tokenizer(recorded.data / "tokenizer")
    shards = open_tokens(recorded.data, "train")
    for row in found["highest"] + found["lowest"]:
        text = tokenizer.decode(shards.get_tokens(row["document"]).tolist())
        assert row["text"] == " ".join(text.split())[:200]
        assert row["url"] is None
    assert main(["trace", str(recorded.config), "--worst", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown == format_loss_extremes(found) + "\n"
    assert "in the first of" in shown
    assert "(no URL)" in shown


@pytest.mark.parametrize("words", [["--worst", "1", "step=1"], []])
def test_trace_takes_one_question(
    recorded: RecordedLosses, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["trace", str(recorded.config), *words]) == 2
    assert "Give exactly one of step=N, url=URL, document=ID or --worst N." in (
        capsys.readouterr().err
    )


def test_short_documents_alone_are_an_error(
    recorded: RecordedLosses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmsys.dataset.document_losses.MIN_LISTED_TOKENS", 10_000)
    with pytest.raises(DataError, match="has had 32 targets so far"):
        list_loss_extremes(load_run_config(str(recorded.config)), 2)
