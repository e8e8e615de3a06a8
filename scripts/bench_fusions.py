"""How close each fused operation comes to the memory's speed here, and what it keeps for the backward.

python scripts/bench_fusions.py [--only NAME] [--backends compile,triton] [--dtype fp32] [--rounds 15] [--json FILE]

For each operation and backend, forward and backward apart: the bytes it must move over the time it takes, as a share of the
copy bandwidth measured in the same rounds; and its speed over the plain reference and over PyTorch's own kernel. All contestants
of an operation take turns in every round; figures are medians over the rounds. Bytes: forward, every tensor read or written
once; backward, the upstream gradients, what was saved, and the gradients written.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusions.catalogue import OPERATIONS
from fusions.machine import probe
from fusions.parity import DEFAULTS
from fusions.registry import Facts, Request
from fusions.samples import Sample, sample
from trainer.compare.roofline import COPY, Call, Implementation, implementation, must_move, time_in_turns
from trainer.log import Log
from trainer.runtime import keep_freed_memory


@dataclass(frozen=True)
class Case:
    """One row of the table: an operation with options, its shape, and PyTorch's own form of it, if there is one."""

    label: str
    operation: str
    shape: tuple[int, ...]
    options: dict[str, Any]
    own: Callable[..., Any] | None = None


def cases(rows: int, width: int) -> list[Case]:
    """The operations at about rows x width elements: beyond the last-level cache by default."""
    gated, heads = (rows // 2, 2 * width), (rows // 512, 1, 512, width)
    tokens = (rows // 8, 8, width // 64, 64)
    return [
        Case("bias + dropout + add", "bias_dropout_add", (rows, width), {}, own_bias_dropout_add),
        Case("the same + LayerNorm", "residual_norm", (rows, width), {}, own_residual_norm),
        Case("the same + RMSNorm", "residual_norm", (rows, width), {"normalization": "RMSNorm"}, own_residual_norm),
        Case("bias + gelu_tanh", "bias_gelu", (rows, width), {"activation": "gelu_tanh"}, own_gelu),
        Case("bias + gelu", "bias_gelu", (rows, width), {"activation": "gelu"}, own_gelu),
        Case("bias + swiglu", "bias_swiglu", gated, {}, own_swiglu),
        Case("bias + geglu", "bias_geglu", gated, {}, own_geglu),
        Case("bias + squared ReLU", "squared_relu", (rows, width), {}, lambda x, b, w: F.relu(x + b).square()),
        Case("LayerNorm", "layer_norm", (rows, width), {}, lambda x, w, b, e, **_: F.layer_norm(x, x.shape[-1:], w, b, e)),
        Case("RMSNorm", "rms_norm", (rows, width), {}, lambda x, w, b, e, **_: F.rms_norm(x, x.shape[-1:], w, e)),
        Case("causal softmax", "scale_mask_softmax", heads, {"causal": True}, own_softmax),
        Case("causal softmax + dropout", "scale_mask_softmax", heads, {"causal": True, "dropout": 0.1}, own_softmax),
        Case("RoPE", "rope", tokens, {}),
        Case("bias + RoPE of packed QKV", "qkv_rope", (rows // 8, 8, width // 192, 192), {"head_dim": 64}),
        Case("MLA RoPE of the query", "mla_rope_query", tokens, {"emb_dim": 32}),
        Case("MLA RoPE, key and value", "mla_rope_key_value", (rows // 8, 8, width // 128, 128), {"emb_dim": 32}),
        *(
            Case(f"cross entropy, {n // 1024}k columns", "cross_entropy", (rows * width // n, n), {}, own_cross_entropy)
            for n in (1024, 32768, 131072)
        ),
        Case("expert indices to multi-hot", "indices_to_multihot", (rows * 8, 64), {"top_k": 8}),
        Case("routing map padding", "pad_routing_map", (rows * 8, 64), {"multiple": 16}),
        Case("AdamW", "adamw", (rows * width,), {}),
    ]


def own_bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, prob: float, training: bool, **_: Any) -> Tensor:
    """PyTorch's own operations."""
    return residual + F.dropout(x + bias, prob)


def own_residual_norm(x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, norm_bias: Any, **o: Any) -> Any:
    """PyTorch's own operations."""
    total = residual + F.dropout(x + bias, o["prob"])
    if o["rms"]:
        return total, F.rms_norm(total, total.shape[-1:], weight, o["eps"])
    return total, F.layer_norm(total, total.shape[-1:], weight, norm_bias, o["eps"])


def own_gelu(x: Tensor, bias: Tensor, activation: str) -> Tensor:
    """PyTorch's own kernel."""
    return F.gelu(x + bias, approximate="tanh" if activation == "gelu_tanh" else "none")


def own_swiglu(x: Tensor, bias: Tensor, weights: Any, **_: Any) -> Tensor:
    """PyTorch's own operations."""
    gate, linear = (x + bias).chunk(2, -1)
    return F.silu(gate) * linear


def own_geglu(x: Tensor, bias: Tensor, weights: Any, **_: Any) -> Tensor:
    """PyTorch's own operations."""
    gate, linear = (x + bias).chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * linear


def own_softmax(scores: Tensor, mask: Any, **o: Any) -> Tensor:
    """PyTorch's own kernel after a masked fill."""
    sq, sk = scores.shape[-2:]
    future = torch.ones(sq, sk, dtype=torch.bool, device=scores.device).triu(sk - sq + 1)
    probs = torch.softmax(scores.masked_fill(future, float("-inf")), -1)
    return F.dropout(probs, o["dropout_prob"]) if o["dropout_prob"] else probs


def own_cross_entropy(logits: Tensor, target: Tensor, group: Any, **_: Any) -> Tensor:
    """PyTorch's own kernel."""
    return F.cross_entropy(logits, target, reduction="none")


def measure(case: Case, dtype: str, backends: list[str], rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Rows for each backend, forward and backward."""
    facts = Facts(probe(device.type), dtype, 1, False, case.shape, tuple((DEFAULTS | case.options).items()))
    candidates = Request("", "", OPERATIONS[case.operation], True, facts).candidates()
    names = [n for n in candidates if n == "reference" or not backends or n in backends]
    functions = {n: OPERATIONS[case.operation].function(n) for n in names} | ({"pytorch": case.own} if case.own else {})
    call = sample(case.operation, facts, device)
    contestants = {name: implementation(function, call) for name, function in functions.items()}
    source = torch.randn(case.shape if case.operation != "adamw" else 1 << 22, device=device)
    target = torch.empty_like(source)
    copy = {COPY: lambda: target.copy_(source)}
    rows = []
    for part in ("forward", "backward"):
        calls: dict[str, Call] = {n: c.forward if part == "forward" else c.backward for n, c in contestants.items()}  # pyright: ignore
        if any(c is None for c in calls.values()):
            continue
        times = time_in_turns(copy | calls, rounds, device)
        for name in names:
            if name != "reference":
                moved = must_move(part, call, contestants[name], case.operation)
                rows.append(row(case, part, name, moved, times, 2 * source.nbytes, contestants, call))
    return rows


def row(
    case: Case, part: str, name: str, moved: int, times: dict[str, list[float]], copied: int,
    contestants: dict[str, Implementation], call: Sample,
) -> dict[str, Any]:  # fmt: skip
    """One line of the table."""

    def over(other: str) -> float | None:
        if other not in times:
            return None
        return statistics.median(o / t for o, t in zip(times[other], times[name], strict=True))

    shares = [c * moved / copied / t for c, t in zip(times[COPY], times[name], strict=True)]
    elements = call.leaves()[0].numel() if call.leaves() else 1
    return {
        "operation": case.label,
        "part": part,
        "backend": name,
        "ms": statistics.median(times[name]) * 1e3,
        "gigabytes_per_second": moved / statistics.median(times[name]) / 1e9,
        "share_of_copy_bandwidth": statistics.median(shares),
        "over_reference": over("reference"),
        "over_pytorch": over("pytorch"),
        "saved_bytes_per_element": contestants[name].saved_bytes / elements,
        "saved_by_reference": contestants["reference"].saved_bytes / elements,
        "saved_by_pytorch": contestants["pytorch"].saved_bytes / elements if "pytorch" in contestants else None,
    }


def show(log: Log, rows: list[dict[str, Any]], title: str) -> None:
    """The roofline table and the memory table."""

    def times(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}x"

    header = ("operation", "part", "backend", "ms", "GB/s", "of copy", "over reference", "over PyTorch")
    cells = [
        (r["operation"], r["part"], r["backend"], f"{r['ms']:.2f}", f"{r['gigabytes_per_second']:.1f}",
         f"{r['share_of_copy_bandwidth']:.0%}", times(r["over_reference"]), times(r["over_pytorch"]))
        for r in rows
    ]  # fmt: skip
    log.table(title, header, cells)
    memory = [
        (r["operation"], r["backend"], f"{r['saved_bytes_per_element']:.2f}", f"{r['saved_by_reference']:.2f}",
         "" if r["saved_by_pytorch"] is None else f"{r['saved_by_pytorch']:.2f}")
        for r in rows if r["part"] == "backward"
    ]  # fmt: skip
    log.table(
        "Kept for the backward, bytes per element of the first input (an input that is kept is counted)",
        ("operation", "backend", "fused", "reference", "PyTorch"),
        memory,
    )


def main() -> int:
    """Measure all cases and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="default: 4096 on a CPU, 16384 on a GPU")
    parser.add_argument("--width", type=int, help="default: 1024 on a CPU, 4096 on a GPU")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="default: fp32 on a CPU, bf16 on a GPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backends", default="", help="only these, comma-separated")
    parser.add_argument("--json", help="also write the rows there")
    parser.add_argument("--only", default="", help="only operations whose name contains this")
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if gpu else "cpu"), arguments.dtype or ("bf16" if gpu else "fp32")
    rows_, width = arguments.rows or (16384 if gpu else 4096), arguments.width or (4096 if gpu else 1024)
    log, rows = Log(rank=0), []
    if not gpu:
        log.line(keep_freed_memory())
    for case in cases(rows_, width):
        if arguments.only in case.label:
            rows += measure(case, dtype, [b for b in arguments.backends.split(",") if b], arguments.rounds, device)
            if arguments.json:  # after each operation, so that an end before the end keeps what there is
                facts = {"torch": torch.__version__, "dtype": dtype, "rows": rows}
                Path(arguments.json).write_text(json.dumps(facts, indent=1))
    threads = "" if gpu else f", {torch.get_num_threads()} threads"
    show(log, rows, f"{dtype}, {rows_} x {width}{threads}, medians of {arguments.rounds} rounds")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
