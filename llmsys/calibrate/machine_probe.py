"""Probe this machine in about ten seconds, for estimates and for `llmsys init --minutes`.

A CPU is measured as `llmsys calibrate` measures it, in fewer and smaller pieces, and with the
training step of a small model, which fits the residual of the profile. An accelerator has the
profile of its driver's name.

The result is kept (probe_cache.py). The same as a run uses the machine, with its processes, is
run_probe.py.
"""

import datetime
import os

import torch

from llmsys.calibrate.benchmarks import BenchmarkSizes
from llmsys.calibrate.calibration import calibrate_device
from llmsys.calibrate.probe_cache import (
    describe_machine,
    get_cache_file,
    load_cached_probe,
    write_probe,
)
from llmsys.calibrate.training_steps import measure_fastest_rate
from llmsys.config.loading.load import read_config
from llmsys.errors import ConfigError
from llmsys.estimate.device_profile import (
    DeviceProfile,
    RunResidual,
    find_device_by_driver_name,
    list_device_names,
    load_device_profile,
)
from llmsys.estimate.step_time import estimate_step_time
from llmsys.parallel.process_group import get_local_device, init_process_group
from llmsys.train.precision import choose_native_precision

# The shapes of a small model's step; half of `llmsys calibrate`'s, each for a shorter time.
QUICK = BenchmarkSizes(
    matmul_shapes=((512, 256, 256), (1024, 512, 512), (2048, 512, 1408)),
    grouped_matmul_shapes=(8, 256, 512, 704),
    attention=(2, 8, 512, 64),
    memory_elements=1 << 23,
    gathered_bytes=(1 << 16,),
    dtypes=("fp32", "bf16"),
    budget_seconds=0.25,
)
# A decoder of the sizes that minutes on a CPU allow.
STEP_MODEL = (
    "model.vocab_size=4096",
    "model.hidden_size=192",
    "model.intermediate_size=512",
    "model.num_hidden_layers=4",
    "model.num_attention_heads=3",
    "model.num_key_value_heads=3",
    "model.head_dim=64",
    "model.tie_word_embeddings=true",
    "batch.sequence_length=256",
    "batch.sequences=4",
    "engine.data_parallel=plain",  # one rank
)
STEP_SECONDS = 3.0
# A step of another size than the measured one: the profile errs by about this much.
SIZE_SPREAD = 0.15


def get_machine_profile(*, renew: bool = False) -> DeviceProfile:
    """Return the profile of this machine: cached, or probed now.

    Args:
        renew: Probe although a cached profile is fresh.

    Returns:
        The profile.

    Raises:
        ConfigError: The accelerator of this machine has no profile.
    """
    device = get_local_device()
    if device.type == "cuda":
        return _find_accelerator_profile(torch.cuda.get_device_name(device))
    path = get_cache_file()
    if not renew and (cached := load_cached_probe(path)) is not None:
        return cached
    profile = measure_processor()
    write_probe(path, profile)
    return profile


def find_machine_device() -> tuple[str, int]:
    """Return this machine as `--device` and `--gpus` take it, probed where no fresh probe exists.

    Returns:
        Name or file of the profile of its devices, and their number; a CPU is one device.

    Raises:
        ConfigError: The accelerator of this machine has no profile.
    """
    device = get_local_device()
    if device.type != "cuda":
        get_machine_profile()
        return str(get_cache_file()), 1
    name = torch.cuda.get_device_name(device)
    profile = _find_accelerator_profile(name)
    shipped = next(one for one in list_device_names() if load_device_profile(one) == profile)
    return shipped, torch.cuda.device_count()


def measure_processor() -> DeviceProfile:
    """Measure the processor with all of its cores: products, memory, and a small training step.

    Returns:
        A profile whose residual is that of the measured step.
    """
    torch.set_num_threads(max(1, os.cpu_count() or 1))
    measured = calibrate_device(QUICK, torch.device("cpu"))
    config = read_config("model/llama3.2-1b", list(STEP_MODEL)).run
    with init_process_group():
        rate = measure_fastest_rate(config, STEP_SECONDS)
    precision = choose_native_precision(torch.device("cpu"))
    modelled = estimate_step_time(
        config.resolve_precision(precision), config.resolve_layout(1), measured
    )
    ratio = rate.seconds * modelled.factor / modelled.seconds.p50
    residual = RunResidual(
        factor=ratio, spread=max(SIZE_SPREAD, rate.spread), runs={"the probe's step": ratio}
    )
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return measured.model_copy(
        update={
            "residual": {"dense": residual},
            "sources": measured.sources
            | {
                "probed": today,
                "machine": describe_machine(),
                "residual": f"{rate.steps} training steps of a small decoder, in "
                f"{rate.seconds:.3g} s each, on {rate.threads} of {os.cpu_count()} threads",
            },
        }
    )


def _find_accelerator_profile(name: str) -> DeviceProfile:
    found = find_device_by_driver_name(name)
    if found is None:
        raise ConfigError(
            f"this machine has a {name}, which has no device profile. Measure it with `llmsys "
            "calibrate --output mine.yaml`, and give that file as the device."
        )
    return found
