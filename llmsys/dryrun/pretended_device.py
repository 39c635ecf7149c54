"""Make torch believe in one CUDA device of a device profile: properties, streams and events that
never wait.

Invariants:
- `install_device` is called once in a separate process, after `load_guard_library` and before a
  tensor is made.
- Streams have one order: what waits on a stream or event on a real device is logged as a wait where
  the host waits.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from llmsys.dryrun.host_waits import HostWaitLog
from llmsys.estimate.device_profile import DeviceProfile

DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class DeviceProperties:
    """The properties of `torch.cuda.get_device_properties` that llmsys and torch read."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int = 132


def build_device_properties(profile: DeviceProfile) -> DeviceProperties:
    """Return the properties of a profile's device."""
    assert profile.compute_capability is not None, "resolve_request rejects other devices"
    name = profile.driver_names[0] if profile.driver_names else profile.name
    return DeviceProperties(name, *profile.compute_capability, int(profile.memory_bytes))


class _Event:
    """An event that has always happened."""

    waits: ClassVar[HostWaitLog]

    def __init__(self, *arguments: Any, **options: Any) -> None: ...
    def record(self, *arguments: Any) -> None: ...
    def wait(self, *arguments: Any) -> None: ...
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.waits.record("Event.synchronize")


class _Stream:
    """The only stream."""

    device = DEVICE
    device_index = 0
    device_type = 1
    stream_id = 0
    cuda_stream = 0
    waits: ClassVar[HostWaitLog]

    def __init__(self, *arguments: Any, **options: Any) -> None: ...
    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.waits.record("Stream.synchronize")

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: object) -> None: ...


def install_device(properties: DeviceProperties, waits: HostWaitLog) -> None:
    """Replace the parts of `torch.cuda` that would ask a driver.

    Args:
        properties: of the device that is pretended.
        waits: gets every synchronization of the host.
    """
    _Event.waits = _Stream.waits = waits
    only_stream = _Stream()
    memory = properties.total_memory
    replacements: dict[str, Any] = {
        "Event": _Event,
        "Stream": _Stream,
        "_device": _DeviceContext,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "current_stream": lambda *device: only_stream,
        "default_stream": lambda *device: only_stream,
        "device": _DeviceContext,
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "get_device_capability": lambda *device: (properties.major, properties.minor),
        "get_device_name": lambda *device: properties.name,
        "get_device_properties": lambda *device: properties,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "max_memory_allocated": lambda *device: 0,
        "max_memory_reserved": lambda *device: 0,
        "mem_get_info": lambda *device: (memory, memory),
        "set_device": lambda device: None,
        "stream": _enter_stream,
        "synchronize": lambda *device: waits.record("cuda.synchronize"),
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign, assignment]
    torch.accelerator.current_stream = lambda *device: only_stream  # type: ignore[assignment]
    vars(torch._C)["_cuda_isCurrentStreamCapturing"] = lambda: False


class _DeviceContext:
    """The context `torch.cuda.device(index)`."""

    def __init__(self, *arguments: Any) -> None: ...
    def __enter__(self) -> "_DeviceContext":
        return self

    def __exit__(self, *error: object) -> None: ...


@contextlib.contextmanager
def _enter_stream(stream: object) -> Iterator[None]:
    yield
