"""Format the objects that train on Kubernetes: an indexed Job with one pod per host, and what its
pods need, by templates/kubernetes.yaml.

The pods run the image of containers/Dockerfile. Run and dataset folders are on a persistent volume,
the config is in a ConfigMap, and a headless Service gives the first pod the name of the rendezvous.
No operator is needed.

Invariants:
- A pod that saved and stopped (75), or that was evicted, is replaced without using up a restart; an
  error that the user must fix (2) ends the Job.
- No secret is written.
"""

import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from llmsys.config.data import list_dataset_folders
from llmsys.config.run import RunConfig
from llmsys.errors import LaunchError
from llmsys.launch.launchers.host_commands import (
    LaunchPlan,
    build_torchrun_arguments,
    require_even_slots,
)
from llmsys.launch.launchers.run_bundle import build_rank_environment
from llmsys.launch.train import MENDABLE, STOPPED
from llmsys.log import redact_values
from llmsys.storage.local_files import find_folder_url

# Those of containers/Dockerfile.
IMAGE, IMAGE_CHECKOUT, WORKSPACE = "llmsys", "/opt/llmsys", "/workspace"
CONFIG_FOLDER = "/etc/llmsys"
MAX_NAME_LETTERS = 50  # a pod adds its index and a random suffix, and a label has 63 letters
TEMPLATES = Path(__file__).with_name("templates")
# Variables of the bundle that name files of this host.
ON_SHARED_HOSTS_ONLY = ("PYTHONPATH", "DS_ENV_FILE", "PDSH_SSH_ARGS_APPEND")
ALONE = "127.0.0.1"


def format_kubernetes_objects(
    config: RunConfig, plan: LaunchPlan, gpus: int, image: str, volume: str
) -> str:
    """Return the YAML documents for `kubectl apply`.

    Args:
        config: The run. Secrets in URLs are redacted.
        plan: The launch, whose hosts are the pods. They must have equal slots.
        gpus: Accelerators of a pod; 0 asks for none.
        image: Image that was built from containers/Dockerfile; "" means `llmsys`.
        volume: Name of the PersistentVolumeClaim that holds run and dataset folders.

    Returns:
        A ConfigMap, a Service where there are several pods, and a Job.

    Raises:
        LaunchError: Slots differ, or a folder is outside the volume.
    """
    require_folders_in_workspace(config)
    slots = require_even_slots(plan.hosts, "a Kubernetes Job")
    name = format_dns_label(plan.name)
    is_alone = len(plan.hosts) == 1
    first, own = (ALONE, ALONE) if is_alone else (f"{name}-0.{name}", "$(POD_IP)")
    inside = replace(
        plan,
        interpreter="python",
        script=f"{IMAGE_CHECKOUT}/launch/train.py",
        config_file=f"{CONFIG_FOLDER}/config.yaml",
    )
    return render_job_template(
        "kubernetes.yaml",
        name=name,
        labels={"app.kubernetes.io/name": "llmsys", "app.kubernetes.io/instance": name},
        config=format_config(config),
        config_folder=CONFIG_FOLDER,
        command=build_torchrun_arguments(inside, slots, f"{first}:{plan.port}", plan.name, own),
        variables=select_portable_variables(plan.folder),
        num_pods=len(plan.hosts),
        port=plan.port,
        gpus=gpus,
        image=image or IMAGE,
        workspace=WORKSPACE,
        volume=volume,
        max_restarts=plan.max_restarts,
        mendable=MENDABLE,
        stopped=STOPPED,
    )


def render_job_template(template: str, **values: Any) -> str:
    """Return a file of templates/ with its placeholders filled in.

    Args:
        template: Its name.
        values: What the template reads.

    Returns:
        YAML documents.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # The output is YAML, in which nothing is escaped as HTML: values pass through `tojson`.
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    # Not the default, which escapes signs of HTML and sorts keys.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    return environment.get_template(template).render(values)


def format_config(config: RunConfig) -> str:
    """Return the resolved config as YAML, without the secrets of URLs.

    Args:
        config: The run.

    Returns:
        Text that every rank reads, without the end of its last line.
    """
    text: str = yaml.safe_dump(
        redact_values(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True
    )
    return text.removesuffix("\n")


def select_portable_variables(
    folder: Path, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the settings of libraries that ranks on other hosts get, without those that name files
    of this host.

    Args:
        folder: `launch/` of the run folder.
        environment: Variables to take them from.

    Returns:
        Name → value.
    """
    chosen = build_rank_environment(environment, folder)
    return {name: value for name, value in chosen.items() if name not in ON_SHARED_HOSTS_ONLY}


def require_folders_in_workspace(config: RunConfig) -> None:
    """Raise LaunchError where the folder of the run or of a dataset is not on the volume of the
    pods.

    Args:
        config: The run.
    """
    named = [
        ("run.folder", config.run.folder),
        *(("data.folder", one) for one in list_dataset_folders(config.data)),
    ]
    for key, folder in named:
        if find_folder_url(folder) is None and not Path(
            os.path.normpath(WORKSPACE / folder)
        ).is_relative_to(WORKSPACE):
            raise LaunchError(
                f"{key}={folder} is outside {WORKSPACE}, where the volume of all hosts is "
                f"mounted. Use a path below {WORKSPACE} or a relative one, which begins there, or "
                "s3://bucket/folder."
            )


def format_dns_label(name: str) -> str:
    """Return a name as Kubernetes allows it: lower-case letters, digits and dashes, a letter first.

    Args:
        name: Name of the run.

    Returns:
        At most MAX_NAME_LETTERS letters.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}"
    return plain[:MAX_NAME_LETTERS].strip("-")
