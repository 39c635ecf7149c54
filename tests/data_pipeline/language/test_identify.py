"""Language identification: the right code with a probability, a strict threshold, the library's own
result, and only
the beginning of a text read.
"""

import numpy as np
import pyarrow as pa
import pytest
from py3langid.langid import MODEL_FILE, LanguageIdentifier

from llmsys.config.language import (
    BAYES_CODES,
    COMPACT_CODES,
    LanguageConfig,
    normalize_language_code,
)
from llmsys.data_pipeline.language import naive_bayes
from llmsys.data_pipeline.language.identify import (
    _EKAVIAN,
    _IJEKAVIAN,
    _MARKERS,
    GROUPS,
    build_marker_pattern,
    compute_keep_mask,
    count_marker_words,
    detect_languages,
    identify_languages,
    list_cld2_codes,
)

SENTENCES = {
    "en": (
        "The people of the town walked along the river in the evening and talked about the weather."
    ),
    "de": "Die Leute aus der Stadt gingen am Abend den Fluss entlang und sprachen über das Wetter.",
    "fr": (
        "Les habitants de la ville se promenaient le soir au bord de la rivière et parlaient du "
        "temps."
    ),
    "es": "La gente del pueblo paseaba por la tarde a lo largo del río y hablaba del tiempo.",
    "ru": "Жители города гуляли вечером вдоль реки и разговаривали о погоде.",
    "zh": "镇上的人们傍晚沿着河边散步，谈论着天气。",
    "ja": "町の人々は夕方に川沿いを歩きながら天気について話していました。",
    "ko": "마을 사람들은 저녁에 강을 따라 걸으며 날씨에 대해 이야기했다.",
    "ar": "كان أهل المدينة يسيرون مساءً على طول النهر ويتحدثون عن الطقس.",
    "th": "ชาวเมืองเดินเล่นริมแม่น้ำในตอนเย็นและพูดคุยกันเรื่องสภาพอากาศ",
    "nb": "Folk i byen gikk langs elva om kvelden og snakket om hvordan været skulle bli.",
}
ODD = [
    "",
    "12345 67890",
    "\x00\x01",
    "ABC DEF GHI",
    "a\u0301e\u0301",
    "x" * 700,
    "的" * 300,
    "🤣" * 20,
    "a\ufffe\u0085b",
]


def test_codes_and_probabilities_of_clear_sentences() -> None:
    codes, scores = identify_languages(
        pa.array(list(SENTENCES.values()), pa.large_string()), LanguageConfig()
    )
    assert codes.to_pylist() == list(SENTENCES)
    assert scores.type == pa.float32()
    assert all(0.65 < score <= 1 for score in scores.to_pylist())


def test_languages_that_only_one_model_knows_are_found() -> None:
    texts = {
        "mi": (
            "Ka haere te iwi o te taone ki te taha o te awa i te ahiahi, ā, ka kōrero rātou mō "
            "te huarere."
        ),
        "tn": (
            "Batho ba motse ba ne ba tsamaya fa thoko ga noka maitseboa mme ba bua ka ga maemo "
            "a bosa."
        ),
        "ti": "ሰባት እታ ከተማ ምሸት ምሸት ኣብ ጥቓ እቲ ሩባ እናተጓዕዙ ብዛዕባ ኩነታት ኣየር ይዘራረቡ ነይሮም።",
    }
    codes, _ = identify_languages(pa.array(list(texts.values())), LanguageConfig())
    assert codes.to_pylist() == list(texts)
    codes, _ = identify_languages(pa.array(list(texts.values())), LanguageConfig(kind="py3langid"))
    assert not set(codes.to_pylist()) & set(texts)


def test_the_batch_gives_what_the_library_gives_text_by_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    mixed = [" ".join(list(SENTENCES.values())[start:]) for start in range(len(SENTENCES))]
    texts = [*SENTENCES.values(), *ODD, *mixed, *(text[:40] * 9 for text in mixed)]
    theirs = [library.classify(text) for text in texts]
    for slice_bytes in (1 << 21, 500):  # whole, and a few texts at a time
        monkeypatch.setattr(naive_bayes, "_SLICE_BYTES", slice_bytes)
        codes, scores = naive_bayes.load_naive_bayes_model().predict_languages(texts)
        assert codes == [code for code, _ in theirs]
        assert scores.tolist() == pytest.approx([score for _, score in theirs], abs=1e-4)


def test_the_codes_that_configs_may_name_are_those_of_the_models() -> None:
    assert (
        frozenset(map(normalize_language_code, naive_bayes.load_naive_bayes_model().labels))
        == BAYES_CODES
    )
    assert frozenset(map(normalize_language_code, list_cld2_codes())) == COMPACT_CODES


def test_no_text_is_refused() -> None:
    assert [found.share <= 1 for found in detect_languages(ODD)] == [True] * len(ODD)


def test_only_the_beginning_is_read() -> None:
    text = SENTENCES["en"] + " " + SENTENCES["ru"] * 50
    codes, _ = identify_languages(
        pa.array([text]), LanguageConfig(max_characters=len(SENTENCES["en"]))
    )
    assert codes.to_pylist() == ["en"]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (("en",), [False, True, False]),
        (("en", "de"), [False, True, True]),
        ((), [False, True, True]),
    ],
)
def test_a_score_must_exceed_the_minimum(keep: tuple[str, ...], expected: list[bool]) -> None:
    config = LanguageConfig(languages=keep, min_score=0.5)
    mask = compute_keep_mask(
        pa.array(["en", "en", "de"]), pa.array([0.5, 0.51, 0.9], pa.float32()), config
    )
    assert mask.to_pylist() == expected


@pytest.mark.parametrize("kind", ["combined", "py3langid", "cld2"])
def test_text_without_features_and_no_texts_are_fine(kind: str) -> None:
    config = LanguageConfig.model_validate({"kind": kind})
    codes, scores = identify_languages(pa.array(["", "12345 67890"]), config)
    assert not any(compute_keep_mask(codes, scores, config).to_pylist())
    codes, scores = identify_languages(pa.array([], pa.string()), config)
    assert compute_keep_mask(codes, scores, config).to_pylist() == []


NEIGHBOURS = {
    "hr": (
        "Tijekom idućeg tjedna obitelj putuje vlakom, a tko želi može sudjelovati na natječaju "
        "tvrtke."
    ),
    "bs": (
        "Tokom naredne sedmice porodica putuje vozom, a ko želi može učestvovati na konkursu "
        "kompanije."
    ),
    "ms": (
        "Polis berkata kereta itu milik syarikat yang pejabatnya ditutup kerana kemalangan pada "
        "hari Jumaat."
    ),
    "id": (
        "Polisi mengatakan mobil itu milik perusahaan yang kantornya ditutup karena kecelakaan "
        "pada hari Jumat."
    ),
}


@pytest.mark.parametrize("code", NEIGHBOURS)
def test_words_tell_close_neighbours_apart_whatever_was_guessed(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = next(group for group in GROUPS if code in group)
    (other,) = group - {code}
    sure = np.array([0.9])
    monkeypatch.setattr(
        "llmsys.data_pipeline.language.identify._identify_with_py3langid",
        lambda texts: ([other] * len(texts), sure.copy()),
    )
    codes, scores = identify_languages(pa.array([NEIGHBOURS[code]]), LanguageConfig())
    assert codes.to_pylist() == [code]
    assert scores[0].as_py() > 0.65
    # no word decides: the guess stays
    codes, scores = identify_languages(pa.array(["2024"]), LanguageConfig())
    assert (codes.to_pylist(), scores[0].as_py()) == ([other], pytest.approx(0.9))


SERBIAN = (
    "Prošle nedelje deca su gledala predstavu u pozorištu, a posle nje je reditelj odgovorio na "
    "pitanja.",
    "Vreme će biti lepo u celoj zemlji, sa vetrom na severu i snegom na planinama.",
    "Predsednik opštine kaže da je rešenje uvek u dogovoru i da su dve škole već obnovljene.",
)


@pytest.mark.parametrize("text", SERBIAN)
def test_serbian_in_latin_letters_is_serbian(text: str) -> None:
    assert identify_languages(pa.array([text]), LanguageConfig())[0].to_pylist() == ["sr"]
    codes, scores = identify_languages(pa.array([" ".join(SERBIAN)]), LanguageConfig())
    assert (codes.to_pylist(), scores[0].as_py() > 0.65) == (["sr"], True)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "hr",
            f"{NEIGHBOURS['hr']} Djeca su uvijek lijepo vrijeme provodila na rijeci, a "
            "predsjednik je to vidio.",
        ),
        (
            "bs",
            f"{NEIGHBOURS['bs']} Djeca su uvijek lijepo vrijeme provodila na rijeci, a "
            "predsjednik je to vidio.",
        ),
        (
            "sl",
            "Po celem svetu je lepo vreme, dve reki na severu pa sta po snegu in vetru spremenili "
            "tok v teh mestih.",
        ),
        (
            "sr",
            "Прошле недеље деца су гледала представу у позоришту, а после ње је редитељ одговорио "
            "на питања.",
        ),
    ],
)
def test_its_neighbours_are_not_taken_for_serbian_in_latin_letters(code: str, text: str) -> None:
    assert identify_languages(pa.array([text]), LanguageConfig())[0].to_pylist() == [code]


def test_each_word_of_yat_speaks_for_one_side() -> None:
    for words, other in ((_EKAVIAN, _IJEKAVIAN), (_IJEKAVIAN, _EKAVIAN)):
        assert not build_marker_pattern(other).findall(words.replace("*", ""))


def test_no_word_speaks_for_two_neighbours() -> None:
    for group in GROUPS:
        for code in group:
            found = count_marker_words(" ".join(NEIGHBOURS[code] for code in group), group)
            assert found[code] == count_marker_words(NEIGHBOURS[code], group)[code] >= 4
            for word in _MARKERS[code].replace("*", "").split():
                assert [one for one, count in count_marker_words(word, group).items() if count] == [
                    code
                ], word
