"""N-gram language models in ARPA's text form: log10 probability of a line, with back-off (Katz 1987).

Reads .arpa or .arpa.gz into dictionaries, about 150 bytes an n-gram; for large models take KenLM, whose scores these
are to float32's precision. A word that the model does not know is <unk>, and costs 100 when there is no <unk> either.
"""

import gzip
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from llmsys.errors import DataError

_UNKNOWN, _BEGIN, _END = "<unk>", "<s>", "</s>"
_NO_UNKNOWN = -100.0


class ArpaModel:
    """Probabilities and back-off weights by n-gram, words joined by one space."""

    def __init__(self, path: Path) -> None:
        """Read a model; DataError names the line that is not ARPA's."""
        self._probability: dict[str, float] = {}
        self._backoff: dict[str, float] = {}
        self.order = 0
        try:
            with (
                gzip.open(path, "rt", encoding="utf-8")
                if path.suffix == ".gz"
                else open(path, encoding="utf-8") as file
            ):
                self._read_ngrams(path, enumerate(file, 1))
        except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path} cannot be read as an ARPA model: {error}. Name a whole .arpa or .arpa.gz."
            ) from None
        if not self.order:
            raise DataError(f"{path} holds no n-gram. Name a whole .arpa or .arpa.gz file.")

    def _read_ngrams(self, path: Path, lines: Iterator[tuple[int, str]]) -> None:
        for number, line in lines:
            text = line.strip()
            if text.endswith("-grams:") and text.startswith("\\"):
                self.order = int(text[1:].removesuffix("-grams:"))
            elif self.order and text and not text.startswith("\\"):
                fields = text.split("\t") if "\t" in text else _split_fields(text, self.order)
                try:
                    probability, words = float(fields[0]), fields[1]
                    if words.count(" ") + 1 != self.order:
                        raise ValueError
                    self._probability[words] = probability
                    if len(fields) > 2 and float(fields[2]):
                        self._backoff[words] = float(fields[2])
                except (ValueError, IndexError):
                    raise DataError(
                        f"{path}, line {number}: {text[:80]!r} is not a probability and {self.order} words, parted by "
                        f"tabs. Name a whole .arpa or .arpa.gz file."
                    ) from None

    def score_line(self, line: str) -> float:
        """Return log10 of the probability of the words of a line and of its end, after its beginning."""
        known = self._probability
        words = [word if word in known else _UNKNOWN for word in line.split()]
        context: list[str] = [_BEGIN]
        total = 0.0
        for word in [*words, _END]:
            total += self._score_word(context, word)
            context = [*context, word][-(self.order - 1) :] if self.order > 1 else []
        return total

    def _score_word(self, context: list[str], word: str) -> float:
        """The longest n-gram that the model has, and the back-off of each longer context."""
        penalty = 0.0
        for start in range(len(context) + 1):
            history = " ".join(islice(context, start, None))
            found = self._probability.get(f"{history} {word}" if history else word)
            if found is not None:
                return penalty + found
            penalty += self._backoff.get(history, 0.0) if history else 0.0
        return penalty + _NO_UNKNOWN


def _split_fields(text: str, order: int) -> list[str]:
    """The fields of a line that has spaces where tabs belong."""
    parts = text.split()
    return [parts[0], " ".join(parts[1 : order + 1]), *parts[order + 1 :]]
