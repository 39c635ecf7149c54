"""Items of evaluation sets that stay in documents, as a manifest names them."""

from pydantic import BaseModel, ConfigDict


class SparedDocument(BaseModel):
    """A document that keeps a spared item."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    url: str


class SparedItem(BaseModel):
    """An item that stays in documents, because too many of them have its n-gram.

    `documents` counts those that keep it; at most five are examples, those with the smallest ids.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    item: str
    ngram: str
    documents: int
    examples: tuple[SparedDocument, ...]
