"""Ranks that meet on the side: small objects told and gathered over a gloo group of its own.

Training owns the default group. What works beside it, such as a save in the background, must not mix its messages with
those of a step, so it has its own group, which one thread at a time may use. A failure on one rank becomes the same
exception on every rank, so that all take the same way on.
"""

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from llmsys.errors import LlmsysError
from llmsys.parallel.process_group import get_rank, get_world_size

Value = TypeVar("Value")


class ControlGroup:
    """All ranks, in a group of their own. Making it is collective, and so is every method."""

    def __init__(self) -> None:
        self.group: Any = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def run_on_all_ranks(self, work: Callable[[], Value]) -> list[Value]:
        """What `work` gives on every rank, by rank. If it fails somewhere, all ranks raise what the first one met."""
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
        """What `work` gives on rank 0, the only one to do it. If it fails there, all ranks raise what it met."""
        told: list[Any] = [_catch_failure(work) if get_rank() == 0 else None]
        if get_world_size() > 1:
            dist.broadcast_object_list(told, src=0, group=self.group)
        result, failure = told[0]
        if failure is not None:
            raise failure
        value: Value = result
        return value


def _catch_failure(work: Callable[[], Value]) -> tuple[Value | None, Exception | None]:
    try:
        return work(), None
    except (LlmsysError, OSError) as error:
        return None, error
    except Exception:  # a bug: its traceback must survive the way to the others, which exceptions do not
        return None, RuntimeError(f"rank {get_rank()}:\n{traceback.format_exc()}")
