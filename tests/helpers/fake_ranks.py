"""A process group of ranks that do not exist."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed


@contextmanager
def pretend_ranks(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of `world_size` ranks that do not exist; collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        distributed.destroy_process_group()
