"""The dry runs that prove every training config: one request for each, on the cluster that it is
meant for.
"""

import re
from collections.abc import Sequence

from llmsys.config.loading.config_files import list_config_names
from llmsys.dryrun.dry_run_request import DryRunRequest
from llmsys.estimate.device_profile import list_device_names

FOLDER = "train/"
NODE_DEVICES = 8
# Two ranks: one would exchange nothing.
SMALLEST = 2
DEVICE = "h100-sxm"
_CLUSTER = re.compile(r"-(\d+)x([a-z]+\d+)$")


def list_shipped_requests(overrides: Sequence[str] = ()) -> list[DryRunRequest]:
    """List a dry run for every training config.

    A name such as `train/llama-8b-64xh100` ends in its cluster: 64 devices in machines of 8. All
    others run on two devices.

    Args:
        overrides: Values for every config.

    Returns:
        Requests in the order of the names, each of rank 0.
    """
    return [
        _build_request(name, tuple(overrides))
        for name in list_config_names()
        if name.startswith(FOLDER)
    ]


def _build_request(name: str, overrides: tuple[str, ...]) -> DryRunRequest:
    devices, device = SMALLEST, DEVICE
    if (found := _CLUSTER.search(name)) is not None:
        devices = int(found[1])
        device = next(one for one in list_device_names() if one in (found[2], f"{found[2]}-sxm"))
    node_devices = min(devices, NODE_DEVICES)
    return DryRunRequest(name, overrides, devices // node_devices, node_devices, 0, device)
