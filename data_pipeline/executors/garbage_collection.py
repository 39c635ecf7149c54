"""Let the garbage collector of a process that prepares data look for cycles less often.

Imports and batches make hundreds of thousands of objects without a cycle. With Python's own
threshold of 700 the collector takes an eighth of the time in which a preparation starts.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Objects of a generation, at most some megabytes that wait in cycles.
THRESHOLDS = 50_000, 20, 20


def collect_less_often() -> None:
    """Raise the thresholds of this process."""
    gc.set_threshold(*THRESHOLDS)


@contextmanager
def pause_collection() -> Iterator[None]:
    """Look for no cycles in the `with` block, which makes many objects that stay.

    Yields:
        None. Afterwards the collector is as before.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
