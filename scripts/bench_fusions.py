"""How close each fused operation comes to the memory's speed here.  python scripts/bench_fusions.py [--json F] [--rounds 25]

For each operation, forward and backward apart: the bytes it must move, over the time it takes, as a share of the copy
bandwidth measured in the same rounds; and its speed over the plain reference and over PyTorch's own kernel. All contestants of
a row take turns in every round; figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusions import fused_bias_dropout, fused_bias_gelu, fused_cross_entropy, fused_layer_norm, fused_softmax
from fusions.random import dropout, random_mask_key
from trainer.log import Log
from trainer.runtime import keep_freed_memory, synchronise

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One operation: its three implementations as functions of the same inputs, and the tensors it must move."""

    name: str
    inputs: list[Tensor]
    contestants: dict[str, Callable[..., Tensor]]
    forward_tensors: float  # tensors of the first input's size read or written, at the least
    backward_tensors: float


def cases(device: torch.device, rows: int, width: int) -> list[Case]:
    """The operations at `rows` x `width` elements: beyond the last-level cache by default."""
    x = torch.randn(rows, width, device=device)
    target = torch.randint(0, width, (rows,), device=device)
    cross_entropy = Case(
        "cross entropy",
        [x],
        {
            "fused": lambda x: fused_cross_entropy.compiled(x, target, None),
            "reference": lambda x: fused_cross_entropy.reference(x, target, None),
            "pytorch": lambda x: F.cross_entropy(x, target, reduction="none"),
        },
        forward_tensors=1,
        backward_tensors=2,
    )
    gelus = [gelu_case(x, activation) for activation in ("gelu_tanh", "gelu")]
    return [*dropout_cases(x), *gelus, *norm_cases(x), *softmax_cases(device, rows, width), cross_entropy]


def dropout_cases(x: Tensor) -> list[Case]:
    """The reference's dropout by itself, and bias + dropout + add."""
    key, bias, residual = random_mask_key(x), torch.randn_like(x[0]), torch.randn_like(x)
    alone = {
        "fused": lambda x: dropout(x, 0.1, key),
        "reference": lambda x: dropout(x, 0.1, key),
        "pytorch": lambda x: F.dropout(x, 0.1),
    }
    added = {
        "fused": lambda x, b, r: fused_bias_dropout.compiled(x, b, r, 0.1, True, key),
        "reference": lambda x, b, r: fused_bias_dropout.reference(x, b, r, 0.1, True, key),
        "pytorch": lambda x, b, r: r + F.dropout(x + b, 0.1),
    }
    return [
        Case("dropout alone (the eager reference's)", [x], alone, 2, 2),
        Case("bias + dropout + add", [x, bias, residual], added, 3, 2),
    ]


def gelu_case(x: Tensor, activation: str) -> Case:
    """bias + one of the GELUs."""
    own = "tanh" if activation == "gelu_tanh" else "none"
    contestants = {
        "fused": lambda x, b: fused_bias_gelu.compiled(x, b, activation),
        "reference": lambda x, b: fused_bias_gelu.reference(x, b, activation),
        "pytorch": lambda x, b: F.gelu(x + b, approximate=own),
    }
    return Case(f"bias + {activation}", [x, torch.randn_like(x[0])], contestants, 2, 3)


def norm_cases(x: Tensor) -> list[Case]:
    """LayerNorm and RMSNorm."""
    weight, bias, width = torch.randn_like(x[0]), torch.randn_like(x[0]), x.shape[-1]
    layer_norm = {
        "fused": lambda x, w, b: fused_layer_norm.compiled_layer_norm(x, w, b, 1e-5),
        "reference": lambda x, w, b: fused_layer_norm.reference_layer_norm(x, w, b, 1e-5),
        "pytorch": lambda x, w, b: F.layer_norm(x, (width,), w, b),
    }
    rms_norm = {
        "fused": lambda x, w: fused_layer_norm.compiled_rms_norm(x, w, None, 1e-5),
        "reference": lambda x, w: fused_layer_norm.reference_rms_norm(x, w, None, 1e-5),
        "pytorch": lambda x, w: F.rms_norm(x, (width,), w, 1e-5),
    }
    return [Case("LayerNorm", [x, weight, bias], layer_norm, 2, 3), Case("RMSNorm", [x, weight], rms_norm, 2, 3)]


def softmax_cases(device: torch.device, rows: int, width: int) -> list[Case]:
    """Causal softmax of scores [rows / 512, 1, 512, width], without and with dropout."""
    scores = torch.randn(rows // 512, 1, 512, width, device=device)
    key = random_mask_key(scores)
    future = torch.ones(512, width, dtype=torch.bool, device=device).triu(width - 511)

    def own(scores: Tensor) -> Tensor:
        return torch.softmax(scores.masked_fill(future, float("-inf")), -1)

    plain = {
        "fused": lambda s: fused_softmax.compiled(s, causal=True),
        "reference": lambda s: fused_softmax.reference(s, causal=True),
        "pytorch": own,
    }
    dropped = {
        "fused": lambda s: fused_softmax.compiled(s, causal=True, dropout_prob=0.1, mask_key=key),
        "reference": lambda s: fused_softmax.reference(s, causal=True, dropout_prob=0.1, mask_key=key),
        "pytorch": lambda s: F.dropout(own(s), 0.1),
    }
    return [Case("causal softmax", [scores], plain, 2, 3), Case("causal softmax + dropout", [scores], dropped, 3, 3)]


def measure(case: Case, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Rows for forward and backward."""
    source, copy = case.inputs[0], torch.empty_like(case.inputs[0])
    forward: dict[str, Call] = {"copy": lambda: copy.copy_(source)}
    backward: dict[str, Call] = {"copy": lambda: copy.copy_(source)}
    for name, function in case.contestants.items():
        leaves = [t.clone().requires_grad_() for t in case.inputs]
        out = function(*leaves)
        grad = torch.randn_like(out)
        forward[name] = lambda f=function, leaves=leaves: f(*leaves)
        backward[name] = lambda o=out, g=grad, leaves=leaves: torch.autograd.grad(o, leaves, g, retain_graph=True)
    rows = []
    for part, calls, tensors in (("forward", forward, case.forward_tensors), ("backward", backward, case.backward_tensors)):
        times = take_turns(calls, rounds, device)
        median = {name: statistics.median(values) for name, values in times.items()}
        floor = statistics.median(c * tensors / 2 / f for c, f in zip(times["copy"], times["fused"], strict=True))
        rows.append(
            {
                "operation": case.name,
                "part": part,
                "fused_ms": median["fused"] * 1e3,
                "gigabytes_per_second": tensors * source.nbytes / median["fused"] / 1e9,
                "share_of_copy_bandwidth": floor,
                "over_reference": statistics.median(r / f for r, f in zip(times["reference"], times["fused"], strict=True)),
                "over_pytorch": statistics.median(p / f for p, f in zip(times["pytorch"], times["fused"], strict=True)),
            }
        )
    return rows


def take_turns(calls: dict[str, Call], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each call in each round, every other round backwards; two more rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items() if number % 2 else reversed(calls.items()):
            synchronise(device)
            begin = time.perf_counter()
            result = call()
            synchronise(device)
            if number >= 2:
                times[name].append(time.perf_counter() - begin)
            del result
    return times


def main() -> int:
    """Measure all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", help="also write the rows there")
    parser.add_argument("--only", default="", help="only operations whose name contains this")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    log = Log(rank=0)
    if device.type == "cpu":
        log.line(keep_freed_memory())
    rows = []
    for case in cases(device, arguments.rows, arguments.width):
        if arguments.only in case.name:
            rows += measure(case, arguments.rounds, device)
    header = ("operation", "part", "fused ms", "GB/s", "of copy", "over reference", "over PyTorch")
    cells = [
        (
            r["operation"],
            r["part"],
            f"{r['fused_ms']:.2f}",
            f"{r['gigabytes_per_second']:.1f}",
            f"{r['share_of_copy_bandwidth']:.0%}",
            f"{r['over_reference']:.2f}x",
            f"{r['over_pytorch']:.2f}x",
        )
        for r in rows
    ]
    log.table(
        f"fp32, {arguments.rows} x {arguments.width}, {torch.get_num_threads()} threads, medians of {arguments.rounds} rounds",
        header,
        cells,
    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
