"""What this machine can run, found without importing torch, once per process."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
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
    import_problems: tuple[tuple[str, str], ...] = ()  # (module, why it can't be imported, "" where it can)
    versions: tuple[tuple[str, str], ...] = ()  # (package, version) of the optional packages
    device_name: str = ""  # of the first GPU
    triton_interpreted: bool = False  # TRITON_INTERPRET=1: Triton's kernels run on any device, slowly

    def import_problem(self, module: str) -> str:
        """Why an optional module can't be imported; "" where it can."""
        return dict(self.import_problems).get(module, f"{module} not importable (No module named {module!r})")

    def version(self, package: str) -> str:
        """The version of an optional package, or "not installed"."""
        return dict(self.versions).get(package, "not installed")


OPTIONAL_MODULES = (
    "triton", "transformer_engine", "apex", "amp_C", "fused_layer_norm_cuda", "fast_layer_norm",
    "scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda", "generic_scaled_masked_softmax_cuda",
    "scaled_softmax_cuda", "fused_rotary_positional_embedding", "fused_weight_gradient_mlp_cuda",
)  # fmt: skip


@functools.cache
def probe(device: str = "auto") -> Machine:
    """The machine this process runs on. `device` auto: cuda where the driver's library is and sees a GPU."""
    device = ("cuda" if _cuda_devices() else "cpu") if device == "auto" else device
    return Machine(
        device,
        compile_problem() if device == "cpu" else launcher_problem(),
        _version("torch"),
        tuple((name, import_problem(name)) for name in OPTIONAL_MODULES),
        tuple((name, _version(name)) for name in ("triton", "transformer_engine", "apex")),
        _cuda_name() if device == "cuda" else "",
        os.environ.get("TRITON_INTERPRET") == "1",
    )


@functools.cache
def import_problem(module: str) -> str:
    """Why `module` can't be imported, with the import's own words; "" where it can. An absent one costs no import."""
    try:
        if importlib.util.find_spec(module) is None:
            return f"{module} not importable (No module named {module!r})"
        if module == "apex" and importlib.util.find_spec("apex.normalization") is None:
            return (
                f"the module apex here is not NVIDIA's Apex but the unrelated package of that name on PyPI "
                f"(apex {_version('apex')}); uninstall it and build NVIDIA's from source"
            )
        if module not in ("triton", "apex"):  # these two are known by their files; the others fail when they load
            importlib.import_module(module)
    except Exception as error:  # an extension built for another torch or CUDA fails in its own ways
        return f"{module} not importable ({type(error).__name__}: {error})"
    return ""


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
def _cuda_name() -> str:
    """The name of the first GPU, from the driver."""
    name = ctypes.create_string_buffer(100)
    try:
        driver, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        ok = driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0
        ok = ok and driver.cuDeviceGetName(name, 100, device) == 0
    except OSError:
        return ""
    return name.value.decode() if ok else ""


@functools.cache
def launcher_problem() -> str:
    """Why Triton, and so Inductor, can't build its launchers for a GPU here, or "": they are C that includes Python.h."""
    compiler = next((path for name in (os.environ.get("CC", "gcc"), "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        return "no C compiler (gcc or clang is not on PATH); install one or set CC"
    return _cant_build(compiler, "#include <Python.h>\nint probe(void) { return 0; }\n", "probe.c", [])


@functools.cache
def compile_problem() -> str:
    """Why torch.compile can't build CPU kernels here, or "".

    Inductor writes C++ that includes Python.h and OpenMP, and calls $CXX (default g++); the probe compiles such a file.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return f"no C++ compiler ({os.environ.get('CXX', 'g++')} is not on PATH); install g++ or set CXX"
    source = '#include <Python.h>\n#include <omp.h>\nextern "C" int probe() { return omp_get_max_threads(); }\n'
    return _cant_build(compiler, source, "probe.cpp", ["-fopenmp"])


def _cant_build(compiler: str, source: str, name: str, options: list[str]) -> str:
    """Why the compiler refuses the source, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, name)
        file.write_text(source)
        command = [compiler, "-fsyntax-only", *options, f"-I{sysconfig.get_paths()['include']}", str(file)]
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
