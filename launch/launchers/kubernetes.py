"""Format the objects that train on Kubernetes: an indexed Job with one pod per host, and what its
pods need.

The pods run the image of containers/Dockerfile. Run and dataset folders are on a persistent volume,
the config is in a ConfigMap, and a headless Service gives the first pod the name of the rendezvous.
No operator is needed.

Invariants:
- A pod that saved and stopped (75), or that was evicted, is replaced without using up a restart; an
  error that the user must fix (2) ends the Job.
- No secret is written.
"""

import os
import re
from collections.abc import Mapping, Sequence
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
from llmsys.storage.paths import find_folder_url

# Those of containers/Dockerfile.
IMAGE, IMAGE_CHECKOUT, WORKSPACE = "llmsys", "/opt/llmsys", "/workspace"
CONFIG_FOLDER = "/etc/llmsys"
GRACE_SECONDS = 300  # between SIGTERM and SIGKILL: enough for a step and a save
MAX_NAME_LETTERS = 50  # a pod adds its index and a random suffix, and a label has 63 letters
GPU = "nvidia.com/gpu"
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
    labels = {"app.kubernetes.io/name": "llmsys", "app.kubernetes.io/instance": name}
    several = len(plan.hosts) > 1
    first, own = (f"{name}-0.{name}", "$(POD_IP)") if several else (ALONE, ALONE)
    inside = replace(
        plan,
        interpreter="python",
        script=f"{IMAGE_CHECKOUT}/launch/train.py",
        config_file=f"{CONFIG_FOLDER}/config.yaml",
    )
    container: dict[str, Any] = {
        "name": "ranks",
        "image": image or IMAGE,
        "workingDir": WORKSPACE,
        "command": build_torchrun_arguments(inside, slots, f"{first}:{plan.port}", plan.name, own),
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *(
                {"name": key, "value": value}
                for key, value in select_portable_variables(plan.folder).items()
            ),
        ],
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER},
            {"name": "workspace", "mountPath": WORKSPACE},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    if gpus:
        container["resources"] = {"limits": {GPU: str(gpus)}}
    pod = _build_pod(container, name, volume) | ({"subdomain": name} if several else {})
    objects = [_build_config_map(config, name, labels)]
    objects += [_build_service(name, labels, plan.port)] * several
    objects.append(_build_job(name, labels, plan, pod))
    return format_documents(objects)


def _build_pod(container: Mapping[str, Any], name: str, volume: str) -> dict[str, Any]:
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [dict(container)],
        "volumes": [
            {"name": "config", "configMap": {"name": name}},
            {"name": "workspace", "persistentVolumeClaim": {"claimName": volume}},
            # the default of a container is 64 MB, which NCCL and batches exceed
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _build_config_map(config: RunConfig, name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": dict(labels)},
        "data": {"config.yaml": format_config(config)},
    }


def _build_service(name: str, labels: Mapping[str, str], port: int) -> dict[str, Any]:
    """Return the headless Service that gives the pods their names."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {
            "clusterIP": "None",
            # the first pod listens before it counts as ready
            "publishNotReadyAddresses": True,
            "selector": dict(labels),
            "ports": [{"name": "rendezvous", "port": port}],
        },
    }


def _build_job(
    name: str, labels: Mapping[str, str], plan: LaunchPlan, pod: Mapping[str, Any]
) -> dict[str, Any]:
    hosts = len(plan.hosts)
    rules: list[dict[str, Any]] = [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": "ranks", "operator": "In", "values": [MENDABLE]},
        },
        {
            "action": "Ignore",
            "onExitCodes": {"containerName": "ranks", "operator": "In", "values": [STOPPED]},
        },
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": dict(labels)},
        "spec": {
            "completionMode": "Indexed",
            "completions": hosts,
            "parallelism": hosts,
            "backoffLimit": plan.max_restarts * hosts,
            "podFailurePolicy": {"rules": rules},
            "template": {"metadata": {"labels": dict(labels)}, "spec": dict(pod)},
        },
    }


def format_config(config: RunConfig) -> str:
    """Return the resolved config as YAML, without the secrets of URLs.

    Args:
        config: The run.

    Returns:
        Text that every rank reads.
    """
    return yaml.safe_dump(
        redact_values(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True
    )


class _BlockDumper(yaml.SafeDumper):
    """A dumper that writes a text of several lines as a block, as people write scripts."""

    def build_text_node(self, text: str) -> yaml.ScalarNode:
        """Return the node of a text."""
        return self.represent_scalar(
            "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
        )


_BlockDumper.add_representer(str, _BlockDumper.build_text_node)


def format_documents(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return YAML documents.

    Args:
        documents: Values of JSON.

    Returns:
        Their text, with keys in their order.
    """
    return yaml.dump_all(
        documents, Dumper=_BlockDumper, sort_keys=False, allow_unicode=True, width=120
    )


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
