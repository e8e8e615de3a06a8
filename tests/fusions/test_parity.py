"""One generated suite: operation x backend x dtype x shape x layout; output and every gradient against fp64 (fusions/parity.py).

By default each case runs in fp32, and the first of each operation in bf16; `-m parity` runs the whole product. Triton's
kernels run on a GPU, or in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fusions import fused_bias_dropout, fused_softmax
from fusions.catalogue import OPERATIONS
from fusions.machine import probe
from fusions.parity import CASES, Comparison, comparisons, differences
from fusions.random import random_mask_key
from fusions.registry import Facts
from fusions.samples import sample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MACHINE = dataclasses.replace(probe(DEVICE), triton_interpreted=True)


def check(case: Comparison) -> None:
    obstacles = case.obstacles(MACHINE)
    if obstacles:
        pytest.skip("; ".join(map(str, obstacles)))
    assert differences(case, MACHINE, DEVICE) == []


def here(whole: bool) -> list[Comparison]:
    """Without those whose kernels are for another device: they would all be skipped."""
    return [c for c in comparisons(whole) if DEVICE == "cuda" or c.backend not in ("apex", "transformer_engine")]


@pytest.mark.parametrize("case", here(whole=False), ids=str)
def test_parity(case: Comparison) -> None:
    check(case)


@pytest.mark.parity
@pytest.mark.parametrize("case", here(whole=True), ids=str)
def test_whole_parity(case: Comparison) -> None:
    check(case)


def test_every_operation_has_a_case() -> None:
    assert {operation for operation, _, _ in CASES} == set(OPERATIONS) - {"adamw"}  # tests/fusions/test_fused_adam.py


@pytest.mark.parametrize("backend", ["reference", "compile", "triton"])
def test_dropout_masks_are_equal_in_every_backend(backend: str) -> None:
    if backend == "triton" and probe(DEVICE).import_problem("triton"):
        pytest.skip("no Triton")
    x = torch.ones(7, 3, 129, device=DEVICE)
    key = random_mask_key(x)
    expected = fused_bias_dropout.reference(x, None, torch.zeros_like(x), 0.3, True, key)
    ours = fused_bias_dropout.BACKENDS["bias_dropout_add"][backend](x, None, torch.zeros_like(x), 0.3, True, key)
    assert torch.equal(ours == 0, expected == 0) and 0.2 < float((ours == 0).float().mean()) < 0.4
    scores = torch.zeros(2, 3, 9, 33, device=DEVICE)
    key = random_mask_key(scores)
    expected = fused_softmax.reference(scores, dropout_prob=0.3, mask_key=key)
    ours = fused_softmax.BACKENDS["scale_mask_softmax"][backend](scores, dropout_prob=0.3, mask_key=key)
    assert torch.equal(ours == 0, expected == 0)


@pytest.mark.parametrize("operation", sorted({operation for operation, _, _ in CASES}))
def test_an_empty_input_has_an_obstacle_and_the_reference_takes_it(operation: str) -> None:
    shape = next(shape for name, shape, _ in CASES if name == operation)
    options = {"head_dim": 12, "hidden": 16, "inputs": 8, "top_k": 3, "emb_dim": 6}
    facts = Facts(MACHINE, "fp32", 1, False, (0, *shape[1:]), tuple(options.items()))
    for backend in OPERATIONS[operation].backends:
        assert any(o.kind == "shape" for o in backend.all_obstacles(facts))
    if operation == "pad_routing_map":
        return
    call = sample(operation, facts, DEVICE)
    out = OPERATIONS[operation].function("reference")(*call.args, **call.kwargs)
    out = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward([o for o in out if o.requires_grad], [torch.ones_like(o) for o in out if o.requires_grad])
