"""Registers, spills and shared memory of Triton kernels, without a GPU: those that torch.compile
generates, and ours.

    python -m tools.bench.kernels                       # sm_80, sm_90 and sm_100
    python -m tools.bench.kernels --arch sm_90 --json

Inductor generates the Triton kernels of parts of a block of llama-8b, forward and backward, for a
pretended CUDA device (that of `llmsys dryrun`). Our own kernels are those of
llmsys/model/varlen_kernel.py, for the widths of DeepSeek-V3. cubin.py compiles all. Needs a C++
compiler, and the triton wheel, which CPU wheels of torch do not bring.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from llmsys.dryrun.guard_library import load_guard_library
from tools.bench.cubin import ARCHITECTURES, KernelUsage, compile_kernel, compile_own_kernels

ROWS, WIDTH, INNER, HEADS, HEAD_DIM, EXPERTS = 8192, 4096, 14336, 32, 128, 128


def main() -> None:
    """Print one table per architecture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arch", choices=ARCHITECTURES, help="one architecture (default: each in its own process)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per kernel")
    arguments = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        sys.exit(
            "triton is not installed, and compiles the kernels. Install triton==3.7.1, the "
            "version of torch 2.13."
        )
    if arguments.arch is None:
        for name in ARCHITECTURES:
            options = ["--arch", name, *(["--json"] if arguments.json else [])]
            subprocess.run([sys.executable, "-m", "tools.bench.kernels", *options], check=True)
        return
    usages = measure_kernels(arguments.arch)
    if arguments.json:
        print("\n".join(json.dumps({"arch": arguments.arch, **asdict(usage)}) for usage in usages))
        return
    print(f"{arguments.arch:<28} {'registers':>9} {'spilled':>8} {'shared':>8}  kernel")
    for usage in usages:
        row = f"{usage.registers:>9} {usage.spill_bytes:>6} B {usage.shared_bytes:>6} B"
        print(f"  {usage.part:<26} {row}  {usage.kernel}")


def measure_kernels(architecture: str) -> list[KernelUsage]:
    """Return the kernels of all parts for one architecture. In a process that has not imported
    torch.
    """
    profile, capability = ARCHITECTURES[architecture]
    install_cuda_device(profile, capability)
    usages = []
    for part, build in list_parts().items():
        for name, source in generate_kernels(build).items():
            usages.append(compile_generated_kernel(part, name, source, architecture))
    return usages + compile_own_kernels(architecture)


def install_cuda_device(profile: str, capability: int) -> None:
    """Make torch and Triton see a CUDA device of a profile, with no driver."""
    guard = load_guard_library()
    import torch

    guard.llmsys_install_guard()
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from triton.backends.compiler import GPUTarget

    from llmsys.dryrun.fake_cluster import build_fake_mode
    from llmsys.dryrun.host_waits import HostWaitLog
    from llmsys.dryrun.pretended_device import build_device_properties, install_device
    from llmsys.estimate.device_profile import load_device_profile

    build_fake_mode()
    known = build_device_properties(load_device_profile(profile))
    install_device(known, HostWaitLog())
    properties = SimpleNamespace(
        **asdict(known), warp_size=32, max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        max_threads_per_block=1024, shared_memory_per_block_optin=166912, gcnArchName="",
    )  # fmt: skip
    torch.version.cuda = "13.0"
    torch.cuda.get_rng_state = lambda *device: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda *arguments: None
    for name in ("getDevice", "getCurrentRawStream", "maybeExchangeDevice", "exchangeDevice"):
        vars(torch._C)[f"_cuda_{name}"] = lambda *arguments: 0
    for name in ("_exchange_device", "_maybe_exchange_device"):
        setattr(torch.cuda, name, lambda device: 0)
    answers = {
        "is_available": True, "is_triton_capable": True, "raise_if_triton_unavailable": None,
        "current_device": 0,
        "get_raw_stream": 0, "get_compute_capability": capability,
        "get_device_properties": properties,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(CudaInterface, name, staticmethod(_build_answer(answer)))
    for name in ("current_device", "get_device_properties"):
        setattr(CudaInterface.Worker, name, staticmethod(_build_answer(answers[name])))
    setattr(torch.cuda, "get_device_properties", _build_answer(properties))  # noqa: B010 # mypy knows its type
    driver = type("PretendedDriver", (), {
        "get_current_target": lambda self: GPUTarget("cuda", capability, 32),
        "get_current_device": lambda self: 0, "get_current_stream": lambda self, *device: 0,
        "get_active_torch_device": lambda self: torch.device("cuda", 0),
        "get_device_interface": lambda self: torch.cuda,
    })  # fmt: skip
    triton.runtime.driver.set_active(driver())


def _build_answer(value: Any) -> Callable[..., Any]:
    return lambda *arguments: value


def list_parts() -> dict[str, Callable[[], tuple[Callable[..., Any], list[Any]]]]:
    """Return builders of functions of fake tensors, with their inputs."""
    import torch

    from llmsys.config.feed_forward import SwigluConfig
    from llmsys.config.moe import MoeConfig
    from llmsys.model.feed_forward import apply_gated_activation
    from llmsys.model.normalization import RMSNorm
    from llmsys.model.router import TopKRouter

    def build_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    def build_norm() -> tuple[Callable[..., Any], list[Any]]:
        norm = RMSNorm(WIDTH, 1e-5)

        def add_and_normalize(
            x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor
        ) -> torch.Tensor:
            norm.weight = weight  # type: ignore[assignment]
            return norm(x + y)  # type: ignore[no-any-return]

        del norm._parameters["weight"]
        return add_and_normalize, [
            build_tensor(ROWS, WIDTH),
            build_tensor(ROWS, WIDTH),
            build_tensor(WIDTH),
        ]

    def build_activation() -> tuple[Callable[..., Any], list[Any]]:
        return lambda gate, up: apply_gated_activation(SwigluConfig(), gate, up), [
            build_tensor(ROWS, INNER) for _ in "gu"
        ]

    def build_rotation() -> tuple[Callable[..., Any], list[Any]]:
        def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            first, second = x.float().chunk(2, -1)
            return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)

        tables = [torch.empty(ROWS, 1, HEAD_DIM, device="cuda") for _ in range(2)]
        return rotate, [build_tensor(ROWS, HEADS, HEAD_DIM), *tables]

    def build_router() -> tuple[Callable[..., Any], list[Any]]:
        moe = MoeConfig(num_experts=EXPERTS, num_experts_per_tok=8, moe_intermediate_size=768)
        router = TopKRouter(WIDTH, moe)
        del router._parameters["weight"]

        def choose(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            router.weight = weight  # type: ignore[assignment]
            return router(x).weights_NK  # type: ignore[no-any-return]

        return choose, [build_tensor(ROWS, WIDTH), build_tensor(EXPERTS, WIDTH)]

    return {
        "residual sum and RMSNorm": build_norm,
        "SwiGLU": build_activation,
        "rotation": build_rotation,
        "router": build_router,
    }


def generate_kernels(build: Callable[[], tuple[Callable[..., Any], list[Any]]]) -> dict[str, str]:
    """Return the Triton sources of forward and backward of one of the parts, by kernel name."""
    import torch
    from torch._guards import TracingContext, tracing
    from torch._inductor import async_compile, compile_fx, config
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    from llmsys.dryrun.fake_cluster import build_fake_mode

    mode, sources = build_fake_mode(), dict[str, str]()

    def record_source(self: Any, name: str, source: str, device_str: str) -> Callable[..., None]:
        sources[name] = source
        return lambda *arguments, **options: None

    def run_both(*values: Any) -> Any:
        output, backward, *_ = torch.func.vjp(function, *values)
        return output, *backward(torch.ones_like(output))

    with mode:
        function, values = build()
        graph = make_fx(
            torch.func.functionalize(run_both), decomposition_table=select_decomp_table()
        )(*values)
    options = {"compile_threads": 1, "force_disable_caches": True, "fx_graph_cache": False}
    recorded = patch.object(async_compile.AsyncCompile, "triton", record_source)
    with config.patch(options), recorded, mode, tracing(TracingContext(mode)):
        compile_fx.compile_fx_inner(graph, values)
    return sources


def compile_generated_kernel(part: str, name: str, source: str, architecture: str) -> KernelUsage:
    """Compile one kernel of Inductor to PTX and cubin, and read what ptxas reports."""
    function, meta, settings = _load_kernel(name, source)
    constants = dict(meta.get("constants", {})) | settings.kwargs
    signature = {
        key: "constexpr" if key in constants else kind for key, kind in meta["signature"].items()
    }
    constants |= {
        key: None for key, kind in signature.items() if kind == "constexpr" and key not in constants
    }
    options = {"num_warps": settings.num_warps, "num_stages": settings.num_stages}
    return compile_kernel(part, function, signature, constants, options, architecture)


def _load_kernel(name: str, source: str) -> tuple[Any, dict[str, Any], Any]:
    """Return the Triton function of a source that Inductor wrote, its signature, and its first
    configuration.
    """
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    found: dict[str, Any] = {}

    def keep_function(
        size_hints: Any, configs: Any, triton_meta: Any, *rest: Any, **more: Any
    ) -> Any:
        found.update(configs=configs, meta=triton_meta)
        return lambda function: function

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with (
            patch.object(triton_heuristics, "cached_autotune", keep_function),
            patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        ):
            spec.loader.exec_module(module)
            function = getattr(module, name)
            function.src  # noqa: B018 # read while the file is there
    return function, found["meta"], found["configs"][0]


if __name__ == "__main__":
    main()
