"""Format a SkyPilot task that trains on several nodes, for `sky launch` and `sky jobs launch`, by
templates/skypilot.yaml.

Without an image SkyPilot copies this checkout and installs its pins; the config is part of the
task. Run and dataset folders are on a volume of SkyPilot that all nodes mount.
"""

from dataclasses import replace
from pathlib import Path

from llmsys.config.run import RunConfig
from llmsys.errors import LaunchError
from llmsys.launch.launchers.host_commands import (
    LaunchPlan,
    build_torchrun_arguments,
    join_with_variables,
    require_even_slots,
)
from llmsys.launch.launchers.kubernetes import (
    ALONE,
    IMAGE_CHECKOUT,
    WORKSPACE,
    format_config,
    format_dns_label,
    render_job_template,
    require_folders_in_workspace,
    select_portable_variables,
)
from llmsys.launch.train import STOPPED
from llmsys.storage.local_files import find_import_root

# SkyPilot's names of the accelerators that have a device profile.
ACCELERATORS = {
    "a100-40gb": "A100", "a100-80gb": "A100-80GB", "b200": "B200", "b300": "B300", "gb200": "GB200",
    "gb300": "GB300",
    "h100-sxm": "H100", "h200": "H200", "p100": "P100", "v100": "V100",
}  # fmt: skip
WORKDIR = "$HOME/sky_workdir"  # where SkyPilot copies `workdir`


def format_skypilot_task(
    config: RunConfig,
    plan: LaunchPlan,
    gpus: int,
    device: str,
    image: str,
    volume: str,
    root: Path | None = None,
) -> str:
    """Return the YAML of a task.

    Args:
        config: The run. Secrets in URLs are redacted.
        plan: The launch, whose hosts are the nodes. They must have equal slots.
        gpus: Accelerators of a node; 0 asks for CPUs.
        device: Device profile, such as h100-sxm, or SkyPilot's own name of an accelerator.
        image: Image that was built from containers/Dockerfile; "" copies the checkout instead.
        volume: Name of the volume that holds run and dataset folders.
        root: The checkout; None: the one that is running.

    Returns:
        The text for `sky launch FILE`.

    Raises:
        LaunchError: Slots differ, a folder is outside the volume, no accelerator is named, or there
            is no checkout.
    """
    require_folders_in_workspace(config)
    slots = require_even_slots(plan.hosts, "a SkyPilot task")
    root = find_import_root() if root is None else root
    if gpus and not device:
        raise LaunchError(
            f"--by skypilot needs the name of the {gpus} accelerators of a node. Give "
            "device=h100-sxm, or a name that `sky show-gpus` lists, or --gpus 0 for CPUs."
        )
    if not image and not (root / "Makefile").is_file():
        raise LaunchError(
            f"{root} is an installed package, but SkyPilot copies a checkout. Give --image NAME, "
            "built from containers/Dockerfile, or print the task from a checkout."
        )
    checkout, interpreter = (
        (IMAGE_CHECKOUT, "python") if image else (WORKDIR, f"{WORKDIR}/.venv/bin/python")
    )
    inside = replace(
        plan,
        interpreter=interpreter,
        script=f"{checkout}/launch/train.py",
        config_file="$HOME/llmsys-config.yaml",
    )
    first, own = ("$FIRST", "$OWN") if len(plan.hosts) > 1 else (ALONE, ALONE)
    words = build_torchrun_arguments(inside, slots, f"{first}:{plan.port}", plan.name, own)
    command = join_with_variables(words, ("HOME", "FIRST", "OWN"))
    return render_job_template(
        "skypilot.yaml",
        name=format_dns_label(plan.name),
        num_nodes=len(plan.hosts),
        gpus=gpus,
        accelerator=ACCELERATORS.get(device, device),
        slots=slots,
        image=image,
        workdir=str(root),
        workspace=WORKSPACE,
        volume=volume,
        variables=select_portable_variables(plan.folder),
        config=format_config(config),
        command=command,
        stopped=STOPPED,
    )
