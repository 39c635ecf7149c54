"""Semantic duplicates by definition: every pair of a cluster is compared."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Member = tuple[int, str]  # characters and id


def find_semantic_duplicates(
    members: Sequence[Member],
    embeddings: npt.NDArray[np.float64],
    clusters: Sequence[int],
    threshold: float,
) -> dict[str, tuple[str, float]]:
    """Return the dropped documents, each with the nearest that stays and their cosine."""
    dropped: dict[str, tuple[str, float]] = {}
    order = sorted(range(len(members)), key=lambda each: (-members[each][0], members[each][1]))
    kept: list[int] = []
    for each in order:
        best = (-1, -2.0)
        for other in kept:
            if clusters[other] == clusters[each]:
                left, right = embeddings[each], embeddings[other]
                cosine = float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))
                if cosine > best[1]:
                    best = (other, cosine)
        if best[1] >= threshold:
            dropped[members[each][1]] = (members[best[0]][1], best[1])
        else:
            kept.append(each)
    return dropped
