"""Triton kernels as cubin on a machine without a GPU, and the resources that ptxas reports."""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Architecture → device profile, and its compute capability times ten.
ARCHITECTURES = {"sm_80": ("a100-80gb", 80), "sm_90": ("h100-sxm", 90), "sm_100": ("b200", 100)}


@dataclass(frozen=True)
class KernelUsage:
    """A compiled kernel. Bytes are per thread for spills, and per block for shared memory."""

    part: str
    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    ptx_bytes: int
    cubin_bytes: int


def compile_kernel(
    part: str, function: Any, signature: dict[str, str], constants: dict[str, Any],
    options: dict[str, int],
    architecture: str, aligned: Sequence[str] = (),
) -> KernelUsage:  # fmt: skip
    """Compile a Triton function to PTX and cubin, and read what ptxas reports.

    Args:
        part: what the kernel computes.
        function: the function.
        signature: type of each argument, as Triton names it.
        constants: values of constant arguments.
        options: warps and stages.
        architecture: key of `ARCHITECTURES`.
        aligned: arguments that are multiples of 16.

    Returns:
        Its resources.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    positions = {(function.arg_names.index(key),): value for key, value in constants.items()}
    divisible = {(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    compiled = triton.compile(
        ASTSource(fn=function, signature=signature, constexprs=positions, attrs=divisible),
        target=GPUTarget("cuda", ARCHITECTURES[architecture][1], 32),
        options=options,
    )
    ptx = compiled.asm["ptx"]
    report = _run_ptxas(ptx)
    registers, spilled = (
        re.findall(pattern, report) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill")
    )
    return KernelUsage(
        part, function.__name__, int(registers[0]), sum(map(int, spilled)),
        compiled.metadata.shared, len(ptx),
        len(compiled.asm["cubin"]),
    )  # fmt: skip


def compile_own_kernels(architecture: str) -> list[KernelUsage]:
    """Compile attention with keys of 192 and values of 128 channels, forward and backward, and
    the loss.
    """
    from llmsys.data.batch import IGNORED
    from llmsys.kernels.key_split import FORWARD_TILE, choose_backward_tile, choose_options
    from llmsys.model import varlen_kernel
    from llmsys.train import cross_entropy_kernel

    bf16, fp32 = ("queries", "keys", "values", "outputs", "gradients", "dk_PHK", "dv_PHV",
        "logits"), ("lse_HP",
        "delta_HP", "dq_PHK", "losses")  # fmt: skip
    tensors = (
        dict.fromkeys(bf16, "*bf16")
        | dict.fromkeys(fp32, "*fp32")
        | {"cu_lengths": "*i32", "targets": "*i64"}
    )
    kinds = tensors | dict.fromkeys(("scale", "scale_log2", "other", "extra", "z_weight"), "fp32")
    capability = divmod(ARCHITECTURES[architecture][1], 10)
    tiles = FORWARD_TILE, choose_backward_tile(capability)
    widths = {"IS_CAUSAL": True, "WIDTH_1": 128, "WIDTH_2": 64, "WIDTH_V": 128}
    ahead = [choose_options(capability, is_backward=backward) for backward in (False, True)]
    loss = {
        "IGNORED": IGNORED,
        "HAS_OTHER": True,
        "HAS_GRADIENT": True,
        "BLOCK": cross_entropy_kernel.BLOCK,
    }
    usages = []
    for part, function, constants, options in (
        (
            "attention, 192 and 128",
            varlen_kernel.compute_tile,
            widths | _name_tile(tiles[0]),
            ahead[0],
        ),
        (
            "attention, 192 and 128",
            varlen_kernel.compute_tile_gradients,
            widths | _name_tile(tiles[1]),
            ahead[1],
        ),
        ("loss", cross_entropy_kernel.compute_row, loss, cross_entropy_kernel.OPTIONS),
    ):
        signature = {
            name: "constexpr" if name in constants else kinds.get(name, "i32")
            for name in function.arg_names
        }
        # As at a launch: addresses and strides that are multiples of 16.
        aligned = [
            name
            for name in function.arg_names
            if name in tensors or name.endswith(("_row", "_head"))
        ]
        usages.append(
            compile_kernel(part, function, signature, constants, options, architecture, aligned)
        )
    return usages


def _name_tile(tile: tuple[int, int]) -> dict[str, int]:
    return {"TILE_Q": tile[0], "TILE_K": tile[1]}


def _run_ptxas(ptx: str) -> str:
    """Return the report of the ptxas that Triton ships."""
    from triton.knobs import nvidia

    target = next(iter(re.findall(r"\.target (\S+)", ptx))).rstrip(",")
    tool = nvidia.ptxas_blackwell if target.startswith("sm_10") else nvidia.ptxas
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool.path, "-v", f"--gpu-name={target}", file.name, "-o", "/dev/null"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr
