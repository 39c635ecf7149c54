"""Configuration of the order of documents in token files."""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.section import Section


class HashOrder(Section):
    """Each document by itself, in an order given by hashes of ids."""

    kind: Literal["hash"] = "hash"


class RepositoryOrder(Section):
    """Files of one repository next to each other, imported files before those that import them, as
    in DeepSeek-Coder (Guo et al. 2024, section 2.2); repositories in an order given by hashes.

    Each file stays a document, with its end and its lineage. A window of training sees the files
    before it where `batch.attention_scope` is window.
    """

    kind: Literal["repository"] = "repository"
    repository_field: str = Field(
        min_length=1,
        description="Column of documents/ with the repository. A document without one is ordered "
        "by itself.",
    )
    path_field: str = Field(
        min_length=1, description="Column of documents/ with the path inside of the repository."
    )


DocumentOrder = Annotated[HashOrder | RepositoryOrder, Field(discriminator="kind")]
