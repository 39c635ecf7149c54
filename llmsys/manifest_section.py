"""Define the base class of all mappings in manifest.json."""

from pydantic import BaseModel, ConfigDict


class ManifestSection(BaseModel):
    """One mapping of the manifest: frozen, and strict about keys that this version does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")
