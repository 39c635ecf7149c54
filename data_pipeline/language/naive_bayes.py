"""Score py3langid's naive Bayes model for a whole batch of texts at once.

The model counts byte n-grams with an automaton and adds, per language, log(1 + count) times a
weight (Lui and Baldwin 2012). The state of the automaton depends on the last few bytes alone (Aho
and Corasick 1975), so texts are cut into short segments that are scanned in parallel, each from a
few bytes before its beginning. The compiled core does the same, several times as fast.

Reads and writes `naive_bayes-VERSION-FORMAT/` in the cache folder: the model as arrays, which
processes map and share. The library's own file takes 0.6 s to unpack and 100 MB in every process.

Invariants:
- Codes and probabilities are those of the library.
- Sums are taken in a fixed order, so that they depend neither on the number of cores nor on the
  compiled core.
"""

import json
import os
import shutil
import tempfile
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from importlib import metadata
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmsys.data_pipeline.core.native import NativeCore, load_core
from llmsys.data_pipeline.language.compiled_naive_bayes import VECTOR, CompiledSums
from llmsys.storage.paths import get_cache_folder

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# D documents, L labels of the model, F features (byte n-grams), T steps, S segments scanned in
# parallel.
_SLICE_BYTES = 1 << 21  # bytes of text scanned together; the tables take about eight times as much
_SLICE_TEXTS = 1 << 12
_SHORTEST_SEGMENT = 16
_LONGEST_SEGMENT = 256
_SUMMED_ROWS = 512  # rows of weights multiplied at once, 290 kB


@dataclass(frozen=True)
class NaiveBayesModel:
    """The automaton and the weights.

    Attributes:
        moves: next state, at row base + byte.
        row_base: start of each state's row in `moves`.
        feature: index of the n-gram that ends in a state, -1 for none.
        weights_FL: float32, without the mean of each row, on which no probability depends and which
            costs precision.
        halves_FP: the weights with their mean as the library has them, the bits of float16 as
            uint16, the most frequent n-grams first and P a multiple of `VECTOR`, for the core;
            without rows where the library has other numbers.
        means_F: float32, the means.
        places_F: int32, row of each n-gram in `halves_FP`.
        prior_L: log prior.
        labels: code of each column; columns of equal codes are added.
        num_context_bytes: number of preceding bytes that decide the state.
    """

    moves: npt.NDArray[np.uint32]
    row_base: Integers
    feature: npt.NDArray[np.int32]
    weights_FL: npt.NDArray[np.float32]
    halves_FP: npt.NDArray[np.uint16]
    means_F: npt.NDArray[np.float32]
    places_F: npt.NDArray[np.int32]
    prior_L: Floats
    labels: tuple[str, ...]
    num_context_bytes: int

    def predict_languages(self, texts: Sequence[str]) -> tuple[list[str], Floats]:
        """Return the most probable code of each text, and its probability.

        Equal to py3langid's `predict_languages` with `norm_probs`. A text without features has no
        language above 1 / L.
        """
        codes: list[str] = []
        parts: list[Floats] = [np.zeros(0)]
        for encoded in _iter_encoded_slices(texts):
            probabilities_DL = self._compute_label_probabilities(encoded)
            best_D = probabilities_DL.argmax(axis=1)
            codes += [self.labels[column] for column in best_D.tolist()]
            parts.append(probabilities_DL[np.arange(len(best_D)), best_D])
        return codes, np.concatenate(parts)

    def compute_probability(self, texts: Sequence[str], codes: Collection[str]) -> Floats:
        """Return the probability that each text is in one of these languages."""
        chosen = np.array([label in codes for label in self.labels])
        parts = [
            self._compute_label_probabilities(encoded)[:, chosen].sum(axis=1)
            for encoded in _iter_encoded_slices(texts)
        ]
        return np.concatenate([np.zeros(0), *parts])

    @cached_property
    def compiled_sums(self) -> CompiledSums | None:
        """The tables of the compiled core; None where there is no core, or where it does not know
        these weights.
        """
        core = load_core()
        if not isinstance(core, NativeCore) or not len(self.halves_FP):
            return None
        return CompiledSums(
            core,
            self.moves,
            self.row_base,
            self.feature,
            self.halves_FP,
            self.means_F,
            self.places_F,
            len(self.labels),
            self.num_context_bytes,
        )

    def _compute_label_probabilities(self, encoded: Sequence[bytes]) -> Floats:
        lengths_D = np.fromiter(map(len, encoded), np.int64, len(encoded))
        if self.compiled_sums is None:
            counts = _count_features(self, encoded, lengths_D)
            scores_DL = self._compute_log_posteriors(counts, len(encoded))
        else:
            sums_DL, found_D = self.compiled_sums.sum_weights(
                encoded, _compute_count_weights(int(lengths_D.max(initial=0)))
            )
            scores_DL = self._add_priors(sums_DL, found_D)
        # Dividing by the root of the length in bytes makes the probabilities of short and long
        # texts comparable.
        scores_DL /= np.sqrt(np.maximum(lengths_D, 1))[:, None]
        np.exp(scores_DL - scores_DL.max(axis=1, keepdims=True), out=scores_DL)
        scores_DL /= scores_DL.sum(axis=1, keepdims=True)
        for column, label in enumerate(self.labels):
            first = self.labels.index(label)
            # Several columns may have one code: their sum is in the first.
            if first < column:
                scores_DL[:, first] += scores_DL[:, column]
                scores_DL[:, column] = 0
        return scores_DL

    def _compute_log_posteriors(
        self,
        counts: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], Integers],
        num_documents: int,
    ) -> Floats:
        """Return the log posteriors (D, L), all 0 for a document without features."""
        document, feature, count = counts
        starts = np.searchsorted(document, np.arange(num_documents + 1))
        weights = _compute_count_weights(int(count.max(initial=0)))[count]
        sums_DL = np.zeros((num_documents, self.weights_FL.shape[1]), np.float32)
        for number, sum_L in enumerate(sums_DL):
            for start in range(starts[number], starts[number + 1], _SUMMED_ROWS):
                rows = slice(start, min(start + _SUMMED_ROWS, starts[number + 1]))
                products_FL = self.weights_FL[feature[rows]]
                products_FL *= weights[rows, None]
                # Along the first axis numpy adds row after row, as a sparse product does.
                products_FL[0] += sum_L
                np.add.reduce(products_FL, axis=0, out=sum_L)
        return self._add_priors(sums_DL, np.diff(starts))

    def _add_priors(self, sums_DL: npt.NDArray[np.float32], found_D: Integers) -> Floats:
        """Return the log posteriors of texts with these sums and numbers of features."""
        scores_DL = sums_DL.astype(np.float64)
        scores_DL[found_D > 0] += self.prior_L
        return scores_DL


def _compute_count_weights(highest: int) -> npt.NDArray[np.float32]:
    """Return the weights of the counts of a feature, from 0 to at least the highest."""
    return _compute_weights_below(1 << max(12, highest.bit_length()))


@cache
def _compute_weights_below(limit: int) -> npt.NDArray[np.float32]:
    return np.log1p(np.arange(limit)).astype(np.float32)


# A field of the model is a file of the cache, except what is in this one.
_DESCRIPTION = "model.json"
_ARRAYS = (
    "moves",
    "row_base",
    "feature",
    "weights_FL",
    "halves_FP",
    "means_F",
    "places_F",
    "prior_L",
)
_FORMAT = 2  # of the cached arrays


@lru_cache(maxsize=1)
def load_naive_bayes_model() -> NaiveBayesModel:
    """Load py3langid's model, once per process: mapped from the cache folder, else from the
    package.

    Returns:
        The model. Its arrays are read-only where they are mapped.
    """
    folder = get_cache_folder() / f"naive_bayes-{metadata.version('py3langid')}-{_FORMAT}"
    # Without a disk to write to, or with a damaged file, each process unpacks the model for itself.
    with suppress(OSError, ValueError, EOFError, KeyError):
        if not folder.is_dir():
            _write_model(_unpack_model(), folder)
        return _map_model(folder)
    return _unpack_model()


def _map_model(folder: Path) -> NaiveBayesModel:
    """Map the arrays of a folder; OSError, ValueError, EOFError or KeyError where one is missing or
    damaged.
    """
    described = json.loads((folder / _DESCRIPTION).read_bytes())
    arrays = {name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in _ARRAYS}
    return NaiveBayesModel(
        **arrays,
        labels=tuple(described["labels"]),
        num_context_bytes=described["num_context_bytes"],
    )


def _write_model(model: NaiveBayesModel, folder: Path) -> None:
    """Write the arrays into a new folder, which appears when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        for name in _ARRAYS:
            np.save(made / f"{name}.npy", getattr(model, name))
        described = {"labels": model.labels, "num_context_bytes": model.num_context_bytes}
        (made / _DESCRIPTION).write_text(json.dumps(described), encoding="utf-8")
        # Another process may have written the same folder meanwhile.
        with suppress(OSError):
            os.rename(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _unpack_model() -> NaiveBayesModel:
    """Read the model from the library's file; about 140 MB."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    library = LanguageIdentifier.from_model_file(MODEL_FILE)
    stored_FL = np.asarray(library.nb_ptc)
    weights_FL = stored_FL.astype(np.float32)
    means_F = weights_FL.mean(axis=1)
    weights_FL -= means_F[:, None]
    # the mean of the logarithms is higher for an n-gram that is frequent in many languages
    order_F = np.argsort(-means_F, kind="stable")
    places_F = np.empty(len(order_F), np.int32)
    places_F[order_F] = np.arange(len(order_F))
    moves = _as_numpy(library.tk_nextmove).astype(np.uint32, copy=False)
    row_base = _as_numpy(library.tk_row).astype(np.int64) << 8
    return NaiveBayesModel(
        moves=moves,
        row_base=row_base,
        feature=np.asarray(library.tk_output, np.int32),
        weights_FL=weights_FL,
        halves_FP=_pad_halves(stored_FL[order_F]),
        means_F=means_F,
        places_F=places_F,
        prior_L=np.asarray(library.nb_pc).astype(np.float64),
        labels=tuple(library.nb_classes),
        num_context_bytes=_count_context_bytes(moves.reshape(-1, 256), row_base >> 8),
    )


def _pad_halves(stored_FL: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Return the bits of float16 weights in rows of a multiple of `VECTOR`; no rows for weights of
    another kind, or numbers that the core does not widen.
    """
    num_features, num_labels = stored_FL.shape
    smallest = np.finfo(np.float16).smallest_normal
    if (
        stored_FL.dtype != np.float16
        or not np.isfinite(stored_FL).all()
        or (np.abs(stored_FL) < smallest).any()
    ):
        num_features = 0
    halves_FP = np.ones((num_features, -(-num_labels // VECTOR) * VECTOR), np.float16)
    halves_FP[:, :num_labels] = stored_FL[:num_features]
    return halves_FP.view(np.uint16)


def _count_context_bytes(rows: npt.NDArray[np.uint32], row_of: Integers) -> int:
    """Return the length of the longest path from the first state to any other.

    Args:
        rows: The distinct rows of moves, uint32 (R, 256).
        row_of: Row of each state.
    """
    seen = np.zeros(len(row_of), np.bool_)
    read = np.zeros(len(rows), np.bool_)
    states = np.zeros(1, np.int64)
    steps = -1
    while len(states):
        seen[states] = True
        steps += 1
        # Masks instead of sorted sets, and each shared row once.
        new = np.zeros_like(read)
        following = np.zeros_like(seen)
        new[row_of[states]] = True
        following[rows[new & ~read]] = True
        read |= new
        states = np.flatnonzero(following & ~seen)
    return steps


def _as_numpy(values: Any) -> npt.NDArray[Any]:
    """View a standard library array as numpy's, without a copy."""
    return np.frombuffer(values, np.dtype(values.typecode))


def _iter_encoded_slices(texts: Sequence[str]) -> Iterator[list[bytes]]:
    """Yield slices of bounded size of the texts as bytes, encoded as the library encodes them."""
    piece: list[bytes] = []
    size = 0
    for text in texts:
        normal = unicodedata.normalize("NFC", text.lower() if text.isupper() else text)
        encoded = normal.encode("utf-8", "surrogatepass")
        if piece and (size + len(encoded) > _SLICE_BYTES or len(piece) == _SLICE_TEXTS):
            yield piece
            piece = []
            size = 0
        piece.append(encoded)
        size += len(encoded)
    if piece:
        yield piece


def _count_features(
    model: NaiveBayesModel, encoded: Sequence[bytes], lengths_D: Integers
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], Integers]:
    """Return document, feature and count of every feature that occurs, sorted by document and
    feature.
    """
    # About as many segments as steps: each step is one call for all segments.
    segment = min(_LONGEST_SEGMENT, max(_SHORTEST_SEGMENT, isqrt(int(lengths_D.sum()))))
    segments_D = -(-lengths_D // segment)
    document_S = np.repeat(np.arange(len(encoded), dtype=np.int32), segments_D)
    number_S = np.arange(len(document_S)) - np.repeat(
        np.cumsum(segments_D) - segments_D, segments_D
    )
    starts_S = np.repeat(np.cumsum(lengths_D) - lengths_D, segments_D) + number_S * segment
    lengths_S = np.minimum(lengths_D[document_S] - number_S * segment, segment)

    features_TS = model.feature[
        _compute_states(model, b"".join(encoded), starts_S, number_S == 0, segment)
    ]
    # The last segment of a text is shorter: what it read after its end belongs to the next.
    features_TS[np.arange(segment)[:, None] >= lengths_S] = -1
    step, lane = np.nonzero(features_TS >= 0)
    shift = len(model.weights_FL).bit_length()
    # 32 bits hold both, and sort faster than 64
    keys = (document_S[lane] << shift) | features_TS[step, lane]
    keys.sort()
    new = np.flatnonzero(np.diff(keys, prepend=np.int32(-1)))
    distinct = keys[new]
    count = np.diff(new, append=len(keys))
    return distinct >> shift, distinct & ((1 << shift) - 1), count


def _compute_states(
    model: NaiveBayesModel,
    joined: bytes,
    starts_S: Integers,
    is_first_S: npt.NDArray[np.bool_],
    segment: int,
) -> npt.NDArray[np.uint32]:
    """Return the automaton's states (T, S) after each byte of each segment; undefined after a
    segment's end.
    """
    reach = model.num_context_bytes
    # Padded, so that the first segment has a context and the last one can be read to its end.
    letters = np.frombuffer(bytes(reach) + joined + bytes(segment), np.uint8)
    states_TS = np.empty((segment, len(starts_S)), np.uint32)
    state_S = np.zeros(len(starts_S), np.uint32)
    for step in range(reach + segment):
        if step == reach:
            state_S[is_first_S] = 0  # the context bytes belong to the text before
        state_S = model.moves[model.row_base[state_S] + letters[starts_S + step]]
        if step >= reach:
            states_TS[step - reach] = state_S
    return states_TS
