"""Beam search: find a likely text with a fixed number of candidate sequences per row.

A text's score is its log-probability divided by ((5 + length) / 6)^length_penalty (Wu 2016,
arXiv:1609.08144, 7), so that short texts have no advantage. The search over one row ends when no
unfinished sequence can exceed the best finished one: its log-probability only falls, and the
divisor is largest at the limit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# B rows of the batch, K beams, R = B * K rows of the cache, V vocabulary

# (rows_R, tokens_R) → logits_RV: append each token to its row of the cache, return the next logits.
# Rows may repeat.
Step = Callable[[Tensor, Tensor], Tensor]


@dataclass
class BeamState:
    """The search over one row: unfinished sequences with their log-probabilities, and the best
    finished text so far.
    """

    limit: int
    sequences: list[list[int]] = field(default_factory=lambda: [[]])
    scores: list[float] = field(default_factory=lambda: [0.0])
    best: list[int] = field(default_factory=list)
    best_score: float = -math.inf

    def add_finished(self, text: list[int], log_probability: float, length_penalty: float) -> None:
        """Keep this text if it is the best finished one. The end token counts into its length."""
        score = log_probability / compute_length_penalty(len(text) + 1, length_penalty)
        if score > self.best_score:
            self.best = text
            self.best_score = score

    def is_over(self, length_penalty: float) -> bool:
        """Return whether no unfinished sequence can exceed the best finished text."""
        if not self.sequences:
            return True
        return self.best_score >= max(self.scores) / compute_length_penalty(
            self.limit + 1, length_penalty
        )


def compute_length_penalty(length: int, length_penalty: float) -> float:
    """Compute the divisor of the log-probability of a hypothesis (Wu 2016, arXiv:1609.08144, eq.
    14).

    Args:
        length: Its tokens.
        length_penalty: The exponent; 0 gives 1.

    Returns:
        The divisor.
    """
    return float(((5 + length) / 6) ** length_penalty)


def search_beams(
    first_BV: Tensor,
    step: Step,
    *,
    num_beams: int,
    length_penalty: float,
    limits: Sequence[int],
    end_token: int,
) -> list[list[int]]:
    """Return the best text found for each of B rows, without its end token.

    Args:
        first_BV: logits after the prompts, whose rows the cache holds.
        step: continues rows of the cache.
        num_beams: unfinished sequences per row.
        length_penalty: exponent of the length in the score.
        limits: maximum tokens of each row's text.
        end_token: id that ends a text.
    """
    searches = [BeamState(limit) for limit in limits]
    alive = list(range(len(searches)))
    logits_RV = first_BV
    while alive:
        rows, tokens = _expand_beams(
            [searches[b] for b in alive], logits_RV, num_beams, length_penalty, end_token
        )
        alive = [b for b in alive if searches[b].sequences]
        if alive:
            logits_RV = step(torch.tensor(rows), torch.tensor(tokens))
    return [search.best for search in searches]


def _expand_beams(
    searches: list[BeamState],
    logits_RV: Tensor,
    num_beams: int,
    length_penalty: float,
    end_token: int,
) -> tuple[list[int], list[int]]:
    """Append one token to every sequence of every search; return cache rows and tokens of those
    that continue.
    """
    log_RV = logits_RV.detach().float().log_softmax(dim=-1).cpu()
    rows: list[int] = []
    tokens: list[int] = []
    first = 0
    for search in searches:
        count = len(search.sequences)
        beams, chosen = _advance_beam(
            search, log_RV[first : first + count], num_beams, length_penalty, end_token
        )
        rows += [first + beam for beam in beams]
        tokens += chosen
        first += count
    return rows, tokens


def _advance_beam(
    search: BeamState, log_KV: Tensor, num_beams: int, length_penalty: float, end_token: int
) -> tuple[list[int], list[int]]:
    """Replace the sequences of one search by their best continuations; return the beam and token
    of each.
    """
    vocabulary = log_KV.shape[1]
    total_KV = torch.tensor(search.scores)[:, None] + log_KV
    # Twice as many as needed: at most one candidate of each sequence is its end.
    best = total_KV.flatten().topk(min(2 * num_beams, total_KV.numel()))
    kept: list[tuple[float, int, int]] = []
    for rank, (score, index) in enumerate(
        zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ):
        beam, token = divmod(index, vocabulary)
        # Only impossible tokens are left.
        if score == -math.inf:
            continue
        if token == end_token:
            # An end counts among the best num_beams candidates only, as in transformers.
            if rank < num_beams:
                search.add_finished(search.sequences[beam], score, length_penalty)
        elif len(kept) < num_beams:
            kept.append((score, beam, token))
    search.sequences = [[*search.sequences[beam], token] for _, beam, token in kept]
    search.scores = [score for score, _, _ in kept]
    if search.sequences and len(search.sequences[0]) >= search.limit:
        for text, score in zip(search.sequences, search.scores, strict=True):
            search.add_finished(text, score, length_penalty)
        search.sequences = []
    if search.is_over(length_penalty):
        search.sequences = []
    return (
        ([beam for _, beam, _ in kept], [token for _, _, token in kept])
        if search.sequences
        else ([], [])
    )
