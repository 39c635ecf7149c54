"""Inputs of a dataset of documents: a path, URL or pattern, or one of these with settings of its
own.

An entry with settings names the fields of its files, or the split and subset of a dataset of
Hugging Face's library (a folder that `save_to_disk` wrote, a downloaded repository of the hub, or
hf://datasets/OWNER/NAME).
"""

import json
from collections.abc import Iterable
from operator import not_
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from llmsys.config.cleaning import PythonReaderConfig, ReadConfig
from llmsys.config.section import Section

FIELDS = ("text_field", "url_field", "id_field", "date_field", "reader")


class InputFilesConfig(Section):
    """Files whose fields have other names, or one split of a dataset of Hugging Face's library."""

    path: str = Field(
        min_length=1, description="Path, URL, glob pattern, @FILE, or the folder of a dataset."
    )
    text_field: str | None = Field(
        None,
        min_length=1,
        description="Field with the text or the messages. Null: data.read.text_field.",
    )
    url_field: str | None = Field(
        None, description="Field with the URL. Null: data.read.url_field."
    )
    id_field: str | None = Field(None, description="Field with the id. Null: data.read.id_field.")
    date_field: str | None = Field(
        None, description="Field with the time of capture. Null: data.read.date_field."
    )
    reader: PythonReaderConfig | None = Field(
        None,
        exclude_if=not_,
        description="A reader of your own for these files. Null: data.read.reader.",
    )
    split: str = Field(
        "", description="Split of the dataset folder, such as validation. Empty: train."
    )
    subset: str = Field(
        "", description="Subset (config) of the dataset folder. Empty: its default one."
    )

    def replace_fields(self, read: ReadConfig) -> ReadConfig:
        """Apply this entry to the options of reading.

        Args:
            read: The `data.read:` section; not changed.

        Returns:
            Its copy, with the fields and the reader that this entry sets.
        """
        own = {name: value for name in FIELDS if (value := getattr(self, name)) is not None}
        return read.model_copy(update=own)


# Tags lead pydantic to one member, so that a wrong key is one problem and not two. No key has such
# a name.
_TEXT, _SECTION = "(text)", "(section)"


def _get_tag(value: object) -> str:
    return _SECTION if isinstance(value, dict | InputFilesConfig) else _TEXT


InputEntry = Annotated[
    Annotated[str, Tag(_TEXT)] | Annotated[InputFilesConfig, Tag(_SECTION)], Discriminator(_get_tag)
]


def sort_inputs(values: Iterable[Any]) -> list[Any]:
    """Return dumped inputs, each once and sorted: the order of inputs changes no dataset.

    Args:
        values: Texts, and mappings of entries with settings.

    Returns:
        Texts first.
    """
    unique = {json.dumps(value, sort_keys=True): value for value in values}
    texts = sorted(value for value in unique.values() if isinstance(value, str))
    return texts + [unique[key] for key in sorted(unique) if not isinstance(unique[key], str)]
