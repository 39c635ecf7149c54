"""Language identification: the right code with a probability, a strict threshold, and only the beginning of a text
read.
"""

import pyarrow as pa
import pytest

from data_pipeline.language.identify import identify, keep_mask
from llmsys.config.language import LanguageConfig

SENTENCES = {
    "en": "The people of the town walked along the river in the evening and talked about the weather.",
    "de": "Die Leute aus der Stadt gingen am Abend den Fluss entlang und sprachen über das Wetter.",
    "fr": "Les habitants de la ville se promenaient le soir au bord de la rivière et parlaient du temps.",
    "es": "La gente del pueblo paseaba por la tarde a lo largo del río y hablaba del tiempo.",
    "ru": "Жители города гуляли вечером вдоль реки и разговаривали о погоде.",
    "zh": "镇上的人们傍晚沿着河边散步，谈论着天气。",
    "ja": "町の人々は夕方に川沿いを歩きながら天気について話していました。",
    "ko": "마을 사람들은 저녁에 강을 따라 걸으며 날씨에 대해 이야기했다.",
    "ar": "كان أهل المدينة يسيرون مساءً على طول النهر ويتحدثون عن الطقس.",
}


def test_codes_and_probabilities_of_clear_sentences() -> None:
    codes, scores = identify(pa.array(list(SENTENCES.values()), pa.large_string()), LanguageConfig())
    assert codes.to_pylist() == list(SENTENCES)
    assert scores.type == pa.float32()
    assert all(0.65 < score <= 1 for score in scores.to_pylist())


def test_only_the_beginning_is_read() -> None:
    text = SENTENCES["en"] + " " + SENTENCES["ru"] * 50
    codes, _ = identify(pa.array([text]), LanguageConfig(sample_characters=len(SENTENCES["en"])))
    assert codes.to_pylist() == ["en"]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [(("en",), [False, True, False]), (("en", "de"), [False, True, True]), ((), [False, True, True])],
)
def test_a_score_must_exceed_the_minimum(keep: tuple[str, ...], expected: list[bool]) -> None:
    config = LanguageConfig(keep=keep, minimum_score=0.5)
    mask = keep_mask(pa.array(["en", "en", "de"]), pa.array([0.5, 0.51, 0.9], pa.float32()), config)
    assert mask.to_pylist() == expected


def test_text_without_features_and_no_texts_are_fine() -> None:
    codes, scores = identify(pa.array(["", "12345 67890"]), LanguageConfig())
    assert not any(keep_mask(codes, scores, LanguageConfig()).to_pylist())
    codes, scores = identify(pa.array([], pa.string()), LanguageConfig())
    assert keep_mask(codes, scores, LanguageConfig()).to_pylist() == []
