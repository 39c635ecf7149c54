"""Laws of declared charsets: one that decodes a page is believed; what overrules it is strong,
and noted.
"""

import random
import string
from pathlib import Path

import pytest

from llmsys.data_pipeline.readers.charset import decide_charset, detect_charset
from llmsys.data_pipeline.readers.charset_likelihood import (
    compute_mean_likelihood,
    extract_non_ascii_words,
    is_strong_evidence,
)
from llmsys.data_pipeline.readers.page_reader import read_pages
from llmsys.dataset.token_shards import read_batches
from tests.helpers.warc_records import compress_members, format_response

# Articles of the Universal Declaration of Human Rights, in languages that the table of pairs was
# not counted on.
UNSEEN = {
    "cym": "Y mae gan bawb, yn ddiwahân, hawl i dâl cyfartal am waith cyfartal.",
    "bre": "Ne vo lakaet den da c'houzañv ar jahinerezh, na doareoù pe kastizoù kriz ha didruez.",
    "quz": "Qharipas warmipas junt'asqa watanman chayaspaqa casarakuyta atin piwanpas maywanpas, "
    "mana piqpa jark'akusqan, yuraqwanña yanawanña, paykuna pura tinkuku, munanakunku chayqa.",
    "arl": (
        "Paa niishiyani: pueya cuaara jiyano¿tioora tamonu jiyajinia quiniaa, juhuajaniya pa "
        "quiniuria jiyocua."
    ),
    "fur": "DECLARAZION UNIVERSÂL DAI DERITS DAL OM",
    "cak": "Xa roma k'a yalan nimaläj rejqalen rusamajixik jun utziläj ajowab'äl chi kikojöl ri "
    "juley chïk taq ruwach'ulew;",
    "tiv": "I venda kpan u kôron, shi u kighir or er, nana shile orgen tom; kpan-kôron man "
    "kpan-teen cii i yange gbindigh gbindigh.",
    "sag": "DÊPÄ TÎ PÖPÖKÖDÖRÖ TÎ NDIÄ TÏ BATA NENGÖ TERÊ TÏ ZO",
    "gla": "Chan fhaodar a' chòir seo a chleachdadh a thaobh thagraidhean nach eil poiliticeach "
    "neo a thaobh ghnìomhan a tha an aghaidh thograidhean agus phrionnsabalan nan dùthchannan "
    "Aonaichte.",
    "auv": (
        "En gardiâ que fau tà fuorsà eivalentâ le deivourpamen d'arlasieu d'amïtio entremeî la "
        "nasieù,"
    ),
}
GERMAN = (
    "Für Überzeugungen dürfen sie größer und schöner, gemäß ihrer Würde, nicht benachteiligt "
    "werden."
)


@pytest.mark.parametrize("language", UNSEEN)
@pytest.mark.parametrize("label", ["iso-8859-1", "windows-1252", "ISO-8859-15"])
def test_a_right_header_is_believed_in_a_language_that_no_table_knows(
    language: str, label: str
) -> None:
    if label == "ISO-8859-15" and language == "arl":
        pytest.skip("its ¿ is the same in both")
    for meta in ("", f'<meta charset="{label}">', '<meta charset="utf-8">'):
        payload = f"<html>{meta}<p>{UNSEEN[language]}</p></html>".encode(label)
        found = decide_charset(payload, label)
        assert payload.decode(found.codec) == payload.decode(label), found
        assert found.note == ""
        declared_by_meta = decide_charset(payload, "") if "utf-8" not in meta and meta else found
        assert payload.decode(declared_by_meta.codec) == payload.decode(label), declared_by_meta


@pytest.mark.parametrize(
    "label", ["iso-8859-1", "windows-1252", "iso-8859-2", "windows-1250", "windows-1257"]
)
def test_words_of_no_language_are_read_as_the_header_says(label: str) -> None:
    choose = random.Random(0)
    letters = string.ascii_lowercase * 2 + bytes(range(0xC0, 0x100)).decode(
        label, "ignore"
    ).replace("×", "")
    for _ in range(30):
        text = " ".join(
            "".join(choose.choices(letters, k=choose.randrange(2, 9))) for _ in range(40)
        )
        payload = f"<p>{text}</p>".encode(label)
        assert payload.decode(detect_charset(payload, label)) == f"<p>{text}</p>"


def test_one_damaged_byte_takes_no_belief_from_a_header() -> None:
    payload = (f"<p>{UNSEEN['auv']}</p>" * 20).encode("cp1252") + b"\x81"
    assert detect_charset(payload, "iso-8859-1") == "cp1252"


@pytest.mark.parametrize(
    ("header", "meta", "note"),
    [
        ("windows-1251", "", "charset windows-1251 of the header overruled: cp1252"),
        ("", "windows-1251", "charset cp1251 of the meta element overruled: cp1252"),
        ("windows-1252", "", ""),
        ("", "", ""),
        ("utf-8", "", ""),  # cannot decode it, so that nothing is overruled
    ],
)
def test_an_overruled_charset_is_counted_and_noted_by_document(
    tmp_path: Path, header: str, meta: str, note: str
) -> None:
    body = f'<html><meta charset="{meta}"><p>{GERMAN}</p></html>'.encode("cp1252")
    kind = f"text/html; charset={header}" if header else "text/html"
    path = tmp_path / "a.warc.gz"
    plain = format_response(
        "https://example.org/0", b"<html><p>ASCII</p></html>", content_type=kind
    )
    path.write_bytes(
        b"".join(
            compress_members(
                plain, format_response("https://example.org/1", body, content_type=kind)
            )
        )
    )
    batches = list(read_pages(str(path), max_page_bytes=100_000))
    assert [skip.reason for batch in batches for skip in batch.noted] == ([note] if note else [])
    assert batches[0].pages["charset"].to_pylist()[1] == "cp1252"
    assert batches[0].pages["note"].to_pylist() == [None, note or None]


def test_utf8_that_declares_another_charset_is_noted() -> None:
    found = decide_charset(f"<p>{GERMAN}</p>".encode(), "iso-8859-1")
    assert (found.codec, found.note) == (
        "utf-8",
        "charset iso-8859-1 of the header overruled: utf-8",
    )


def test_a_document_keeps_its_note_to_the_end(tmp_path: Path) -> None:
    from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
    from llmsys.dataset.manifest import load_manifest
    from tests.helpers.tiny_crawl import build_tiny_config, make_crawl

    crawl = make_crawl(tmp_path / "crawl", files=1)
    path = next(crawl.glob("*.warc.gz"))
    first = next(iter(read_pages(str(path), max_page_bytes=1 << 20))).pages.to_pylist()[0]
    html = first["payload"].decode().replace("</p>", f" {GERMAN}</p>", 1)
    kind = "text/html; charset=iso-8859-1"
    extra = format_response("https://example.org/noted", html.encode(), content_type=kind)
    path.write_bytes(path.read_bytes() + b"".join(compress_members(extra)))
    config = build_tiny_config(tmp_path / "data", crawl)
    prepare_dataset(config, until="documents")
    rows = [
        row
        for name in (tmp_path / "data" / "documents").glob("*.arrow")
        for batch in read_batches(name)
        for row in batch.to_pylist()
    ]
    noted = {row["url"]: row["note"] for row in rows if row["note"]}
    (summary,) = load_manifest(tmp_path / "data").read.noted
    assert noted == {"https://example.org/noted": summary.reason}
    assert summary.count == 1


def test_two_words_that_fit_another_charset_somewhat_better_are_no_strong_evidence() -> None:
    for text, is_strong in (("těžký kůň", False), ("Příliš žluťoučký kůň pěl ďábelské ódy", True)):
        words = extract_non_ascii_words(text.encode("cp1250"))
        assert compute_mean_likelihood(words, "cp1250") > compute_mean_likelihood(words, "cp1252")
        assert is_strong_evidence(words, "cp1250", "cp1252") == is_strong
