"""Write the record of a run into its folder: config.yaml (resolved), environment.json (versions,
source, host), and the files of run_files.py.

The folder also holds events.jsonl, checkpoints/, report.html and .lock.
"""

import importlib.metadata
import json
import os
import platform

import torch

from llmsys.config.loading.config_files import format_recorded_config
from llmsys.config.run import RunConfig
from llmsys.log import redact_values
from llmsys.storage.atomic_write import PRIVATE, write_bytes_atomically
from llmsys.storage.stored_formats import RUN_ENVIRONMENT, VERSION_KEY
from llmsys.train.chat_data import get_configured_template_folder
from llmsys.train.precision import get_matmul_numerics
from llmsys.train.run_data import get_configured_tokenizer_path
from llmsys.train.run_files import keep_run_files
from llmsys.train.source_code import read_source
from llmsys.vocabulary.chat_template import TEMPLATE_NAME

RECORDED_PACKAGES = (
    "torch",
    "deepspeed",
    "accelerate",
    "sentencepiece",
    "pyarrow",
    "numpy",
    "pydantic",
)
# Prefixes of environment variables that change how a step runs: allocator, flight recorder,
# network, kernels.
RECORDED_VARIABLES = ("CUDA_", "CUBLAS_", "GLOO_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_")


def write_run_record(config: RunConfig, data_fingerprint: str, world_size: int) -> None:
    """Write config.yaml and environment.json, with secrets redacted, and keep the files of the
    model. For rank 0, at each start.

    Args:
        config: The resolved config.
        data_fingerprint: The fingerprint of the dataset.
        world_size: Number of ranks.

    Raises:
        DataError: The run folder cannot be written.
    """
    folder = config.run.folder
    write_bytes_atomically(
        folder / "config.yaml", format_recorded_config(config.model_dump(mode="json")).encode()
    )
    environment = {
        VERSION_KEY: RUN_ENVIRONMENT.version,
        "packages": {name: _find_package_version(name) for name in ("llmsys", *RECORDED_PACKAGES)},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "matmuls": get_matmul_numerics(),
        "world_size": world_size,
        "variables": {
            name: os.environ[name]
            for name in sorted(os.environ)
            if name.startswith(RECORDED_VARIABLES)
        },
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "source": read_source(),
        "data_fingerprint": data_fingerprint,
    }
    write_bytes_atomically(
        folder / "environment.json",
        json.dumps(redact_values(environment), indent=2).encode(),
        PRIVATE,
    )
    keep_run_files(
        config,
        get_configured_tokenizer_path(config),
        get_configured_template_folder(config) / TEMPLATE_NAME,
    )


def _find_package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
