"""Vocabulary-parallel cross entropy: parity with F.cross_entropy, N14 to N18, N21, T10, and the number of collectives."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fusions import fused_cross_entropy as ce
from tests.conftest import needs_triton
from tests.distributed import run_ranks

BOTH = [ce.reference, ce.compiled]
ALL = [*BOTH, pytest.param(ce.triton, marks=needs_triton)]


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_equal_to_torchs_loss_and_gradient(function, smoothing: float) -> None:
    logits, target = torch.randn(11, 45, dtype=torch.float64), torch.randint(0, 45, (11,))
    target[3] = -100
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = function(ours, target, None, label_smoothing=smoothing)
    expected = F.cross_entropy(theirs, target, reduction="none", label_smoothing=smoothing)
    weights = torch.randn(11, dtype=torch.float64)
    (loss * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("function", BOTH)
def test_N17_the_same_number_without_gradients(function) -> None:
    logits, target = torch.zeros(1, 3), torch.tensor([1])
    with torch.no_grad():
        no_grad = function(logits, target, None)
    with torch.inference_mode():
        inference = function(logits, target, None)
    training = function(logits.requires_grad_(), target, None)
    assert no_grad.item() == inference.item() == training.item() == pytest.approx(1.098612, abs=1e-6)


@pytest.mark.parametrize("function", ALL)
def test_N18_per_token_weights_reach_the_gradient(function) -> None:
    logits = torch.zeros(3, 2, requires_grad=True)
    loss = function(logits, torch.tensor([0, -100, 1]), None)
    (loss * torch.tensor([1.0, 5.0, 3.0])).sum().backward()
    assert torch.equal(logits.grad, torch.tensor([[-0.5, 0.5], [0.0, 0.0], [1.5, -1.5]]))


@pytest.mark.parametrize("function", ALL)
def test_N21_half_precision_logits_lose_nothing_more(function) -> None:
    logits, target = torch.randn(1, 64, 64000).bfloat16(), torch.randint(0, 64000, (1, 64))
    loss = function(logits, target, None)
    assert loss.dtype == torch.float32
    expected = F.cross_entropy(logits[0].double(), target[0], reduction="none")
    assert (loss[0].double() - expected).abs().max() < 1e-4


@pytest.mark.parametrize("function", BOTH)
def test_logits_are_never_written_and_backward_can_repeat(function) -> None:
    logits = torch.randn(4, 2, 30, requires_grad=True)
    before = logits.detach().clone()
    loss = function(logits, torch.randint(0, 30, (4, 2)), None).sum()
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    second = torch.autograd.grad(loss, logits)[0]
    assert torch.equal(logits, before) and torch.equal(first, second)


@pytest.mark.parametrize("function", BOTH)
def test_large_logits_and_the_last_id(function) -> None:
    logits = 1000 * torch.randn(5, 40)
    loss = function(logits, torch.full((5,), 39), None, label_smoothing=0.1)
    expected = F.cross_entropy(logits.double(), torch.full((5,), 39), reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(loss, expected.float())


@pytest.mark.parametrize("function", ALL)
def test_padding_columns_do_not_compete(function) -> None:
    logits = torch.randn(6, 16, requires_grad=True)
    loss = function(logits, torch.arange(6), None, vocab_size=7)
    torch.testing.assert_close(loss, F.cross_entropy(logits[:, :7], torch.arange(6), reduction="none"))
    loss.sum().backward()
    assert torch.equal(logits.grad[:, 7:], torch.zeros(6, 9))


def _ranks() -> dict:
    """Every check that needs ranks, in one start of the processes."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    out: dict = {"calls": {}}
    torch.manual_seed(0)
    logits, target, weights = torch.randn(5, 3, 48), torch.randint(0, 41, (5, 3)), torch.rand(5, 3)
    target[1, 1] = -100
    mine = logits.chunk(size, -1)[rank]
    original = dist.all_reduce
    for name, function in (("reference", ce.reference), ("compile", ce.compiled)):
        for label, options in (("plain", {}), ("all", {"label_smoothing": 0.1, "z_loss": 0.02, "vocab_size": 41})):
            ops: list[str] = []
            dist.all_reduce = lambda t, op=None, group=None, ops=ops: (ops.append(str(op)), original(t, op, group=group))
            local = mine.clone().requires_grad_()
            loss = function(local, target, group, **options)
            (loss * weights).sum().backward()
            dist.all_reduce = original
            whole = logits.clone().requires_grad_()
            expected = ce.reference(whole, target, None, **options)
            (expected * weights).sum().backward()
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(local.grad, whole.grad.chunk(size, -1)[rank])
            out["calls"][name, label] = len(ops)
        flat = torch.arange(8.0).chunk(size)[rank]
        out[name, "N14"] = function(flat[None], torch.tensor([3]), group, label_smoothing=0.1).item()
        zeros = torch.zeros(1, 4 // size, requires_grad=True)
        function(zeros, torch.tensor([0]), group).sum().backward()
        out[name, "N16"] = zeros.grad[0].tolist()
        out[name, "T10"] = function(torch.zeros(1, 8 // size), torch.tensor([1]), group, vocab_size=7).item()
        out[name, "padding only"] = function(torch.zeros(1, 8 // size), torch.tensor([1]), group, vocab_size=2).item()
    return out


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_agree_with_the_whole_and_collectives_are_counted(size: int) -> None:
    for rank, out in enumerate(run_ranks(size, _ranks)):
        # One MAX and one SUM per quantity in the reference, one MAX and one packed SUM in the fused form.
        assert out["calls"] == {
            ("reference", "plain"): 3,
            ("reference", "all"): 4,
            ("compile", "plain"): 2,
            ("compile", "all"): 2,
        }
        for name in ("reference", "compile"):
            assert out[name, "N14"] == pytest.approx(4.408340, abs=1e-5)
            assert out[name, "N16"] == [-0.75, 0.25, 0.25, 0.25][rank * 4 // size : (rank + 1) * 4 // size]
            assert out[name, "T10"] == pytest.approx(math.log(7), abs=1e-6)
            assert out[name, "padding only"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("function", ALL)
def test_a_target_outside_the_vocabulary_gives_nan(function) -> None:
    loss = function(torch.randn(4, 8), torch.tensor([5, 6, -1, -100]), None, vocab_size=6)
    assert torch.isfinite(loss[[0, 3]]).all() and torch.isnan(loss[[1, 2]]).all()


@pytest.mark.parametrize("function", ALL)
def test_N19_all_labels_ignored_is_zero_loss_and_zero_gradient(function) -> None:
    logits = torch.randn(4, 5, requires_grad=True)
    loss = function(logits, torch.full((4,), -100), None, label_smoothing=0.1, z_loss=1e-3)
    loss.sum().backward()
    assert loss.tolist() == [0.0] * 4 and logits.grad.abs().max() == 0


@pytest.mark.parametrize("function", ALL)
def test_N27_class_0_counts_and_a_mask_is_applied_per_token(function) -> None:
    torch.testing.assert_close(
        function(torch.zeros(1, 2), torch.tensor([0]), None), torch.tensor([0.693147]), atol=1e-6, rtol=0
    )
    losses = function(torch.zeros(10, 8), torch.zeros(10, dtype=torch.long), None)
    mask = torch.zeros(10)
    mask[3] = 1
    torch.testing.assert_close((losses * mask).sum() / mask.sum(), torch.tensor(2.0794415))


@pytest.mark.parametrize("function", ALL)
def test_a_column_of_minus_infinity_and_a_shard_full_of_them(function) -> None:
    logits = torch.tensor([[0.0, float("-inf"), 0.0, 0.0]], requires_grad=True)
    loss = function(logits, torch.tensor([0]), None)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.tensor([math.log(3)]))
    assert torch.isfinite(logits.grad).all()
    kernels = ce.COMPILED if function is not ce.triton else ce.triton_kernels("cross_entropy")
    peak, total, _ = kernels.forward(torch.full((2, 5), float("-inf")), ce.loss_rule(5, None, None))
    assert torch.isfinite(peak).all() and total.tolist() == [0.0, 0.0]
