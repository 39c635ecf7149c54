"""Record single steps of a run with torch's profiler: a trace for Perfetto, a memory snapshot, and
shares by kernel.

Writes to `profile/` of the run folder, per step and rank: `step-N-rank-R.trace.json.gz`, which
https://ui.perfetto.dev opens, and on accelerators with `train.profile.memory` a `.memory.pickle`
for https://pytorch.org/memory_viz.

Invariants:
- A step that is not recorded costs one look at a set and a flag.
- Recording changes no weight: a profiler only watches.
"""

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from llmsys.config.train import ProfileConfig
from llmsys.log import get_logger
from llmsys.train.stop_request import PROFILE_SIGNAL

# Kinds of kernels by parts of their names, the first that fits; names of operators on CPUs, of
# kernels on GPUs.
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "communication",
        (
            "nccl",
            "gloo",
            "c10d",
            "all_reduce",
            "all_gather",
            "reduce_scatter",
            "all_to_all",
            "allgather",
        ),
    ),
    ("attention", ("scaled_dot_product", "flash", "fmha", "flex_attention", "sdpa", "varlen")),
    ("loss", ("crossentropy", "cross_entropy", "log_softmax", "nll_loss", "logsumexp")),
    (
        "matmul",
        (
            "gemm",
            "matmul",
            "aten::mm",
            "addmm",
            "bmm",
            "grouped_mm",
            "nvjet",
            "cutlass",
            "wgmma",
            "linear",
        ),
    ),
    ("optimizer", ("adam", "muon", "_foreach", "multi_tensor", "lion")),
    (
        "copies",
        (
            "memcpy",
            "memset",
            "copy_",
            "aten::cat",
            "aten::fill_",
            "aten::to",
            "index_select",
            "index_put",
        ),
    ),
)
# Calls of the CUDA runtime in which the host waits; not cudaDeviceSynchronize, which record_step
# itself calls.
HOST_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
# Events of a CUDA allocator's history that a snapshot keeps.
MAX_MEMORY_EVENTS = 1_000_000

log = get_logger(__name__)


def classify_kernel(name: str) -> str:
    """Return the kind of a kernel or operator.

    Args:
        name: As torch's profiler gives it, such as `aten::mm` or `nvjet_tst_128x256`.

    Returns:
        A name of `KINDS`, or `other`.
    """
    lower = name.lower()
    return next((kind for kind, parts in KINDS if any(part in lower for part in parts)), "other")


class StepProfiler:
    """Records the chosen steps of this rank, and the next step after a signal.

    Args:
        config: `train.profile`.
        folder: The run folder.
        rank: This process.
        device: Where the model is.
    """

    def __init__(
        self, config: ProfileConfig, folder: Path, rank: int, device: torch.device
    ) -> None:
        self._steps = frozenset(config.steps) if rank in config.ranks else frozenset()
        self._config = config
        self._rank = rank
        self._device = device
        self._folder = folder / "profile"
        self._is_requested = False
        self._latest: dict[str, Any] | None = None

    @contextmanager
    def handle_signal(self) -> Iterator[None]:
        """Profile the next step when the signal comes inside the block, if this rank is one of
        `ranks`.
        """
        before = signal.signal(PROFILE_SIGNAL, self._handle_signal)
        try:
            yield
        finally:
            signal.signal(PROFILE_SIGNAL, before)

    @contextmanager
    def record_step(self, number: int) -> Iterator[None]:
        """Record what runs inside the block if step `number`, counted from 1, was chosen."""
        if number not in self._steps and not self._is_requested:
            yield
            return
        self._is_requested = False
        is_cuda = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
        if is_cuda and self._config.memory:
            torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
        with profile(
            activities=activities, profile_memory=self._config.memory, acc_events=True
        ) as recorded:
            yield
            if is_cuda:
                # kernels of this step would end after the trace
                torch.cuda.synchronize(self._device)
        self._write_files(recorded, number)

    def pop_summary(self) -> dict[str, Any] | None:
        """Return the fields of a `profile` event of the step just recorded, once; None where
        none was.
        """
        latest = self._latest
        self._latest = None
        return latest

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_requested = self._rank in self._config.ranks

    def _write_files(self, recorded: Any, number: int) -> None:
        """Write trace and snapshot. A full disk loses the profile, not the run."""
        stem = f"step-{number:08d}-rank-{self._rank}"
        trace = self._folder / f"{stem}.trace.json.gz"
        snapshot = self._folder / f"{stem}.memory.pickle"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(trace))
            if self._device.type == "cuda" and self._config.memory:
                torch.cuda.memory._dump_snapshot(str(snapshot))
        # torch raises a RuntimeError where it cannot open the file
        except (OSError, RuntimeError) as error:
            log.warning(
                "the profile of step %d was not written: %s. The run continues.", number, error
            )
            return
        finally:
            if self._device.type == "cuda" and self._config.memory:
                # it would slow every later step
                torch.cuda.memory._record_memory_history(enabled=None)
        self._latest = {
            "trace": str(trace.relative_to(self._folder.parent)),
            **summarize_events(recorded.events()),
        }
        log.info(
            "wrote the profile of step %d: %s (open it at https://ui.perfetto.dev)", number, trace
        )


def summarize_events(events: Iterable[Any]) -> dict[str, Any]:
    """Sum the time of kernels by kind.

    Args:
        events: Function events of torch's profiler.

    Returns:
        `seconds`: busy seconds of the device, or of the process's operators where there is no
        accelerator; `shares`: the share of each kind in it, largest first; `kernels`: the ten
        longest, [name, count, share]; `host_wait_seconds`: in which the host waited for the device,
        0 without an accelerator.
    """
    listed = list(events)
    has_kernels = any(event.device_type == DeviceType.CUDA for event in listed)
    totals: dict[str, list[float]] = {}
    for event in listed:
        if has_kernels and event.device_type != DeviceType.CUDA:
            continue
        # Kernels do not nest; operators do, so only their own time counts.
        own = event.time_range.elapsed_us() if has_kernels else event.self_cpu_time_total
        entry = totals.setdefault(event.name, [0.0, 0.0])
        entry[0] += own
        entry[1] += 1
    busy = sum(own for own, _ in totals.values()) or 1.0
    shares: dict[str, float] = {}
    for name, (own, _) in totals.items():
        kind = classify_kernel(name)
        shares[kind] = shares.get(kind, 0.0) + own / busy
    longest = sorted(totals.items(), key=lambda item: -item[1][0])[:10]
    return {
        "seconds": busy / 1e6,
        "shares": dict(sorted(shares.items(), key=lambda item: -item[1])),
        "kernels": [[name, int(count), own / busy] for name, (own, count) in longest],
        "host_wait_seconds": sum(
            event.time_range.elapsed_us() for event in listed if event.name in HOST_WAITS
        )
        / 1e6,
    }
