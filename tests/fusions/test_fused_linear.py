"""The fused linears: weight gradients that accumulate themselves (T17), and the loss from hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusions import fused_linear_cross_entropy as linear_ce
from fusions import fused_linear_wgrad as wgrad
from fusions.registry import FusionError, resolve
from models.tensor_parallel.params import ParameterGradient
from tests.distributed import run_ranks
from tests.models.build import run_config


def test_T17_four_micro_batches_with_and_without() -> None:
    plain, fused = (torch.nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6)) for _ in range(2))
    for number in range(4):
        x = torch.randn(5, 2, 6)
        torch.nn.functional.linear(x, plain).square().sum().backward()
        wgrad.addmm(x, fused, ParameterGradient(fused)).square().sum().backward()
        torch.testing.assert_close(fused.grad, plain.grad), number
    plain.grad = fused.grad = None
    x = torch.randn(5, 2, 6)
    torch.nn.functional.linear(x, plain).sum().backward()
    wgrad.addmm(x, fused, ParameterGradient(fused)).sum().backward()
    torch.testing.assert_close(fused.grad, plain.grad)  # nothing stale is left of the step before


def test_T17_a_tied_weight_gets_both_parts_once() -> None:
    plain, fused = (torch.nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6)) for _ in range(2))
    for weight, product in ((plain, wgrad.reference), (fused, wgrad.addmm)):
        hidden = torch.nn.functional.embedding(torch.tensor([[1, 3, 1]]), weight)
        product(hidden, weight, ParameterGradient(weight)).square().sum().backward()
    torch.testing.assert_close(fused.grad, plain.grad)


def test_the_drop_in_adds_to_main_grad_and_says_so() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 6))
    with pytest.raises(AttributeError, match="main_grad"):
        wgrad.linear_with_grad_accumulation(torch.randn(3, 6), weight)
    weight.main_grad = torch.ones(4, 6)
    x = torch.randn(3, 6)
    wgrad.linear_with_grad_accumulation(x, weight, torch.zeros(4)).sum().backward()
    torch.testing.assert_close(weight.main_grad, 1 + x.sum(0).expand(4, 6))
    assert weight.grad is None and weight.grad_added_to_main_grad


def test_half_precision_on_a_cpu_is_an_obstacle() -> None:
    from fusions.machine import probe
    from models.fusion_sites import fusion_requests

    config = run_config({"training.precision": "bf16"}, ("gradient_accumulation_fusion",))
    with pytest.raises(FusionError, match="bf16 on a cpu"):
        resolve(fusion_requests(config, probe("cpu")), strict=True)


def losses(hidden: Tensor, weight: Tensor, target: Tensor, function: Any, **options: Any) -> list[Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = function(hidden, weight, target, None, **options)
    (loss * torch.linspace(0.5, 2, loss.numel()).view(loss.shape)).sum().backward()
    return [loss.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100])
def test_any_chunk_gives_the_same_loss_and_gradients(monkeypatch: pytest.MonkeyPatch, rows_per_chunk: int) -> None:
    monkeypatch.setattr(linear_ce, "CHUNK_BYTES", rows_per_chunk * 21 * 4)
    hidden, weight, target = torch.randn(5, 2, 8), torch.randn(21, 8), torch.randint(0, 19, (5, 2))
    target[0, 0] = -100
    options = {"vocab_size": 19, "label_smoothing": 0.1, "z_loss": 1e-3}
    expected = losses(hidden, weight, target, linear_ce.reference, **options)
    for ours, true in zip(losses(hidden, weight, target, linear_ce.compiled, **options), expected, strict=True):
        torch.testing.assert_close(ours, true)


def test_no_tensor_of_the_size_of_all_logits_is_kept_or_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_ce, "CHUNK_BYTES", 16 * 4096 * 4)
    hidden, weight = torch.randn(256, 8, requires_grad=True), torch.randn(4096, 8, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                largest = max(largest, t.numel() if isinstance(t, Tensor) else 0)
            return out

    monkeypatch.setattr("fusions.jit._enabled", False)  # a compiled function can't be watched; its temporaries are fewer
    with Watch():
        linear_ce.compiled(hidden, weight, torch.randint(0, 4096, (256,)), None).sum().backward()
    assert largest <= 16 * 4096 < hidden.shape[0] * 4096


def test_no_tokens_no_loss() -> None:
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    loss = linear_ce.compiled(hidden, weight, torch.zeros(0, dtype=torch.long), None)
    loss.sum().backward()
    assert loss.shape == (0,) and weight.grad.abs().max() == 0


def test_N17_the_same_number_with_and_without_a_gradient() -> None:
    hidden, weight, target = torch.zeros(2, 4), torch.randn(3, 4), torch.tensor([0, 2])
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            loss = linear_ce.compiled(hidden.requires_grad_(context is torch.enable_grad), weight, target, None)
        torch.testing.assert_close(loss.detach(), torch.full((2,), 1.098612), atol=1e-6, rtol=0)


def _sharded() -> dict[bool, list[Tensor]]:
    """With and without sequence parallel: the loss, and the gradients of this rank's tensors."""
    rank, group = dist.get_rank(), dist.group.WORLD
    found = {}
    for sequence_parallel in (False, True):
        hidden, weight, target = _problem()
        own = (hidden.chunk(2)[rank] if sequence_parallel else hidden).detach().clone().requires_grad_()
        shard = weight.chunk(2)[rank].detach().clone().requires_grad_()
        loss = linear_ce.linear_cross_entropy(own, shard, target, group, "mean", -100, sequence_parallel)
        loss.backward()
        found[sequence_parallel] = [loss.detach(), own.grad, shard.grad]
    return found


def _problem() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(6, 8), torch.randn(20, 8), torch.randint(0, 20, (6,))
    target[1] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), target


def test_two_ranks_are_one() -> None:
    hidden, weight, target = _problem()
    loss = torch.nn.functional.cross_entropy(hidden @ weight.t(), target)
    loss.backward()
    for rank, found in enumerate(run_ranks(2, _sharded)):
        for sequence_parallel, (ours, dhidden, dweight) in found.items():
            torch.testing.assert_close(ours, loss.detach())
            torch.testing.assert_close(dhidden, hidden.grad.chunk(2)[rank] if sequence_parallel else hidden.grad)
            torch.testing.assert_close(dweight, weight.grad.chunk(2)[rank])


def test_a_wrong_reduction_is_named() -> None:
    with pytest.raises(ValueError, match="'average'.*'mean', 'sum' or 'none'"):
        linear_ce.linear_cross_entropy(
            torch.randn(2, 3), torch.randn(4, 3), torch.zeros(2, dtype=torch.long), reduction="average"
        )
