"""What a YAML file can say about personal data in kept documents: what is replaced, and by what.

Reads nothing, gives the tagged union `PiiConfig`.
"""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.section import Section

PiiKind = Literal["email", "ip", "phone"]


class NoPiiReplacement(Section):
    """Nothing is replaced."""

    kind: Literal["none"] = "none"


class PiiReplacementConfig(Section):
    """E-mail addresses, public IP addresses (IPv4 and IPv6) and telephone numbers are replaced.

    A replacement follows from the match and the seed (or from the document's id too), never from what was replaced
    before it, so that neither workers nor the order of files change a text.
    """

    kind: Literal["replace"] = "replace"
    kinds: tuple[PiiKind, ...] = Field(("email", "ip"), description="What is looked for; FineWeb: email and ip.")
    replacement: Literal["reserved", "token"] = Field(
        "reserved",
        description="reserved: an address or number that is reserved for examples; token: <EMAIL>, <IP>, <PHONE>.",
    )
    consistency: Literal["match", "document"] = Field(
        "match", description="Equal matches get equal replacements: everywhere, or only within a document."
    )
    seed: int = Field(0, ge=0, description="Another seed chooses other replacements.")


PiiConfig = Annotated[NoPiiReplacement | PiiReplacementConfig, Field(discriminator="kind")]
