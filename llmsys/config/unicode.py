"""What a YAML file can say about damaged text: whether and how its Unicode is repaired, before its language is asked.

Reads nothing, gives the tagged union `UnicodeConfig`.
"""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.section import Section


class NoUnicodeRepair(Section):
    """Text stays as extraction gave it."""

    kind: Literal["none"] = "none"


class FtfyRepairConfig(Section):
    """Text decoded with the wrong encoding is mended with ftfy (Speer 2019) under datatrove's settings.

    Mojibake, C1 controls, lone surrogates, control characters and terminal escapes go; quotes, ligatures, width and
    line ends stay as they were written.
    """

    kind: Literal["ftfy"] = "ftfy"
    html_entities: Literal["auto", "keep"] = Field(
        "auto", description="auto: `&eacute;` is decoded up to the first line of a text that has a `<`; keep: never."
    )
    normalization: Literal["none", "NFC"] = Field("none", description="NFC: composed characters, after the repair.")


class NfcNormalizationConfig(Section):
    """Characters are composed (Unicode NFC) and nothing else is touched."""

    kind: Literal["nfc"] = "nfc"


UnicodeConfig = Annotated[NoUnicodeRepair | FtfyRepairConfig | NfcNormalizationConfig, Field(discriminator="kind")]
