"""Encode the chats of one file into token rows: rendered with the chat template, loss on the
answers alone.

Writes one Arrow file of token rows with marked ids (llmsys/vocabulary/chat_tokens.py), and one of
the lines left out.
"""

import hashlib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from llmsys.config.data import ChatConfig
from llmsys.data_pipeline.chats.read import ChatLine, iter_chat_lines
from llmsys.data_pipeline.core.document_schema import DROPPED_SCHEMA, hash_positions, is_heldout
from llmsys.data_pipeline.core.funnel import FunnelCounts, build_dropped_rows
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.pairs.read import LineProblem
from llmsys.data_pipeline.stages.collect import LENGTH_EDGES
from llmsys.data_pipeline.tokenize.encode_documents import build_encoded_schema, build_list_array
from llmsys.dataset.token_shards import ArrowFileWriter
from llmsys.errors import DataError
from llmsys.vocabulary.chat_template import ChatTemplate, MessageError, encode_chat
from llmsys.vocabulary.chat_tokens import count_stored_ids, join_chat_tokens
from llmsys.vocabulary.tokenizer import TextTokenizer, load_tokenizer

STAGE = "chats"
_BATCH_CHATS = 2_000


class _TokenRow(NamedTuple):
    """One chat: its line, key of its split, stored ids, UTF-8 bytes of its text, and tokens with
    a loss.
    """

    number: int
    id: str
    split_key: str
    stored: NDArray[np.int64]
    text_bytes: int
    answer_tokens: int


def encode_chats(
    report: Report,
    *,
    file: Path,
    is_heldout_file: bool | None,
    outputs: tuple[Path, Path],
    model: Path,
    eos_token: str | None,
    template: ChatTemplate,
    data: ChatConfig,
) -> dict[str, Any]:
    """Write the chats of one file as token rows. Progress is in bytes of their lines.

    Args:
        report: Progress callback.
        file: JSON lines.
        is_heldout_file: Whether its chats are held out; None where the share of the config decides.
        outputs: Files to write: token rows, and lines that are left out.
        model: The tokenizer.
        eos_token: `tokenizer.eos_token`.
        template: The chat template.
        data: Fields, limits and seeds.

    Returns:
        Funnel counts, histogram of text lengths, and `answers`: tokens with a loss by split.

    Raises:
        DataError: The file cannot be read, or the template has no prefix of an answer.
    """
    tokenizer = load_tokenizer(model, eos_token)
    controls = frozenset(tokenizer.get_control_pieces())
    schema = build_encoded_schema(count_stored_ids(tokenizer.vocab_size))
    tally, lengths = FunnelCounts(), np.zeros(len(LENGTH_EDGES) - 1, np.int64)
    answers = {"train": 0, "heldout": 0}
    lines = iter_chat_lines(file, data, controls)
    with (
        ArrowFileWriter(outputs[0], schema) as kept,
        ArrowFileWriter(outputs[1], DROPPED_SCHEMA, "zstd") as rejected,
    ):
        while batch := list(islice(lines, _BATCH_CHATS)):
            found = [
                _encode_line(line, file, tokenizer, template, data.max_tokens) for line in batch
            ]
            rows = [one for one in found if isinstance(one, _TokenRow)]
            bad = [row for line, one in zip(batch, found, strict=True) if isinstance(one,
                LineProblem)
                   for row in _build_dropped(line, one, file)]  # fmt: skip
            tally.add_drops(bad)
            tally.add_amounts(STAGE, documents_in=len(batch), documents_out=len(rows))
            size = sum(len(line.text.encode()) for line in batch)
            tally.add_amounts(STAGE, bytes_in=size, bytes_out=sum(row.text_bytes for row in rows))
            lengths += np.histogram([row.text_bytes for row in rows], LENGTH_EDGES)[0]
            if rows:
                held = is_heldout(
                    [row.split_key for row in rows], data.split.heldout_fraction, data.split.seed
                )
                held = held if is_heldout_file is None else np.full(len(rows), is_heldout_file)
                kept.write(_build_token_rows(rows, held, file, data, schema))
                learned = np.array([row.answer_tokens for row in rows])
                answers["train"] += int(learned[~held].sum())
                answers["heldout"] += int(learned[held].sum())
            if bad:
                rejected.write(pa.RecordBatch.from_pylist(bad, schema=DROPPED_SCHEMA))
            report(size, len(bad))
    return {"tally": tally.to_dict(), "lengths": lengths.tolist(), "answers": answers}


def _encode_line(
    line: ChatLine, file: Path, tokenizer: TextTokenizer, template: ChatTemplate, max_tokens: int
) -> _TokenRow | LineProblem:
    if line.problem is not None:
        return line.problem
    try:
        chat = template.render_chat(line.messages, line.tools)
    except MessageError as error:
        return LineProblem(
            "template", None, None, f"the chat template rejects the messages: {error}"
        )
    except DataError as error:
        raise DataError(f"{file}:{line.number}: {error}") from None
    ids, is_answer = encode_chat(tokenizer, chat)
    if not any(is_answer[1:]):
        return LineProblem(
            "no_answer", None, None, "the chat template renders no text of the assistant"
        )
    if len(ids) > max_tokens:
        return LineProblem(
            "tokens",
            len(ids),
            max_tokens,
            f"the chat has {len(ids)} tokens, more than {max_tokens}",
        )
    # By the text alone: equal chats are all trained on or all held out, wherever they are.
    split_key = hashlib.blake2b(line.text.encode(), digest_size=16).hexdigest()
    name = hashlib.blake2b(
        f"{file.name}\0{line.number}\0{line.text}".encode(), digest_size=16
    ).hexdigest()
    stored = join_chat_tokens(ids, is_answer, tokenizer.vocab_size)
    return _TokenRow(
        line.number, name, split_key, stored, len(chat.text.encode()), sum(is_answer[1:])
    )


def _build_dropped(line: ChatLine, problem: LineProblem, file: Path) -> list[dict[str, Any]]:
    place = {
        "url": f"{file}:{line.number}",
        "file": str(file),
        "offset": line.number,
        "text": line.text,
    }
    name = hashlib.blake2b(f"{file}\0{line.number}".encode(), digest_size=16).hexdigest()
    return build_dropped_rows([{"id": name} | place], STAGE, [problem])


def _build_token_rows(
    rows: Sequence[_TokenRow],
    held: NDArray[np.bool_],
    file: Path,
    data: ChatConfig,
    schema: pa.Schema,
) -> pa.RecordBatch:
    """Build token rows; `offset` is the line of a chat."""
    ids = [row.id for row in rows]
    dtype = schema.field("tokens").type.value_type.to_pandas_dtype()
    columns = [
        build_list_array(
            np.concatenate([row.stored for row in rows]).astype(dtype),
            np.array([len(r.stored) for r in rows]),
            schema,
        ),
        pa.array(ids),
        pa.array([str(file)] * len(rows)),
        pa.array([row.number for row in rows], pa.int64()),
        pa.array(np.zeros(len(rows), np.uint64)),
        pa.array([row.text_bytes for row in rows], pa.int64()),
        pa.array(hash_positions(ids, "shuffle", data.tokens.seed)),
        pa.array(held.astype(np.uint8)),
    ]
    return pa.record_batch(columns, schema=schema)
