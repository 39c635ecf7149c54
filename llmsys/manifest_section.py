"""Base class of the mappings in manifest.json, and the sections about evaluation items found in documents."""

from pydantic import BaseModel, ConfigDict


class ManifestSection(BaseModel):
    """One mapping of the manifest: frozen, and strict about keys that this version does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SparedDocument(ManifestSection):
    """A document that keeps a spared item."""

    id: str
    url: str


class SparedItem(ManifestSection):
    """An item that stays in documents, because too many of them have its n-gram.

    `documents` counts those that keep it; at most five are examples, those with the smallest ids.
    """

    item: str
    ngram: str
    documents: int
    examples: tuple[SparedDocument, ...]


class ContaminatedDocument(ManifestSection):
    """A document that contains an item of an evaluation set, with the first n-gram they share."""

    item: str
    part: str
    ngram: str
    matches: int
    action: str
    url: str
    excerpt: str


class SetContamination(ManifestSection):
    """The matches of one evaluation set, with up to five examples: the smallest document ids.

    `too_short` counts parts with too few words to search for. `spared` lists the hundred items with the most documents.
    """

    items: int
    ngrams: int
    too_short: int
    items_found: int
    documents_dropped: int
    documents_cut: int
    examples: tuple[ContaminatedDocument, ...]
    items_spared: int = 0
    spared: tuple[SparedItem, ...] = ()


class DecontaminationSummary(ManifestSection):
    """The matches of evaluation sets by name; decontamination/ has a line for each document and item.

    `exempt_ngrams` were found in more documents than the config allows for an n-gram that decides.
    """

    sets: dict[str, SetContamination]
    exempt_ngrams: int
