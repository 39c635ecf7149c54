"""The section about losses by document: hosts, documents, and what cannot be read."""

from pathlib import Path

import pytest

from llmsys.config.loading.load import load_run_config
from llmsys.data_pipeline.inspection.loss_groups import group_losses
from llmsys.dataset.document_losses import load_document_losses, open_loss_sources, select_extremes
from llmsys.dataset.loss_parts import list_loss_parts
from llmsys.report.html_page import write_report
from llmsys.report.losses_section import build_losses_section
from tests.helpers.recorded_losses import RecordedLosses, write_recorded_losses


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedLosses:
    return write_recorded_losses(tmp_path)


def test_the_page_of_a_run_has_its_hosts_and_its_hardest_documents(
    recorded: RecordedLosses,
) -> None:
    data = load_run_config(str(recorded.config)).data
    page = write_report(recorded.run, recorded.data, data=data).read_text()
    names, sources = open_loss_sources(data)
    losses = load_document_losses(recorded.run, sources)
    for group in group_losses(losses, names, sources, "host"):
        assert group.value in page
        assert f"{group.excess:+.3f}" in page
    highest, lowest = select_extremes(losses, 5)
    for place in (*highest, *lowest):
        document = recorded.documents[f"{losses.documents_D[place]:032x}"]
        assert document["url"] in page
    assert "<b>Text</b>" not in page
    assert "&lt;b&gt;Text&lt;/b&gt; of document" in page


def test_without_documents_input_files_are_shown(recorded: RecordedLosses) -> None:
    for path in (recorded.data / "documents").iterdir():
        path.unlink()
    section, notes = build_losses_section(recorded.run, load_run_config(str(recorded.config)).data)
    assert section is not None
    content = "".join(str(part) for part in section.content if part is not None)
    assert "toy.warc.gz" in content
    assert "(documents/ does not have it)" in content
    assert notes == []


def test_what_cannot_be_read_is_a_note(recorded: RecordedLosses) -> None:
    data = load_run_config(str(recorded.config)).data
    path = list_loss_parts(recorded.run)[0].path
    path.write_bytes(b"damaged")
    section, (note,) = build_losses_section(recorded.run, data)
    assert section is None
    assert note.startswith("No losses by document on this page: ")
    assert "is damaged" in note
    assert (
        "No losses by document" in write_report(recorded.run, recorded.data, data=data).read_text()
    )


def test_a_run_without_a_record_has_no_section(recorded: RecordedLosses) -> None:
    for part in list_loss_parts(recorded.run):
        part.path.unlink()
    data = load_run_config(str(recorded.config)).data
    page = write_report(recorded.run, recorded.data, data=data).read_text()
    assert "Losses by document" not in page
