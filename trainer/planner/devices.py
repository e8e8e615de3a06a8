"""What devices can do: datasheet peaks, which no program reaches, or rates measured by whoever has one."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch

from trainer.errors import UserError
from trainer.runtime import PRECISIONS, measure_copy_bandwidth, measure_gemm_rate

_A100 = "NVIDIA A100 datasheet (80 GB SXM), DGX A100 (one 200 Gb/s adapter per GPU)"
_H100 = "NVIDIA H100 datasheet (SXM5, without sparsity), DGX H100 (one 400 Gb/s adapter per GPU)"
_H200 = "NVIDIA H200 datasheet (SXM, without sparsity), DGX H200 (one 400 Gb/s adapter per GPU)"
_B200 = "NVIDIA HGX B200 and DGX B200 datasheets (per GPU, without sparsity; one 400 Gb/s adapter per GPU)"


@dataclass(frozen=True)
class Device:
    """Rates of one device. Links: what goes out of it, one direction; all of one node's devices have a link to each other."""

    name: str
    half_tflops: float  # matrix products in bf16 or fp16, 10^12 FLOP/s
    fp32_tflops: float  # in fp32 proper, which is PyTorch's default (no TF32)
    memory_gbs: float  # memory bandwidth, 10^9 bytes/s
    memory_gib: float
    link_gbs: float  # to another device of the node (NVLink), 10^9 bytes/s
    network_gbs: float  # to another node, per device, 10^9 bytes/s
    per_node: int
    source: str

    def holds(self, ranks: int, world_size: int) -> bool:
        """Whether groups of so many neighbours each lie within one node."""
        return world_size <= self.per_node or self.per_node % ranks == 0

    def gemm_rate(self, precision: str) -> float:
        """FLOP/s of matrix products."""
        return 1e12 * (self.fp32_tflops if precision == "fp32" else self.half_tflops)


DEVICES = {
    device.name: device
    for device in (
        Device("a100-80g", 312, 19.5, 2039, 80e9 / 2**30, 300, 25, 8, _A100),
        Device("h100-sxm", 989.4, 66.9, 3350, 80e9 / 2**30, 450, 50, 8, _H100),
        Device("h200-sxm", 989.4, 66.9, 4800, 141e9 / 2**30, 450, 50, 8, _H200),
        Device("b200", 2250, 80, 8000, 180e9 / 2**30, 900, 50, 8, _B200),
    )
}
NAMES = (*DEVICES, "cpu")
RATES = tuple(f.name for f in fields(Device) if f.name not in ("name", "source"))


def find_device(name: str, overrides: list[str]) -> Device:
    """A device of the table, or this machine's CPU, measured; `overrides` RATE=VALUE. Raises UserError for what isn't a rate."""
    device = this_cpu() if name == "cpu" else DEVICES[name]
    for override in overrides:
        rate, _, value = override.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        whole = rate == "per_node"
        if rate not in RATES or not 0 < number < math.inf or (whole and number != int(number)):
            kind = "a whole number above 0" if whole else "a positive number"
            raise UserError(f"--rate {override}: expected RATE={kind}, RATE one of {', '.join(RATES)}")
        device = replace(device, **{rate: int(number) if whole else number})
        device = replace(device, source=f"{device.source}; {override} as given")
    return device


def this_cpu() -> Device:
    """One process with all of this machine's threads. Links are copies in memory: two for each byte that is sent."""
    cpu = torch.device("cpu")
    rates = {name: measure_gemm_rate(cpu, dtype) / 1e12 for name, dtype in PRECISIONS.items() if name != "fp16"}
    copied = measure_copy_bandwidth(cpu) / 1e9
    with open("/proc/meminfo") as lines:
        total = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal"))
    words = "measured just now: products of 1024 x 1024, a copy of 64 MiB; links guessed as a quarter of that copy"
    return Device("cpu", rates["bf16"], rates["fp32"], copied, total / 2**20, copied / 4, copied / 4, 2**20, words)
