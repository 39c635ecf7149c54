"""Laws of the page as a file: whole, self-contained, the same for the same input, and it says
what is missing.
"""

import base64
import hashlib
import lzma
import re

import pytest

from llmsys.errors import DataError
from llmsys.report.html_page import write_report
from llmsys.report.packed_plotly import pack_script
from tests.helpers.example_run import (
    HOSTILE,
    TOKENS_PER_STEP,
    run_events,
    write_dataset,
    write_run,
)

# Those that unpack.js has.
SETTINGS = {"id": lzma.FILTER_LZMA1, "lc": 3, "lp": 0, "pb": 0, "dict_size": 1 << 23}


@pytest.fixture
def folders(tmp_path):
    return write_run(tmp_path / "run"), write_dataset(tmp_path / "data")


def _without_scripts(path):
    return re.sub(r"<script.*?</script>", "", path.read_text("utf-8"), flags=re.DOTALL)


def test_the_report_lies_in_the_run_folder_else_in_the_dataset_folder(folders):
    run, data = folders
    assert write_report(run, data) == run / "report.html"
    assert write_report(None, data) == data / "report.html"
    assert write_report(run, data, run / "new" / "page.html") == run / "new" / "page.html"
    # nothing half-written beside it
    assert [path.name for path in (run / "new").iterdir()] == ["page.html"]


def test_the_same_folders_give_the_same_bytes(folders, tmp_path):
    first, second = (
        write_report(*folders, tmp_path / "1.html"),  # type: ignore[call-arg]
        write_report(*folders, tmp_path / "2.html"),  # type: ignore[call-arg]
    )
    assert first.read_bytes() == second.read_bytes()


def test_the_page_loads_nothing_and_runs_only_its_own_scripts(folders):
    page = write_report(*folders).read_text("utf-8")
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    raw = base64.b85decode(re.search(r'id="library"[^>]*>([^<]*)<', page)[1].replace(",", "<"))
    unpacked = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[SETTINGS]).decompress(raw)
    digests = [
        base64.b64encode(hashlib.sha256(one).digest()).decode()
        for one in (unpacked, *map(str.encode, scripts))
    ]
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1].replace(
        "&#39;", "'"
    )
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert policy == (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
    )
    assert len(scripts) == 2
    links = re.findall(r'\s(?:src|href|action)="([^"]*)"', _without_scripts(write_report(*folders)))
    assert links
    assert all(link.startswith("#") or link == "data:," for link in links)


def test_page_text_is_nowhere_markup(folders):
    outside = _without_scripts(write_report(*folders))
    assert outside.count("&lt;/script&gt;&lt;/pre&gt;&lt;script&gt;") > 20
    assert "onerror=&#34;" in outside
    assert HOSTILE[:30] not in outside
    assert "<img" not in outside


def test_every_section_can_be_jumped_to(folders):
    page = _without_scripts(write_report(*folders))
    anchors = re.findall(r'<a href="#([a-z]+)">', page)
    assert anchors == re.findall(r'<section id="([a-z]+)">', page)
    assert anchors == [
        "yardstick", "answers", "training", "prediction", "profile", "norms", "experts", "samples",
        "funnel", "distributions", "reading", "origin",
    ]  # fmt: skip


def test_costs_stand_beside_what_was_predicted(folders):
    page = _without_scripts(write_report(*folders))
    for text in (
        "61.0%",
        "31.0%",
        "causal, abacus, bf16",
        "3.00 GiB",
        "+50.0%",
        "0.8 s (0.7 to 0.95)",
        "+12.5%",
        *(f"{TOKENS_PER_STEP / seconds:,.0f}" for seconds in (0.8, 0.95, 0.7, 0.9)),
        "-11.1%",
        "are both what the allocator reserved on the fullest rank",
        "81.2%",
        "aten::mm",
    ):
        assert text in page
    broken = [
        {"event": "prediction", "memory": {}},
        {"event": "measured"},
        {"event": "evaluation", "step": 400, "sets": {"x": {}}},
    ]
    write_run(folders[0], [*run_events(), *broken])  # type: ignore[list-item]
    assert "2 events in" in _without_scripts(write_report(*folders))


def test_every_drop_shows_its_value_and_threshold(folders):
    page = _without_scripts(write_report(None, folders[1]))
    assert "<b>gopher_quality: mean word length 11.2 &gt; 10</b>" in page
    assert "<dt>value</dt><dd>11.2</dd><dt>threshold</dt><dd>10</dd>" in page


def test_a_run_without_its_dataset_says_so(folders, tmp_path):
    page = _without_scripts(write_report(folders[0], tmp_path / "nowhere"))
    assert "No dataset on this page:" in page
    assert "llmsys prepare CONFIG" in page
    assert 'id="plot-loss"' in page


def test_a_run_of_other_data_is_warned_about(folders):
    run, data = folders
    (run / "environment.json").write_text('{"format_version": 2, "data_fingerprint": "abc"}')
    assert (
        "trained on data with the fingerprint abc, but this dataset has 5f0c"
        in _without_scripts(write_report(run, data))
    )


def test_text_that_is_not_valid_unicode_does_not_stop_the_report(folders):
    run, _ = folders
    lone = {"event": "samples", "step": 1, "samples": [{"prompt": "\ud800", "text": "\udfff"}]}
    write_run(run, [*run_events(), lone])
    assert write_report(run, None).read_bytes().decode("utf-8")


def test_nothing_at_all_is_an_error_with_a_next_step(tmp_path):
    with pytest.raises(
        DataError,
        match=r"Nothing to report: no run in .*a and no manifest\.json in .*b\. Run `llmsys prep",
    ):
        write_report(tmp_path / "a", tmp_path / "b")
    with pytest.raises(DataError, match=r"\(no run folder\)"):
        write_report(None, None)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_manifest_is_not_called_a_missing_one(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format_version"')
    with pytest.raises(DataError, match=r"manifest\.json cannot be used"):
        write_report(None, tmp_path)


def test_a_page_takes_a_third_of_what_its_library_takes(folders):
    from plotly.offline import get_plotlyjs

    assert write_report(*folders).stat().st_size < 1_500_000 < len(get_plotlyjs()) / 3


def test_a_packed_script_is_the_same_text_and_ends_no_tag():
    script = "plot('</script>', \"é漢\");" * 99
    packed = pack_script(script.encode())
    assert "<" not in packed
    raw = base64.b85decode(packed.replace(",", "<"))
    unpacked = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[SETTINGS]).decompress(raw)
    assert unpacked.decode()[: len(script)] == script
