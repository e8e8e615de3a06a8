"""What this machine can do: device, compiler, matrix-product rate, copy bandwidth, allocator.  python scripts/doctor.py"""

from __future__ import annotations

import argparse

OPTIONAL = ("triton", "apex", "transformer_engine")


def main() -> int:
    """Probe, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", action="store_true", help="print only the precision that is fastest here")
    parser.add_argument("--processes", action="store_true", help="print only how many processes the quickstart should start")
    arguments = parser.parse_args()
    import torch

    from fusions.machine import probe
    from trainer.log import Log
    from trainer.runtime import PRECISIONS, fastest_precision, keep_freed_memory, measure_copy_bandwidth, measure_gemm_rate

    machine = probe()
    device = torch.device(machine.device)
    if arguments.precision:
        print(fastest_precision(device))
        return 0
    if arguments.processes:
        # Two processes of tensor parallel show the whole scheme on a CPU; a single GPU has room for one.
        print(min(2, torch.cuda.device_count()) if device.type == "cuda" else 2)
        return 0
    allocator = keep_freed_memory() if device.type == "cpu" else "allocator settings: not needed on a GPU"
    rates = {name: measure_gemm_rate(device, dtype, 256) / 1e9 for name, dtype in PRECISIONS.items()}
    rows = [
        (
            "device",
            torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        ),
        ("torch", machine.torch_version),
        ("compile backend", machine.compile_problem or "works"),
        *((f"{name} backend", machine.import_problem(name) or f"importable, {machine.version(name)}") for name in OPTIONAL),
        *((f"matrix product {name}", f"{rate:,.0f} GFLOP/s") for name, rate in rates.items()),
        ("fastest precision", fastest_precision(device)),
        ("copy bandwidth", f"{measure_copy_bandwidth(device) / 1e9:,.1f} GB/s, read and write counted"),
        ("allocator", allocator),
    ]
    Log(rank=0).table("This machine", ("what", "value"), rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
