"""Plain twins of what takes repeated parts out: every part compared with every earlier one, no
hashes.
"""

from collections.abc import Callable, Sequence


def find_later_places(keys_of: Sequence[Sequence[str | None]]) -> list[list[int]]:
    """Per document, in the order in which copies stay, the places whose key stood before, here
    or in an earlier one.
    """
    before: list[str] = []
    found = []
    for keys in keys_of:
        places = []
        for place, key in enumerate(keys):
            if key is not None and key in before:
                places.append(place)
            if key is not None:
                before.append(key)
        found.append(places)
    return found


def cut_repeated_strings(texts: Sequence[str], length: int) -> list[str]:
    """Texts, in the order in which copies stay, without the characters of later occurrences of
    repeated strings.

    A suffix array by definition: all suffixes of all texts in order; neighbours that share `length`
    characters or more are occurrences of one string, and of such a run all but the first place are
    later ones.
    """
    suffixes = sorted(
        (text[start:], number, start)
        for number, text in enumerate(texts)
        for start in range(len(text))
    )
    covered = [[False] * len(text) for text in texts]
    run: list[tuple[int, int]] = []
    head = ""
    for suffix, number, start in [*suffixes, ("", -1, -1)]:
        if run and (len(suffix) < length or suffix[:length] != head):
            for later, begin in sorted(run)[1:]:
                for place in range(begin, begin + length):
                    covered[later][place] = True
            run = []
        if len(suffix) >= length:
            head = suffix[:length]
            run.append((number, start))
    return ["\n".join(_kept(text, flags)) for text, flags in zip(texts, covered, strict=True)]


def _kept(text: str, flags: Sequence[bool]) -> list[str]:
    marked = "".join(
        "\0" if flag else character for character, flag in zip(text, flags, strict=True)
    )
    return [part.strip() for part in marked.split("\0") if part.strip()]


def find_sentence_spans(text: str, nlp: Callable[[str], object]) -> list[tuple[int, int]]:
    """Sentences by spaCy's own sentencizer."""
    return [(sentence.start_char, sentence.end_char) for sentence in nlp(text).sents]  # type: ignore[attr-defined]
