"""The plain twin of near-duplicate removal: Python integers, all pairs, no numpy; slow, and read
in a minute.
"""

from itertools import combinations

PRIME = (1 << 61) - 1
MASK = (1 << 64) - 1
MULTIPLIER = 0x9E3779B97F4A7C15


def hash_word(word: str) -> int:
    value = 0
    for character in word:
        value = (value * MULTIPLIER + ord(character) + 1) & MASK
    return value


def combine(hashes: list[int]) -> int:
    value = 0
    for part in hashes:
        value = ((value ^ value >> 32) * MULTIPLIER + part) & MASK
    value = ((value ^ value >> 32) * MULTIPLIER) & MASK
    return value ^ value >> 32


def compute_signature(words: list[str], n: int, a: list[int], b: list[int]) -> list[int] | None:
    runs = [
        combine([hash_word(word) for word in words[i : i + n]]) for i in range(len(words) - n + 1)
    ]
    if not runs:
        return None
    return [min(((run * x + y) & MASK) % PRIME for run in runs) for x, y in zip(a, b, strict=True)]


def find_linked(left: list[int] | None, right: list[int] | None, rows: int) -> bool:
    if left is None or right is None:
        return False
    return any(left[i : i + rows] == right[i : i + rows] for i in range(0, len(left), rows))


def select_kept(
    documents: list[tuple[str, str]], signatures: list[list[int] | None], rows: int
) -> set[str]:
    """Ids that stay of (id, text): per connected component the longest text, then the smallest
    id.
    """
    component = list(range(len(documents)))
    for left, right in combinations(range(len(documents)), 2):
        if find_linked(signatures[left], signatures[right], rows):
            old, new = component[left], component[right]
            component = [new if value == old else value for value in component]
    best: dict[int, tuple[int, str]] = {}
    for number, (name, text) in zip(component, documents, strict=True):
        best[number] = min(best.get(number, (1, "")), (-len(text), name))
    return {name for _, name in best.values()}
