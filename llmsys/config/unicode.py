"""Sections for Unicode repair before language identification: the tagged union `UnicodeConfig`."""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.section import Section


class NoUnicodeRepair(Section):
    """Leave the extracted text unchanged."""

    kind: Literal["none"] = "none"


class FtfyRepairConfig(Section):
    """Repair text decoded with the wrong encoding with ftfy (Speer 2019), with datatrove's settings.

    Fixes mojibake and C1 controls, and removes lone surrogates, control characters and terminal escapes. Quotes,
    ligatures, character width and line endings are unchanged.
    """

    kind: Literal["ftfy"] = "ftfy"
    html_entities: Literal["auto", "keep"] = Field(
        "auto",
        description="HTML entities such as `&eacute;`. auto: decode them up to the first line that contains `<`. "
        "keep: do not decode.",
    )
    normalization: Literal["none", "NFC"] = Field(
        "none", description="Normalization after the repair. NFC: composed characters."
    )


class NfcNormalizationConfig(Section):
    """Apply Unicode NFC composition only."""

    kind: Literal["nfc"] = "nfc"


UnicodeConfig = Annotated[NoUnicodeRepair | FtfyRepairConfig | NfcNormalizationConfig, Field(discriminator="kind")]
