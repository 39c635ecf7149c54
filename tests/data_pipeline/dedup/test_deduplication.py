"""Laws of deduplication: equal to the plain twin, and to datatrove where bits are owed; blind to
the order of input.
"""

import random
import re
import unicodedata
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsys.config.deduplication import MinHashDedupConfig
from llmsys.data_pipeline.dedup import simplified_words
from llmsys.data_pipeline.dedup.minhash import (
    PRIME,
    HashPermutations,
    MinHasher,
    reduce_mod_mersenne61,
)
from llmsys.data_pipeline.dedup.simplified_words import SimplifiedWordSplitter
from llmsys.data_pipeline.stages.compute_signatures import split_document_ids
from llmsys.data_pipeline.stages.join_near_duplicates import list_clusters
from llmsys.data_pipeline.text.simplify_text import (
    CHANGING,
    fold_text,
    fold_texts,
    from_code_points,
    remove_accents,
    simplify_text,
    simplify_texts,
)
from llmsys.data_pipeline.text.spacy_tokenizer import SpacyTokenizer
from tests.helpers.deduplication import build_document, deduplicate_documents
from tests.reference import minhash as plain

FOX = "The Quick-Brown fox doesn't jump over 3.14 lazy dogs; it sleeps."
CAFE = "Crème brûlée, naïve café: 1,000 ways\n\nto say ¡hola! — and １２ more… 日本語。テスト"
LETTERS = ["".join(letters) for letters in product("bdfgk", "aeiou", "lmnrst", "ax")]
A, B, C, D, E = (letter * 32 for letter in "abcde")
LOOSE = MinHashDedupConfig(buckets=12, hashes_per_bucket=3, ngram_words=3)


def near_copies(seed: int) -> list[tuple[str, str]]:
    """Documents (id, text) of which some are edited or exact copies of others, and some are too
    short for a shingle.
    """
    choose = random.Random(seed)
    words = LETTERS
    texts = [" ".join(choose.choices(words, k=choose.choice([2, 40, 60]))) for _ in range(20)]
    for _ in range(30):
        parts = choose.choice(texts).split()
        parts[choose.randrange(len(parts))] = choose.choice(words)
        texts.append(" ".join(parts))
    texts += choose.choices(texts, k=10)
    return [(f"{choose.getrandbits(128):032x}", text) for text in texts]


def kept_by_stages(
    folder: Path, documents: list[tuple[str, str]], files: int, **config: Any
) -> set[str]:
    """The ids that stay when the documents lie in this order in so many files."""
    rows = [build_document(name, text) for name, text in documents]
    return {row["id"] for row in deduplicate_documents(folder, rows, config, files)[0]}


def test_simplified_text_equals_datatrove() -> None:
    assert simplify_text(FOX) == "the quick brown fox doesn t jump over 0 lazy dogs it sleeps"
    assert (
        simplify_text(CAFE)
        == "creme brulee naive cafe 0 ways to say ¡hola and 0 more 日本語 テスト"
    )


def test_sha1_signatures_equal_datatrove() -> None:
    (fox, cafe), _ = MinHasher(MinHashDedupConfig(hash="sha1")).compute_signatures([FOX, CAFE])
    assert fox[:3].tolist() == [209705765882702712, 307470271634611624, 147882751333185437]
    assert int(fox.sum(dtype=np.uint64)) == 8913411145081228149
    assert cafe[:3].tolist() == [61908209952107622, 24885036626112053, 239562508194183567]
    assert int(cafe.sum(dtype=np.uint64)) == 1655919155476848199


def test_many_texts_are_simplified_together_as_one_by_one() -> None:
    assert simplify_texts([*ODD, FOX, CAFE, "a \u0301 b"]) == [
        simplify_text(text) for text in [*ODD, FOX, CAFE, "a \u0301 b"]
    ]
    assert simplify_texts([]) == []


ODD = [
    "We dont, can't; cannot! I'd've id 5km 12,345.67 0x0f 3rd v2 10am 8pm 7kg²  ①② ½ x²",
    "ΟΔΟΣ. ΣΑΣ ΟΔΟΣ, İstanbul Straße ﬁne — K≠L a;b;c ῾x ´y",
    "हिन्दी में लिखा गया। ภาษาไทย 中文，测试。한국어 العربية ١٢٣٫٤ ٥",
    "\x1cfile\x85sep\u2028line\u00a0nbsp \u0301 a\u0301\u0301 ☃☃ 5☃ $5 5$ €20 C# c++ 👍🏽",
    " leading and trailing \n",
    "",
]


def test_words_by_column_equal_the_words_of_the_simplified_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In blocks of a few characters and of all texts; what was asked of spaCy before, and what
    was forgotten.
    """
    monkeypatch.setattr(simplified_words, "_MAX_ASKED", 20)
    splitter = SimplifiedWordSplitter(spelling=True)
    for block in (8, 1 << 16):
        monkeypatch.setattr(simplified_words, "_BLOCK", block)
        for texts in (ODD, ODD, [FOX], [], [ODD[0], CAFE]):
            found = splitter.split_words(texts)
            expected = [
                [w for c in simplify_text(t).split() for w in SpacyTokenizer().split_words([c])[0]]
                for t in texts
            ]
            assert np.diff(found.offsets).tolist() == list(map(len, expected))
            all_words = [word for text in expected for word in text]
            assert found.hashes_W.tolist() == list(map(plain.hash_word, all_words))
            assert found.spellings.decode().split(" ") == [*all_words, ""]
            assert (
                found.ends_W.tolist()
                == np.cumsum([len(word.encode()) + 1 for word in all_words]).tolist()
            )


def test_a_run_without_white_space_is_cut_only_where_it_is_very_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simplified_words, "_BLOCK", 10)
    monkeypatch.setattr(simplified_words, "_LONGEST", 100)
    splitter = SimplifiedWordSplitter(spelling=True)
    found = splitter.split_words(["a " + "b" * 90 + " c", "d" * 150])
    assert found.spellings.decode().split(" ") == ["a", "b" * 90, "c", "d" * 110, "d" * 40, ""]
    assert found.offsets.tolist() == [0, 3, 5]


PLACED = (
    "ab z0۳9.,1²ΑΣσςİı\u0301\u0327 "
    "\n\u00a0،⎗가힣\u1b44\u302e\U0001d15e\U0001d16dﬁ\u037e\u0958\u09cb\u0dde"
)


def test_columns_fold_as_texts_are_folded_one_by_one() -> None:
    """Every character that changes, and those that change with their neighbours, in all company."""
    choose = random.Random(0)
    texts = [
        "".join(map(chr, part[start : start + 50]))
        for part in CHANGING
        for start in range(0, len(part), 50)
    ]
    texts += ["".join(choose.choices(PLACED, k=choose.randrange(9))) for _ in range(4_000)]
    for start in range(0, len(texts), 9):
        group = texts[start : start + 9]
        found = fold_texts(group)
        folded = [re.sub(r"\s", " ", fold_text(text)) for text in group]
        joined = " ".join([*folded, ""])
        assert from_code_points(found.codes) == joined
        assert found.edges.tolist() == np.cumsum([0, *(len(text) + 1 for text in folded)]).tolist()
        assert found.irregular.tolist() == [
            not (character.isalpha() or character == " ") for character in joined
        ]


def test_accents_are_removed_from_every_character_in_any_order() -> None:
    points = [point for part in CHANGING for point in part]
    random.Random(0).shuffle(points)
    for start in range(0, len(points), 5_000):
        text = "".join(map(chr, points[start : start + 5_000]))
        letters = [
            character
            for character in unicodedata.normalize("NFD", text)
            if unicodedata.category(character) != "Mn"
        ]
        assert remove_accents(text) == "".join(letters)


def test_signatures_equal_the_plain_twin() -> None:
    signer = MinHasher(LOOSE)
    a, b = signer.permutations.a_K.tolist(), signer.permutations.b_K.tolist()
    texts = [FOX, "one two", "", *(text for _, text in near_copies(3))]
    for text, found, present in zip(texts, *signer.compute_signatures(texts), strict=True):
        expected = plain.compute_signature(simplify_text(text).split(), 3, a, b)
        assert (found.tolist() if present else None) == expected


def test_bucket_keys_are_equal_where_every_hash_of_the_bucket_is() -> None:
    signer, words = MinHasher(LOOSE), [f"w{number}" for number in range(40)]
    texts = [" ".join([*words[:number], "other", *words[number:]]) for number in range(0, 40, 4)]
    signatures, _ = signer.compute_signatures(texts)
    hashes = signatures.reshape(len(texts), LOOSE.buckets, LOOSE.hashes_per_bucket)
    equal = (hashes[:, None] == hashes[None]).all(axis=-1)
    keys, present = signer.compute_bucket_keys(texts)
    assert present.all()
    assert ((keys[:, None] == keys[None]) == equal).all()
    assert (hashes[:, None, :, :-1] == hashes[None, :, :, :-1]).all(axis=-1).sum() > equal.sum()


def test_the_remainder_is_exact_at_its_edges() -> None:
    prime = int(PRIME)
    edges = [
        0,
        1,
        prime - 1,
        prime,
        prime + 1,
        2 * prime,
        7 * prime + 6,
        8 * prime,
        8 * prime + 7,
        (1 << 64) - 1,
    ]
    assert reduce_mod_mersenne61(np.array(edges, np.uint64)).tolist() == [
        value % prime for value in edges
    ]


def test_minima_are_exact_where_values_lie_side_by_side_or_wrap() -> None:
    """With a = 1 the shingles are the values: these differ only in the bits that the fast search
    does not see.
    """
    prime, top = int(PRIME), 1 << 61
    rows = [
        [10 + 7 * top, 12, 900],  # r = 10 comes first, but 10 + 7 > 12 + 0
        [top - 1, 500, 600],  # r + q = prime: the value is 0
        [5 * top + top - 3, 700],  # r + q = prime + 2
        [top - 5, 500],  # r is within 8 of 2^61, and yet its value is no small one
        [3, 3 + 2 * top],
        [77],
    ]
    choose = random.Random(0)
    rows += [
        [choose.getrandbits(64) for _ in range(1500)] + [choose.randrange(8) * top + 5]
        for _ in range(3)
    ]
    for a, b in ((1, 0), (3, 17), (prime - 1, prime - 1)):
        permutations = HashPermutations(np.array([a], np.uint64), np.array([b], np.uint64))
        expected = [[min((value * a + b) % (1 << 64) % prime for value in row)] for row in rows]
        assert (
            permutations.compute_minima([np.array(row, np.uint64) for row in rows]).tolist()
            == expected
        )


@pytest.mark.parametrize("seed", range(4))
def test_clusters_and_survivors_equal_the_plain_twin_in_any_order(
    tmp_path: Path, seed: int
) -> None:
    documents = near_copies(seed)
    signer = MinHasher(LOOSE)
    signatures = [
        plain.compute_signature(
            text.split(), 3, signer.permutations.a_K.tolist(), signer.permutations.b_K.tolist()
        )
        for _, text in documents
    ]
    expected = plain.select_kept(documents, signatures, LOOSE.hashes_per_bucket)
    # Texts too short for a shingle have no signature; of equal ones the twin must keep the smallest
    # id as well.
    short: dict[str, str] = {}
    for (name, text), signature in zip(documents, signatures, strict=True):
        if signature is None:
            short[text] = min(name, short.get(text, name))
    expected = {name for name in expected if dict(documents)[name] not in short} | set(
        short.values()
    )
    assert 0 < len(expected) < len(documents)
    for files, keys in (
        (1, {"kind": "sorted"}),
        (3, {"kind": "sorted", "keys_per_task": 100}),
        (2, {"kind": "bloom"}),
    ):
        random.Random(files).shuffle(documents)
        found = kept_by_stages(
            tmp_path / str(files), documents, files, minhash=LOOSE.model_dump(), key_filter=keys
        )
        assert found == expected


def test_of_equal_texts_the_smallest_id_stays(tmp_path: Path) -> None:
    documents = [(C, "same"), (A, "same"), (B, "same"), (D, "other"), (E, "same ")]
    assert kept_by_stages(tmp_path / "x", documents, 2, minhash={"kind": "none"}) == {A, D, E}


def test_ids_of_others_have_an_order_that_does_not_depend_on_their_company() -> None:
    """Ids of record files begin alike; an order by their beginnings alone would leave the rest
    to the batches.
    """
    ids = ["<urn:uuid:0001-a>", "<urn:uuid:0001-b>", A, "", "é", B[:31]]
    together = split_document_ids(ids).tolist()
    assert together == [split_document_ids([name])[0].tolist() for name in ids]
    assert len(set(map(tuple, together))) == len(ids)
    assert split_document_ids([A]).tolist() == [[int(A[:16], 16), int(A[16:], 16)]]


def test_of_a_cluster_the_longest_stays_then_the_smallest_id(tmp_path: Path) -> None:
    text = " ".join(LETTERS[:100])
    documents = [(A, text), (E, text + " more"), (D, text + " most"), (B, "unrelated " * 9)]
    assert kept_by_stages(tmp_path / "x", documents, 2, exact={"kind": "none"}) == {D, B}


def test_the_same_record_twice_stays_once(tmp_path: Path) -> None:
    rows = [build_document("a", FOX, file="first"), build_document("a", FOX, file="second")]
    kept, gone = deduplicate_documents(tmp_path / "x", rows, {}, files=2)
    assert [row["file"] for row in kept] == ["first"]  # the first in the crawl stays
    assert [(row["rule"], row["reason"]) for row in gone] == [
        ("exact_duplicates", "exact_duplicates: same text with a, which stays of 2 documents")
    ]


CAPTURES = [
    (A, "2024-05-01T00:00:00Z", "long text"),
    (B, "2024-06-01T00:00:00Z", "text"),
    (C, "", "any text"),
]


@pytest.mark.parametrize(("keep", "stays"), [("latest", B), ("earliest", A), ("longest", A)])
def test_of_one_url_the_capture_that_is_asked_for_stays(
    tmp_path: Path, keep: str, stays: str
) -> None:
    rows = [
        build_document(name, text, url="https://x.org/", date=date) for name, date, text in CAPTURES
    ]
    rows += [
        build_document("d", "without", url=None),
        build_document("e", "without an address", url=None),
    ]
    config = {"url": {"kind": "url", "keep": keep}, "minhash": {"kind": "none"}}
    for order in (rows, rows[::-1]):
        kept, gone = deduplicate_documents(tmp_path / order[0]["id"], order, config, files=2)
        assert {row["id"] for row in kept} == {stays, "d", "e"}
        assert {row["reason"] for row in gone} == {
            f"url_duplicates: same url with {stays}, which stays of 3 documents"
        }


def test_a_copy_of_a_dropped_capture_stays_when_nothing_else_has_its_text(tmp_path: Path) -> None:
    captures = [
        build_document("a", "old", url="u", date="2020"),
        build_document("b", "new", url="u", date="2021"),
    ]
    kept, _ = deduplicate_documents(
        tmp_path / "x", [*captures, build_document("c", "old")], {"url": {"kind": "url"}}
    )
    assert {row["id"] for row in kept} == {"b", "c"}


def test_clusters_do_not_depend_on_the_order_of_pairs() -> None:
    pairs = [[1, 2], [5, 4], [2, 3], [9, 8], [4, 3]]
    expected = [[1, 2, 3, 4, 5], [8, 9]]
    for seed in range(5):
        random.Random(seed).shuffle(pairs)
        assert list_clusters(np.array(pairs)) == expected
    assert list_clusters(np.zeros((0, 2), np.int64)) == []
