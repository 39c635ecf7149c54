"""Resolve `engine.data_parallel: auto` by the ranks, the layout and the memory of the devices."""

import os

import torch

from llmsys.config.run import RunConfig
from llmsys.estimate.data_parallel_choice import choose_data_parallel, is_data_parallel_open
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.log import get_logger
from llmsys.parallel.process_group import all_gather_object, get_world_size, run_on_rank_zero
from llmsys.train.auto_micro_batch import get_rank_memory

log = get_logger(__name__)


def resolve_data_parallel(config: RunConfig, device: torch.device) -> RunConfig:
    """Choose plain or FSDP where `engine.data_parallel` is `auto`, and log why. Collective.

    Args:
        config: The config of the run, with its precision resolved.
        device: Device of this rank.

    Returns:
        The config with one kind, the same on every rank: the rank with the least memory decides.
    """
    if not is_data_parallel_open(config):
        return config
    memory = min(all_gather_object(get_rank_memory(device)))
    system = MemoryProfile(device="cuda" if device.type == "cuda" else "cpu")
    ranks = get_world_size()

    def decide() -> str:
        choice = choose_data_parallel(
            config,
            config.resolve_layout(ranks),
            lambda: memory,
            system,
            is_one_machine=int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) == ranks,
        )
        log.info("engine.data_parallel=auto is %s: %s", choice.name, choice.reason)
        return choice.name

    return config.resolve_data_parallel("plain" if run_on_rank_zero(decide) == "plain" else "fsdp")
