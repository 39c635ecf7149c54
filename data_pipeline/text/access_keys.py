"""Find keys and tokens in code: those that have a fixed beginning, and private keys in PEM.

Beginnings and lengths are those that the services document: AWS access keys, GitHub, GitLab, Slack,
Google, Stripe, Hugging Face. Passwords and keys without a beginning of their own are not found.

Invariants:
- Spans are sorted and do not overlap.
- Time is linear: patterns have a bounded length, and the end of a private key is searched once.
"""

import re
from collections.abc import Iterator

_TOKEN = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"(?:AKIA|ASIA)[A-Z2-7]{16}"
    r"|gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{82}|glpat-[A-Za-z0-9_-]{20}"
    r"|xox[abprs]-[0-9]{8,14}-[A-Za-z0-9-]{10,90}"
    r"|AIza[A-Za-z0-9_-]{35}|[rs]k_live_[A-Za-z0-9]{24,99}|hf_[A-Za-z]{34}"
    r")(?![A-Za-z0-9_-])"
)
_PEM_BEGIN = re.compile(r"-----BEGIN (?:[A-Z]{2,9} )?PRIVATE KEY-----")
_PEM_END = re.compile(r"-----END (?:[A-Z]{2,9} )?PRIVATE KEY-----")


def find_access_keys(text: str) -> Iterator[tuple[int, int]]:
    """Find keys and tokens.

    Args:
        text: The text.

    Yields:
        Their spans, in characters.
    """
    spans = [found.span() for found in _TOKEN.finditer(text)]
    position = 0
    while begin := _PEM_BEGIN.search(text, position):
        end = _PEM_END.search(text, begin.end())
        if end is None:
            break  # none of the later ones has an end either
        spans.append((begin.start(), end.end()))
        position = end.end()
    stop = 0
    for first, last in sorted(spans):
        if first >= stop:
            stop = last
            yield first, last
