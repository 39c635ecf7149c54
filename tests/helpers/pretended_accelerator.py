"""A CPU that takes the attention kernels of an accelerator: torch's varlen operator by its CPU
twin, flex eagerly.
"""

import pytest
import torch

from llmsys.config.attention_device import AttentionDevice
from llmsys.model import attention_device, varlen_attention
from tests.reference import varlen
from tests.reference.varlen import register_cpu_kernels

HOPPER = AttentionDevice("cuda", (9, 0))


def pretend_accelerator(
    patch: pytest.MonkeyPatch, device: AttentionDevice = HOPPER, *, exact: bool = False
) -> None:
    """Choose kernels as on `device`; `exact` lets float32 through where the kernel takes bf16,
    to see small errors.
    """
    register_cpu_kernels()
    patch.setattr(varlen_attention, "_get_wide_key_kernel", lambda: varlen)
    patch.setattr(attention_device, "describe_device", lambda _: device)
    if exact:
        patch.setattr(varlen_attention, "FLASH_DTYPES", (torch.float32, torch.bfloat16))
        patch.setattr(attention_device, "get_attention_dtype", lambda _: "bf16")
