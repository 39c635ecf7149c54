"""Laws of the repair of characters: what ftfy makes of a text, with its lines counted."""

import random

import ftfy
import pyarrow as pa
import pytest
from ftfy import TextFixerConfig

from llmsys.config.cleaning import FtfyRepairConfig, NfcNormalizationConfig
from llmsys.data_pipeline.text.unicode_repair import repair_text, repair_texts

SETTINGS = TextFixerConfig(
    fix_latin_ligatures=False,
    fix_character_width=False,
    uncurl_quotes=False,
    fix_line_breaks=False,
    normalization=None,
)
PIECES = [
    "é", "É", "naïve café", "中文", "ã\x83\x84", "âœ”", "â€™", "Ã©", "Ã la", "&eacute;", "&lt;",
    "&amp;amp;", "<",
    "<b>", "\x1b[31m", "\x00", "\x85", "\ufeff", "“q”", "ﬁ", "１２", "\r", "\r\n", "\u2028", "schÃ¶n",
        "Ð¿Ñ", "&#",
    "&#x2019;", "plain words", "\x9d", "Ã¢â‚¬â„¢", " ", "à", "Ã ", "e\u0301",
]  # fmt: skip


def test_texts_are_what_ftfy_makes_of_them() -> None:
    choose = random.Random(0)
    for _ in range(600):
        text = "".join(
            choose.choice(PIECES) + choose.choice(["", "", " ", "\n"])
            for _ in range(choose.randint(1, 12))
        )
        assert repair_text(text, FtfyRepairConfig())[0] == ftfy.fix_text(text, SETTINGS), repr(text)


def test_a_line_longer_than_ftfy_reads_at_once_is_mended_too() -> None:
    text = f"&eacute;cafÃ©{'x ' * 500_000}<&eacute;cafÃ©"
    assert repair_text(text, FtfyRepairConfig()) == (f"écafé{'x ' * 500_000}<&eacute;café", 1)
    assert ftfy.fix_text(text, SETTINGS) == repair_text(text, FtfyRepairConfig())[0]


@pytest.mark.parametrize(
    ("config", "mended"),
    [
        (FtfyRepairConfig(), "schön e\u0301 é <i>&eacute;"),
        (FtfyRepairConfig(html_entities="keep"), "schön e\u0301 &eacute; <i>&eacute;"),
        (FtfyRepairConfig(normalization="NFC"), "schön é é <i>&eacute;"),
        (NfcNormalizationConfig(), "schÃ¶n é &eacute; <i>&eacute;"),
    ],
)
def test_each_choice_changes_what_it_says(
    config: FtfyRepairConfig | NfcNormalizationConfig, mended: str
) -> None:
    assert repair_text("schÃ¶n\ne\u0301\n&eacute;\n<i>&eacute;", config)[0] == mended.replace(
        " ", "\n"
    )


def test_what_was_changed_is_counted() -> None:
    texts = pa.array(["plain", "schÃ¶n\ngut\ncafÃ©", "gut", "x\x00y"], pa.large_string())
    repaired = repair_texts(texts, FtfyRepairConfig())
    assert repaired.texts.to_pylist() == ["plain", "schön\ngut\ncafé", "gut", "xy"]
    assert repaired.lines.tolist() == [0, 2, 0, 1]
    assert repaired.changes == {"documents repaired": 2, "lines repaired": 3}
