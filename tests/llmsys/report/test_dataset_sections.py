"""The page's words about a tokenizer are the manifest's numbers, and its pieces are text, never
markup.
"""

from llmsys.dataset.manifest import LanguageUsage, Manifest, TokenizerUsage
from llmsys.report.dataset_sections import build_tokenizer_section
from tests.helpers.example_run import write_dataset


def test_bytes_and_words_per_token_and_dead_pieces_are_shown(tmp_path) -> None:
    manifest = Manifest.model_validate_json(
        (write_dataset(tmp_path) / "manifest.json").read_bytes()
    )
    one = LanguageUsage(
        documents=3, bytes=1_000, words=150, tokens=250, unknown_tokens=5, byte_tokens=25
    )
    usage = TokenizerUsage(
        languages={"en": one},
        pieces=900,
        dead_pieces=7,
        dead_examples=(" a", "<b>"),
        checked_documents=2,
    )
    assert build_tokenizer_section(manifest.model_copy(update={"usage": None})) is None
    part = build_tokenizer_section(manifest.model_copy(update={"usage": usage}))
    assert part is not None
    text = "".join(map(str, part.content))
    for words in (
        ">4.00<",
        ">0.60<",
        "7 of 900 pieces occur in no document",
        "2 documents were also encoded",
    ):
        assert words in text
    assert part.figures == []  # a single bar says less than the table
    assert "<code>␣a</code>" in text
    assert "<code>&lt;b&gt;</code>" in text


def test_languages_are_compared_by_bars_the_longest_tokens_first(tmp_path) -> None:
    manifest = Manifest.model_validate_json(
        (write_dataset(tmp_path) / "manifest.json").read_bytes()
    )
    languages = {
        f"l{n}": LanguageUsage(
            documents=1, bytes=900 - n, words=9, tokens=100 + n % 7, unknown_tokens=0, byte_tokens=0
        )
        for n in range(79)
    }
    usage = TokenizerUsage(
        languages=languages, pieces=9, dead_pieces=0, dead_examples=(), checked_documents=2
    )
    usage = usage.model_copy(update={"by_library": "it is a model of kind char"})
    part = build_tokenizer_section(manifest.model_copy(update={"usage": usage}))
    assert part is not None
    (figure,) = part.figures
    lengths = figure.traces[0]["x"]
    assert lengths == sorted(lengths, reverse=True)
    assert set(figure.traces[0]["y"]) == {f"l{n}" for n in range(24)}
    assert "the table has all 79" in figure.caption
    assert "The library encoded every document: it is a model of kind char." in "".join(
        map(str, part.content)
    )
