"""A separate gloo group for control messages, so that background saves do not interleave with
training collectives.

Invariants:
- One thread at a time uses the group; construction and every method are collective.
- An exception on one rank is raised on every rank.
"""

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from llmsys.errors import LlmsysError
from llmsys.parallel.process_group import get_rank, get_world_size

Value = TypeVar("Value")


class ControlGroup:
    """All ranks, in their own gloo group."""

    def __init__(self) -> None:
        self.group: Any = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def run_on_all_ranks(self, work: Callable[[], Value]) -> list[Value]:
        """Run `work` on every rank and gather the results. Collective.

        Args:
            work: Called once on every rank. Its result or exception is pickled for the other ranks.
                A rank that fails does not leave others waiting, unless `work` itself is collective.

        Returns:
            One result per rank, ordered by rank.

        Raises:
            The exception of the lowest failing rank, on all ranks. An LlmsysError or OSError keeps
                its type; any other becomes a RuntimeError with the traceback of that rank as text.
        """
        # A failure is gathered like a result: a rank that raised here would leave the others
        # waiting.
        result, failure = _catch_failure(work)
        results: list[Any] = [(result, failure)]
        if get_world_size() > 1:
            results = [None] * get_world_size()
            dist.all_gather_object(results, (result, failure), group=self.group)
        for _, failed in results:
            if failed is not None:
                raise failed
        return [result for result, _ in results]

    def run_on_first_rank(self, work: Callable[[], Value]) -> Value:
        """Run `work` on rank 0 and broadcast the result. Collective.

        Args:
            work: Called on rank 0 only, so it must not be collective. Its result or exception is
                pickled for the other ranks.

        Returns:
            The result of rank 0, on all ranks.

        Raises:
            The exception of rank 0, on all ranks, with the types of `run_on_all_ranks`.
        """
        message: list[Any] = [_catch_failure(work) if get_rank() == 0 else None]
        if get_world_size() > 1:
            dist.broadcast_object_list(message, src=0, group=self.group)
        result, failure = message[0]
        if failure is not None:
            raise failure
        value: Value = result
        return value


def _catch_failure(work: Callable[[], Value]) -> tuple[Value | None, Exception | None]:
    try:
        return work(), None
    except (LlmsysError, OSError) as error:
        # Sent as they are, so that callers can catch them by type.
        return None, error
    except Exception:  # a bug: pickling an exception loses its traceback, so send it as text
        return None, RuntimeError(f"rank {get_rank()}:\n{traceback.format_exc()}")
