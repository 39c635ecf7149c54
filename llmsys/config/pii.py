"""Sections for replacing personal data in kept documents: the tagged union `PiiConfig`."""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.section import Section

PiiKind = Literal["email", "ip", "phone"]


class NoPiiReplacement(Section):
    """Replace nothing."""

    kind: Literal["none"] = "none"


class PiiReplacementConfig(Section):
    """Replace e-mail addresses, public IP addresses (IPv4 and IPv6) and telephone numbers.

    A replacement depends on the match, the seed and, with `consistency: document`, the document id. It never depends
    on earlier replacements, so results are independent of workers and file order.
    """

    kind: Literal["replace"] = "replace"
    kinds: tuple[PiiKind, ...] = Field(
        ("email", "ip"), description="Kinds of personal data to replace; FineWeb: email and ip."
    )
    replacement: Literal["reserved", "token"] = Field(
        "reserved",
        description="reserved: an address or number reserved for documentation. token: <EMAIL>, <IP>, <PHONE>.",
    )
    consistency: Literal["match", "document"] = Field(
        "match", description="Scope in which equal matches get equal replacements."
    )
    seed: int = Field(0, ge=0, description="Seed of the replacements.")


PiiConfig = Annotated[NoPiiReplacement | PiiReplacementConfig, Field(discriminator="kind")]
