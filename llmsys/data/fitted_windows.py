"""Windows that hold whole documents where they fit: best-fit and first-fit packing
(document_packing.py).

Reads token files with page tables. Memory and time per window do not grow with the corpus.

An epoch rotates the stream of all documents by its own number of tokens and divides it into
buffers of about BUFFER_TOKENS. The documents that begin in a buffer are packed into its windows:
equally many in every buffer, with a share SPARE of room. Documents longer than a window are split
into full windows and a rest. Buffers are permuted, and the windows inside of each.

Invariants:
- Window w of epoch e is a function of (data fingerprint, seed, e, w) alone, and has an inverse.
- Every document begins in one buffer of an epoch. What does not fit its windows is cropped; the
  rest of the room is padding, without targets.
- A document begins with the end-of-sequence token before it, and so does the rest of a long
  document unless it is the first in its window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmsys.data.document_packing import Packing, pack_documents
from llmsys.data.fill_in_middle import MARKS, MiddleFiller
from llmsys.data.packed_windows import PADDING, WindowBatch, build_size_error
from llmsys.data.shuffle import KeyedPermutation, derive_order_key
from llmsys.data.target_documents import RowDocuments
from llmsys.dataset.paged_token_shards import PagedTokenShards

# Least tokens of a buffer: many documents to choose from, and about 35 MB of Python's numbers for
# short ones.
BUFFER_TOKENS = 1 << 22
MIN_BUFFER_WINDOWS = 64
# One token of room for this many tokens of documents.
SPARE = 256
# Buffers that are packed for the statistics of the log.
MEASURED_BUFFERS = 2


@dataclass(frozen=True)
class PackedBuffer:
    """The windows of one buffer: window w has the spans edges[w] to edges[w + 1].

    Attributes:
        edges: First span of each window, (windows + 1,).
        begins: First token of each span's document in the stream.
        offsets: First token of each span in its document, as it is trained on.
        sizes: Tokens of each span.
        documents: Number of the document of each span.
        tokens: Tokens of the documents before cropping.
    """

    edges: NDArray[np.int64]
    begins: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    documents: NDArray[np.int64]
    tokens: int


class FittedWindows:
    """Every epoch of a dataset as windows of whole documents, where they fit (order 2 of the
    manifest).

    Args:
        shards: The split.
        length: Positions to predict; a window has one token more.
        seed: Seed of the run.
        packing: How documents are placed into windows.
        middle: Rearranges documents before they are packed. None: they stay as they are.
    """

    def __init__(
        self,
        shards: PagedTokenShards,
        *,
        length: int,
        seed: int,
        packing: Packing,
        middle: MiddleFiller | None = None,
    ) -> None:
        self.stream = shards.stream
        self.length = length
        self.seed = seed
        self.packing = packing
        self.middle = middle
        self.fingerprint = shards.fingerprint
        """Fingerprint of the dataset."""
        self.tokens = self.stream.num_tokens
        if self.tokens <= length:
            raise build_size_error(self.tokens, length)
        self.num_buffers = max(1, self.tokens // max(BUFFER_TOKENS, MIN_BUFFER_WINDOWS * length))
        expected = self.tokens
        if middle is not None:
            expected += round(MARKS * middle.config.rate * self.stream.num_documents)
        room = -(-expected // self.num_buffers) * (SPARE + 1)
        self.windows_per_buffer = -(-room // (SPARE * length))
        self.windows_per_epoch = self.num_buffers * self.windows_per_buffer
        self._get_epoch = lru_cache(maxsize=16)(self._derive_epoch)
        # A step may lie in two buffers, and the batches of the next one are read ahead.
        self._get_buffer = lru_cache(maxsize=4)(self._pack_buffer)

    def _derive_epoch(self, epoch: int) -> tuple[KeyedPermutation, int]:
        """Return the order of the buffers, and the first token of buffer 0 in the stream."""
        identity = self.fingerprint, self.seed, epoch
        order = KeyedPermutation(self.num_buffers, derive_order_key("packed buffers", *identity))
        return order, derive_order_key("packed shift", *identity) % self.tokens

    def _pack_buffer(self, epoch: int, buffer: int) -> PackedBuffer:
        first, begins, lengths = self._find_documents(epoch, buffer)
        if self.middle is not None:
            lengths = lengths + MARKS * self._select_rearranged(self.middle, first, lengths)
        counts = -(-lengths // self.length)
        spans = np.repeat(np.arange(len(lengths)), counts)
        within = np.arange(len(spans)) - np.repeat(np.cumsum(counts) - counts, counts)
        sizes = np.minimum(lengths[spans] - within * self.length, self.length)
        placed = pack_documents(sizes, self.length, self.windows_per_buffer, self.packing)
        # In the order of the stream within a window, but a cropped document last: the next one
        # begins with the token before it, which has to be an end of sequence. Documents without a
        # window come first, and are left out.
        order = np.lexsort((placed.kept < sizes, placed.windows))[int((placed.windows < 0).sum()) :]
        edges = np.searchsorted(placed.windows[order], np.arange(self.windows_per_buffer + 1))
        documents = spans[order]
        offsets = (within * self.length)[order]
        return PackedBuffer(
            edges,
            begins[documents],
            offsets,
            placed.kept[order],
            first[documents],
            int(lengths.sum()),
        )

    def _find_documents(
        self, epoch: int, buffer: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return number, first token and length of the documents that begin in a buffer."""
        shift = self._get_epoch(epoch)[1]
        low, high = (edge * self.tokens // self.num_buffers for edge in (buffer, buffer + 1))
        begin = (low + shift) % self.tokens
        end = begin + high - low
        ranges = [(begin, min(end, self.tokens)), (0, max(0, end - self.tokens))]
        numbers = []
        begins = []
        lengths = []
        for left, right in ranges:
            if left == right:
                continue
            first, ends = self.stream.find_document_ends(left, right)
            starts = np.concatenate([[self.stream.get_document_span(first)[0]], ends[:-1]])
            here = starts >= left
            numbers.append((first + np.arange(len(ends)))[here])
            begins.append(starts[here])
            lengths.append((ends - starts)[here])
        return np.concatenate(numbers), np.concatenate(begins), np.concatenate(lengths)

    def _locate_window(self, number: int) -> tuple[PackedBuffer, int]:
        """Return the buffer of a sequence of the run, and its window there."""
        epoch, place = divmod(number, self.windows_per_epoch)
        at, window = divmod(place, self.windows_per_buffer)
        buffer = int(self._get_epoch(epoch)[0].get_values(np.array([at]))[0])
        order = self._order_windows(epoch, buffer)
        return self._get_buffer(epoch, buffer), int(order.get_values(np.array([window]))[0])

    def _order_windows(self, epoch: int, buffer: int) -> KeyedPermutation:
        key = derive_order_key("packed windows", self.fingerprint, self.seed, epoch, buffer)
        return KeyedPermutation(self.windows_per_buffer, key)

    def _get_spans(self, number: int) -> tuple[PackedBuffer, slice]:
        buffer, window = self._locate_window(number)
        return buffer, slice(int(buffer.edges[window]), int(buffer.edges[window + 1]))

    def get_rows(self, numbers: Sequence[int] | NDArray[np.int64]) -> WindowBatch:
        """Implement `WindowDataset.get_rows`. Padding repeats the last token, and has the
        document PADDING.
        """
        numbers = np.asarray(numbers, np.int64)
        tokens = np.zeros((len(numbers), self.length + 1), np.int64)
        documents = np.full((len(numbers), self.length + 1), PADDING, np.int64)
        for row, number in enumerate(numbers.tolist()):
            buffer, spans = self._get_spans(number)
            at = 0
            for span, place in enumerate(range(spans.start, spans.stop)):
                size = int(buffer.sizes[place])
                if at == 0:
                    tokens[row, 0] = self._read_token_before(buffer, place)
                tokens[row, at + 1 : at + size + 1] = self._read_span(buffer, place)
                # A token is an input for the one after it, hence of the document of that one.
                documents[row, at : at + size] = span
                at += size
            tokens[row, at + 1 :] = tokens[row, at]
        return WindowBatch(tokens, documents)

    def _read_span(self, buffer: PackedBuffer, span: int) -> NDArray[Any]:
        begin = int(buffer.begins[span])
        offset = int(buffer.offsets[span])
        size = int(buffer.sizes[span])
        if (filled := self._order_document(buffer, span)) is not None:
            return filled[:size]
        return self.stream.read_range(begin + offset, begin + offset + size)

    def _read_token_before(self, buffer: PackedBuffer, span: int) -> int:
        offset = int(buffer.offsets[span])
        before = (int(buffer.begins[span]) + offset - 1) % self.tokens
        return int(self.stream.read_range(before, before + 1)[0])

    def _order_document(self, buffer: PackedBuffer, span: int) -> NDArray[np.int64] | None:
        """Return the document of a span with its middle last; None where it stays as it is."""
        if self.middle is None:
            return None
        document = int(buffer.documents[span])
        begin, end = self.stream.get_document_span(document)
        if not self._select_rearranged(self.middle, np.array([document]), np.array([end - begin]))[
            0
        ]:
            return None
        return self.middle.order_parts(self.stream.read_range(begin, end), document)

    def _select_rearranged(
        self, middle: MiddleFiller, documents: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return which documents have their middle last. Longer ones would be cut between their
        marks.
        """
        selected: NDArray[np.bool_] = middle.select_documents(documents) & (
            lengths + MARKS <= self.length
        )
        return selected

    def compute_attention_cost(
        self, numbers: Sequence[int] | NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Implement `WindowDataset.compute_attention_cost`."""
        located = (self._get_spans(number) for number in np.asarray(numbers, np.int64).tolist())
        return np.array(
            [buffer.sizes[spans] @ buffer.sizes[spans] for buffer, spans in located], np.int64
        )

    def list_documents(self, number: int) -> list[tuple[int, int]]:
        """List (0, document) of every document with tokens in the window: there is one source."""
        buffer, spans = self._get_spans(number)
        return [(0, document) for document in dict.fromkeys(buffer.documents[spans].tolist())]

    def identify_documents(
        self, numbers: NDArray[np.int64], documents: NDArray[np.int64]
    ) -> RowDocuments:
        """Implement `WindowDataset.identify_documents`."""
        found = np.full_like(documents, PADDING)
        for row, number in enumerate(numbers.tolist()):
            buffer, spans = self._get_spans(number)
            real = documents[row] != PADDING
            # In a window its spans are numbered from 0.
            found[row, real] = buffer.documents[spans][documents[row, real]]
        epochs = numbers // self.windows_per_epoch
        return RowDocuments(np.zeros(len(numbers), np.int64), epochs, found)

    def list_windows_with_document(self, document: int, count: int) -> NDArray[np.int64]:
        """List the sequences among the first `count` of a run that have tokens of a document, in
        order.
        """
        begin, _ = self.stream.get_document_span(document)
        found = [np.empty(0, np.int64)]
        for epoch in range(-(-count // self.windows_per_epoch)):
            order, shift = self._get_epoch(epoch)
            place = (begin - shift) % self.tokens
            number = ((place + 1) * self.num_buffers - 1) // self.tokens
            buffer = self._get_buffer(epoch, number)
            spans = np.flatnonzero(buffer.documents == document)
            windows = np.unique(np.searchsorted(buffer.edges, spans, side="right") - 1)
            first = (
                epoch * self.windows_per_epoch
                + int(order.find_places(np.array([number]))[0]) * self.windows_per_buffer
            )
            found.append(np.sort(self._order_windows(epoch, number).find_places(windows)) + first)
        numbers = np.concatenate(found)
        return numbers[numbers < count]

    def get_packing_stats(self) -> dict[str, Any]:
        """Return padding and cropped tokens of an epoch, extrapolated from the first buffers of
        the run.
        """
        measured = min(MEASURED_BUFFERS, self.num_buffers)
        order, _ = self._get_epoch(0)
        buffers = [
            self._get_buffer(0, int(number)) for number in order.get_values(np.arange(measured))
        ]
        kept = sum(int(one.sizes.sum()) for one in buffers)
        given = sum(one.tokens for one in buffers)
        trained = round(kept * self.num_buffers / measured)
        return {
            "packing": self.packing,
            "tokens_per_epoch": trained,
            "sequences_per_epoch": self.windows_per_epoch,
            "padding_tokens_per_epoch": self.windows_per_epoch * self.length - trained,
            "lost_tokens_per_epoch": round((given - kept) * self.num_buffers / measured),
            "measured_sequences": measured * self.windows_per_buffer,
        }

    def get_progress(self, count: int) -> dict[str, Any]:
        """Implement `WindowDataset.get_progress`."""
        return {"epochs": round(count / self.windows_per_epoch, 4)}
