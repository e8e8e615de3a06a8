"""What this machine can run, found without importing torch, once per process."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """The facts of a machine that a backend's eligibility may depend on."""

    device: str  # cpu | cuda
    compile_problem: str  # why torch.compile can't build kernels here; "" where it can
    torch_version: str


def probe(device: str = "auto") -> Machine:
    """The machine this process runs on. `device` auto: cuda where the driver's library is and sees a GPU."""
    device = ("cuda" if _cuda_devices() else "cpu") if device == "auto" else device
    return Machine(device, compile_problem() if device == "cpu" else "", _version("torch"))


@functools.cache
def _cuda_devices() -> int:
    """GPUs that the CUDA driver sees and that this process may use; 0 where there is no driver."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        ok = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    except OSError:
        return 0
    return count.value if ok else 0


@functools.cache
def compile_problem() -> str:
    """Why torch.compile can't build CPU kernels here, or "".

    Inductor writes C++ that includes Python.h and OpenMP, and calls $CXX (default g++); the probe compiles such a file.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return f"no C++ compiler ({os.environ.get('CXX', 'g++')} is not on PATH); install g++ or set CXX"
    source = '#include <Python.h>\n#include <omp.h>\nextern "C" int probe() { return omp_get_max_threads(); }\n'
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "probe.cpp")
        file.write_text(source)
        command = [compiler, "-fsyntax-only", "-fopenmp", f"-I{sysconfig.get_paths()['include']}", str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{compiler} does not run: {error}"
    if done.returncode == 0:
        return ""
    first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
    return f"{compiler} can't build a Python extension: {first} (are the Python headers and OpenMP installed?)"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
