"""A made-up device, slow enough that tiny models take a time."""

from pathlib import Path
from typing import Any

from llmsys.config.loading.yaml_files import dump_yaml
from llmsys.estimate.device_profile import DeviceProfile

NAME = "abacus"


def build_abacus(**changes: Any) -> DeviceProfile:
    """The profile, with other values where given."""
    efficiency = {"products": 0.5, "grouped": 0.4, "attention": 0.3, "attention_backward": 0.3,
        "memory": 0.8,
                  "links": 0.8, "launch_seconds": 1e-6, "host_seconds": 1e-5}  # fmt: skip
    link = {"bandwidth": 1e9, "latency_seconds": 1e-5}
    settings = {"name": NAME, "peak_flops": {"fp32": 1e10, "bf16": 4e10}, "memory_bytes": 8e9,
        "memory_bandwidth": 1e10,
                "node": link, "efficiency": efficiency, "sources": {"name": "made up"}}  # fmt: skip
    return DeviceProfile.model_validate(settings | changes)


def write_abacus(path: Path, **changes: Any) -> Path:
    """The same as a file."""
    path.write_text(dump_yaml(build_abacus(**changes).model_dump(mode="json")))
    return path
