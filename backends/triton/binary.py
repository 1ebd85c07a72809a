"""One Triton kernel compiled for one target, where there need be no such GPU, and what it takes."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.errors import TritonError

from archir.diagnostics import PassError, UnsupportedError, nearest
from backends.triton.configurations import OPTIONS
from backends.triton.kernel import Kernel, Skeleton, loc_of

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_ALIGNED = 16  # bytes of an address, and what Triton asks of an integer


@dataclass(frozen=True)
class Binary:
    """A kernel's machine code for a target.

    suffix: of its file.  registers: per thread.  spill_bytes: of a thread's memory beside its
    registers, where those that do not fit lie.  shared_bytes: that a launch asks for per program.
    """

    code: bytes
    suffix: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    warps: int
    stages: int


def check_targets(names: list[str]) -> None:
    """Raises UnsupportedError for a target nobody compiles for, or an interpreted Triton."""
    for name in names:
        if name not in TARGETS:
            raise UnsupportedError(
                f"there is no target {name!r}",
                code="target",
                facts=[f"targets: {', '.join(TARGETS)}"],
                next=nearest(name, [*TARGETS]),
            )
    if knobs.runtime.interpret:
        raise UnsupportedError(
            "Triton interprets kernels in this process, and what it interprets it cannot compile",
            code="target-interpreted",
            facts=["TRITON_INTERPRET is set"],
            next="unset it: env -u TRITON_INTERPRET archir compile …",
        )


def config_for(skeleton: Skeleton, target: str) -> dict[str, int]:
    """How a kernel is launched on a target."""
    return skeleton.configs.get(target, skeleton.configs["any"])


def compile_kernel(kernel: Kernel, fn: Any, target: str, layout: str) -> Binary:
    """Compiles the kernel `fn` of a loaded kernel file.

    Addresses, and integers that are multiples of 16 where tensors are contiguous, are taken for
    aligned, as when it is compiled at a launch.
    """
    skeleton = kernel.skeleton
    config = config_for(skeleton, target)
    options = {k: v for k, v in config.items() if k in OPTIONS}
    blocks = {k: v for k, v in config.items() if k not in OPTIONS}
    constants = skeleton.constants(blocks, layout)
    types = {a.name: a.type for a in skeleton.arguments}
    signature = {n: "constexpr" if n in constants else types[n] for n in fn.arg_names}
    multiples = {a.name: a.multiple for a in skeleton.arguments}
    aligned = {
        (i,): [["tt.divisibility", _ALIGNED]]
        for i, name in enumerate(fn.arg_names)
        if signature[name].startswith("*") or multiples.get(name, 1) % _ALIGNED == 0
    }
    source = ASTSource(fn, signature, constants, aligned)
    try:
        made = triton.compile(source, target=TARGETS[target], options=options)
    except TritonError as error:
        said = getattr(error, "error_message", None) or str(error.__cause__ or error)
        raise PassError(
            f"Triton does not compile {kernel.name} for {target}",
            code="target-compile",
            loc=loc_of(skeleton.op, skeleton.module),
            facts=[line.strip() for line in said.splitlines() if line.strip()][:6],
            next="try other sizes; if these are sound, report the rule or spec and this message",
        ) from error
    suffix = "cubin" if "cubin" in made.asm else "hsaco"
    registers, spilled = _of_nvidia(made.asm) if suffix == "cubin" else _of_amd(made.asm)
    return Binary(
        code=made.asm[suffix],
        suffix=suffix,
        registers=registers,
        spill_bytes=spilled,
        shared_bytes=made.metadata.shared,
        warps=made.metadata.num_warps,
        stages=made.metadata.num_stages,
    )


def _of_nvidia(asm: Mapping[str, Any]) -> tuple[int, int]:
    """Registers and bytes spilled, told by `cuobjdump`, which comes with Triton.

    A spilled register lies on the stack, so STACK and LOCAL both count.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        tool = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(tool, capture_output=True, text=True, check=True)
    found = {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", told.stdout + told.stderr)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def _of_amd(asm: Mapping[str, Any]) -> tuple[int, int]:
    """Vector registers (of both files) and bytes of scratch, from the assembly's metadata."""
    found = {k: int(v) for k, v in re.findall(r"\.(\w+):\s+(\d+)\s*$", asm["amdgcn"], re.M)}
    return found["vgpr_count"], found["private_segment_fixed_size"]
