"""Compiles every Triton kernel for an NVIDIA GPU (sm_90) as far as Triton's own IR, on a machine without one.

The interpreter accepts what the compiler does not (a name first bound in a loop and read after it, for one). Run as a script,
without TRITON_INTERPRET; prints one JSON: {kernel: [compiled, {error: cases}]}. Kernels are compiled, never launched.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
import triton.compiler.compiler as compiler
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from fusions.catalogue import OPERATIONS
from fusions.machine import probe
from fusions.parity import comparisons, values
from fusions.registry import Facts
from fusions.samples import DTYPES, sample

found: dict[str, tuple[list[str], dict[str, list[str]]]] = {}
case_now = ""


class NoGPU:
    """What compilation asks a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> None:
        return None


class Compiled:
    """In place of a kernel that would be loaded onto a GPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


all_stages = CUDABackend.add_stages
compile_and_run = JITFunction.run


def only_ttir(self: Any, stages: Any, *rest: Any, **options: Any) -> None:
    every: dict[str, Any] = {}
    all_stages(self, every, *rest, **options)
    stages["ttir"] = every["ttir"]


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
    compiled, failed = found.setdefault(f"{self.fn.__module__}.{self.fn.__name__}", ([], {}))
    try:
        compile_and_run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(case_now)
    except Exception as error:
        failed.setdefault(f"{type(error).__name__}: {str(error)[-400:]}", []).append(case_now)


def first_config(self: Any, *args: Any, **kwargs: Any) -> None:
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    self.fn.run(*args, **{**kwargs, **self.configs[0].all_kwargs()})


def main() -> None:
    global case_now
    driver.set_active(NoGPU())
    CUDABackend.add_stages, JITFunction.run, Autotuner.run = only_ttir, compile_only, first_config
    compiler.CompiledKernel = Compiled
    machine = dataclasses.replace(probe("cpu"), device="cuda")
    for case in comparisons(whole=False):
        if case.backend == "triton":
            case_now = str(case)
            call = sample(case.operation, case.facts(machine), "cpu")
            values(OPERATIONS[case.operation].function("triton"), call, DTYPES[case.dtype], "contiguous")
    case_now = "adamw"
    call = sample("adamw", Facts(machine, "fp32", 1, False, (3000,)), "cpu")
    call.args[0].copies = [p.bfloat16() for p in call.args[0].parameters]
    OPERATIONS["adamw"].function("triton")(*call.args)
    print(json.dumps({name: [len(compiled), failed] for name, (compiled, failed) in found.items()}))


if __name__ == "__main__":
    main()
