"""List the documents that a run found hardest and easiest, with the beginnings of their texts.

Reads a run's config and document_losses/, and its datasets. A text that documents/ no longer has,
or never had, is decoded from its tokens.
"""

from typing import Any

from llmsys.config.run import RunConfig
from llmsys.data_pipeline.inspection.loss_groups import find_document_texts
from llmsys.dataset.document_losses import (
    MIN_LISTED_TOKENS,
    DocumentLosses,
    load_document_losses,
    select_extremes,
)
from llmsys.errors import DataError
from llmsys.train.chat_data import get_stored_chats
from llmsys.train.run_data import RunData, open_run_data

# Characters of a text that are shown, and tokens that surely have them.
TEXT_CHARACTERS = 200
_TEXT_TOKENS = 200


def list_loss_extremes(config: RunConfig, count: int) -> dict[str, list[dict[str, Any]]]:
    """List the documents with the highest and the lowest excess loss of a run.

    Args:
        config: Config of the run.
        count: Documents of each kind.

    Returns:
        `highest` and `lowest`: source, id, document (its number in the token files), loss, excess,
        first_loss, last_loss, tokens, epochs, url and text of each.

    Raises:
        DataError: The run has no record, its data have changed since, or no document is long
            enough.
    """
    dataset = open_run_data(config, "train")
    losses = load_document_losses(config.run.folder, dataset.sources)
    highest, lowest = select_extremes(losses, count)
    if not highest:
        raise DataError(
            f"no document of {config.run.folder} has had {MIN_LISTED_TOKENS} targets so far, and "
            "fewer say little about a text. Train longer; llmsys inspect --by-loss file groups the "
            "documents."
        )
    rows = {place: _describe_document(dataset, losses, place) for place in (*highest, *lowest)}
    places = [(int(losses.sources_D[place]), row["id"]) for place, row in rows.items()]
    texts = find_document_texts(dataset.sources, places)
    for (source, name), (place, row) in zip(places, rows.items(), strict=True):
        found = texts.get((source, name), {})
        text = found.get("text") or _decode_begin(config, dataset, losses, place)
        row["url"] = found.get("url")
        row["text"] = " ".join(text.split())[:TEXT_CHARACTERS]
    return {
        "highest": [rows[place] for place in highest],
        "lowest": [rows[place] for place in lowest],
    }


def _describe_document(dataset: RunData, losses: DocumentLosses, place: int) -> dict[str, Any]:
    source = int(losses.sources_D[place])
    document = int(losses.documents_D[place])
    return {
        "source": dataset.names[source],
        "id": str(dataset.sources[source].get_lineage(document)["id"]),
        "document": document,
        "loss": float(losses.mean_losses[place]),
        "excess": float(losses.excesses[place]),
        "first_loss": float(losses.first_D[place]),
        "last_loss": float(losses.last_D[place]),
        "tokens": int(losses.tokens_D[place]),
        "epochs": int(losses.epochs_D[place]),
    }


def _decode_begin(config: RunConfig, dataset: RunData, losses: DocumentLosses, place: int) -> str:
    shards = dataset.sources[int(losses.sources_D[place])]
    stored = shards.get_tokens(int(losses.documents_D[place]))[:_TEXT_TOKENS]
    chats = get_stored_chats(config, dataset)
    ids = stored if chats is None else chats.split(stored).ids
    return dataset.tokenizer.decode(ids.tolist())


def format_loss_extremes(found: dict[str, list[dict[str, Any]]]) -> str:
    """Format the documents for the terminal.

    Args:
        found: From `list_loss_extremes`.

    Returns:
        Lines of text.
    """
    blocks = []
    for kind, title in (("highest", "highest loss"), ("lowest", "lowest loss")):
        rows = found[kind]
        if rows:
            head = f"{title} against the mean of the same steps, in nats per token:"
            blocks.append("\n".join([head, *map(_format_document, rows)]))
    return "\n\n".join(blocks)


def _format_document(row: dict[str, Any]) -> str:
    source = f"{row['source']}: " if row["source"] else ""
    epochs = (
        f", {row['first_loss']:.3f} in the first of {row['epochs']} epochs and "
        f"{row['last_loss']:.3f} in the last"
        if row["epochs"] > 1
        else ""
    )
    return (
        f"{row['excess']:+.3f}  {source}{row['id']}  {row['url'] or '(no URL)'}\n"
        f"    loss {row['loss']:.3f} over {row['tokens']:,} tokens{epochs}\n"
        f"    {row['text']}"
    )
