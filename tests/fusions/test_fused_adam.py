"""AdamW: every backend against torch's own in fp64; clipping, the skipped step, and the compute copies."""

from __future__ import annotations

import pytest
import torch

from fusions.fused_adam import BACKENDS, Group
from fusions.parity import adamw_differences

SHAPES = [(5, 7), (1,), (3000,), (2, 3, 4)]
HERE = ["reference", "torch", "triton"]


def group(dtype: torch.dtype = torch.float32, copies: torch.dtype | None = None) -> Group:
    generator = torch.Generator().manual_seed(0)
    tensors = [[torch.randn(s, generator=generator).to(dtype) for s in SHAPES] for _ in range(2)]
    zeros = [[torch.zeros(s, dtype=dtype) for s in SHAPES] for _ in range(2)]
    steps = [torch.zeros((), dtype=torch.float32) for _ in SHAPES]
    return Group(*tensors, *zeros, steps, 0.1, [t.to(copies) for t in tensors[0]] if copies else [])


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("copies", [None, torch.bfloat16, torch.float16])
def test_three_steps_are_those_of_torch_in_fp64(backend: str, copies: torch.dtype | None) -> None:
    ours, exact = group(copies=copies), [torch.nn.Parameter(p.double()) for p in group().parameters]
    adamw = torch.optim.AdamW(exact, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    for scale in (1.0, 4.0, 2.0):
        for p, g in zip(exact, ours.gradients, strict=True):
            p.grad = g.double() / scale
        adamw.step()
        BACKENDS["adamw"][backend](ours, 1e-2, (0.9, 0.95), 1e-8, torch.tensor(scale), torch.tensor(0.0))
        ours.gradients = [g * 0.5 + 0.1 for g in group().gradients]
    for p, true in zip(ours.parameters, exact, strict=True):
        torch.testing.assert_close(p.double(), true.detach(), rtol=2e-6, atol=2e-7)
    for p, copy in zip(ours.parameters, ours.copies, strict=bool(copies)):
        rounding = torch.finfo(copies).eps if backend == "triton" else 0.0  # Triton's interpreter truncates to bf16
        torch.testing.assert_close(copy.float(), p.to(copies).float(), rtol=rounding, atol=0)
    assert [float(s) for s in ours.steps] == [3.0] * len(SHAPES)


@pytest.mark.parametrize("backend", HERE)
def test_the_check_for_a_gpu_finds_nothing_here(backend: str) -> None:
    assert adamw_differences(backend, "cpu") == []


@pytest.mark.parametrize("backend", HERE)
def test_a_skipped_step_changes_nothing_even_where_the_gradient_is_nan(backend: str) -> None:
    ours, before = group(), group()
    ours.gradients = [torch.full_like(g, torch.nan) for g in ours.gradients]
    BACKENDS["adamw"][backend](ours, 1e-2, (0.9, 0.95), 1e-8, torch.tensor(1.0), torch.tensor(1.0))
    for kind in ("parameters", "exp_avgs", "exp_avg_sqs", "steps"):
        assert all(torch.equal(new, old) for new, old in zip(getattr(ours, kind), getattr(before, kind), strict=True))
