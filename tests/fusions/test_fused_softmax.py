"""scale + mask + softmax + dropout: parity, N01, N03, N05, N07, the façade."""

from __future__ import annotations

import math

import pytest
import torch

from fusions import fused_softmax as sm
from tests.conftest import needs_triton
from tests.numerics import compare_with_fp64

BOTH = [sm.reference, sm.compiled, pytest.param(sm.triton, marks=needs_triton)]


@pytest.mark.parametrize("keys", [1, 3, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 2047, 2048, 2049, 4097])
def test_N01_any_key_length(keys: int) -> None:
    compare_with_fp64(sm.reference, sm.compiled, [torch.randn(1, 2, 3, keys)], torch.bfloat16)
    torch.testing.assert_close(sm.compiled(torch.randn(1, 2, 3, keys)).sum(-1), torch.ones(1, 2, 3))


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_N03_a_row_with_every_key_masked(function, dtype: torch.dtype) -> None:
    scores = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]], dtype=dtype, requires_grad=True)
    mask = torch.tensor([[[[False, False], [True, True]]]])
    probs = function(scores, mask)
    (probs * torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=dtype)).sum().backward()
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(probs[0, 0, 0].float(), torch.tensor([0.268941, 0.731059]), atol=tolerance, rtol=0)
    assert torch.equal(probs[0, 0, 1], torch.zeros(2, dtype=dtype))
    assert torch.isfinite(scores.grad).all() and torch.equal(scores.grad[0, 0, 1], torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize("function", BOTH)
def test_N03_left_padding_under_a_causal_mask(function) -> None:
    scores = torch.randn(1, 2, 6, 6, requires_grad=True)
    mask = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
    mask[..., :3] = True  # the first three keys are padding, so the first three queries see nothing
    probs = function(scores, mask, causal=True)
    probs.square().sum().backward()
    assert torch.equal(probs[:, :, :3], torch.zeros(1, 2, 3, 6)) and torch.isfinite(scores.grad).all()
    assert torch.equal(probs[..., :3], torch.zeros(1, 2, 6, 3))
    torch.testing.assert_close(probs[:, :, 3:].sum(-1), torch.ones(1, 2, 3))


@pytest.mark.parametrize("function", BOTH)
def test_N05_true_means_masked_out(function) -> None:
    probs = function(torch.zeros(1, 1, 1, 2), torch.tensor([[[[False, True]]]]))
    assert (probs @ torch.tensor([[10.0], [20.0]])).item() == 10.0


@pytest.mark.parametrize("function", BOTH)
def test_N07_a_window_counts_the_querys_own_key(function) -> None:
    probs = function(torch.zeros(1, 1, 8, 8), causal=True, window=4)[0, 0]
    for row in range(8):
        seen = probs[row] > 0
        assert seen.sum() == min(row + 1, 4) and seen[max(0, row - 3) : row + 1].all()
    assert torch.equal(probs[7], torch.tensor([0, 0, 0, 0, 0.25, 0.25, 0.25, 0.25]))
    scores = torch.randn(1, 1, 8, 8)
    for window in (8, 9):
        assert torch.equal(function(scores, causal=True, window=window), function(scores, causal=True))


@pytest.mark.parametrize("function", BOTH)
def test_fewer_queries_than_keys_the_last_query_sees_the_last_key(function) -> None:
    scores = torch.randn(1, 1, 8, 8)
    torch.testing.assert_close(function(scores[:, :, 5:], causal=True), function(scores, causal=True)[:, :, 5:])


@pytest.mark.parametrize("function", BOTH)
def test_very_negative_scores_do_not_outrank_a_mask(function) -> None:
    scores = torch.tensor([[[[-50000.0, 0.0], [-50000.0, -60000.0]]]])
    probs = function(scores, torch.tensor([[[[False, True], [False, True]]]]))
    assert torch.equal(probs[0, 0], torch.tensor([[1.0, 0.0], [1.0, 0.0]]))


@pytest.mark.parametrize("fused", [True, False])
def test_the_module_combines_its_masks(fused: bool) -> None:
    module = sm.FusedScaleMaskSoftmax(False, True, "causal", fused, None, True, 2.0, window_size=(2, 0))
    scores, mask = torch.randn(2, 3, 8, 8), torch.zeros(2, 1, 8, 8, dtype=torch.bool)
    mask[..., 4] = True
    probs = module(scores, mask)
    row, key = torch.arange(8)[:, None], torch.arange(8)
    hidden = (key > row) | (key < row - 2) | (key == 4)
    expected = torch.softmax((2.0 * scores).masked_fill(hidden, -math.inf), -1)
    torch.testing.assert_close(probs, expected)
    assert module.is_kernel_available(mask, 2, 3, 8, 8) is fused


def test_the_modules_assertions() -> None:
    with pytest.raises(AssertionError, match="fp16 and bf16"):
        sm.FusedScaleMaskSoftmax(True, True, "causal", True, None, True, None)
    with pytest.raises(AssertionError, match="fp32"):
        sm.FusedScaleMaskSoftmax(False, True, "causal", True, None, False, 1.0)
    module = sm.FusedScaleMaskSoftmax(False, True, "causal", False, None, True, None)
    with pytest.raises(AssertionError):
        module(torch.randn(1, 1, 4, 8), None)
    with pytest.raises(AssertionError):
        module(torch.randn(4, 8), None)


@pytest.mark.parametrize("function", BOTH)
def test_more_queries_than_keys_the_first_see_nothing(function) -> None:
    scores = torch.randn(1, 1, 4, 2, requires_grad=True)
    probs = function(scores, causal=True)
    probs.square().sum().backward()
    assert torch.equal(probs[0, 0, :2], torch.zeros(2, 2)) and torch.isfinite(scores.grad).all()
    assert torch.equal(probs[0, 0, 2], torch.tensor([1.0, 0.0]))


def test_a_first_call_in_inference_mode_poisons_no_cache() -> None:
    sm._kept_causal_mask.cache_clear()
    with torch.inference_mode():
        sm.reference(torch.zeros(1, 1, 5, 5), causal=True)
    sm.reference(torch.zeros(1, 1, 5, 5, requires_grad=True), causal=True).sum().backward()


def test_a_second_derivative_is_an_error_not_a_wrong_number() -> None:
    scores = torch.randn(1, 1, 4, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(sm.compiled(scores).square().sum(), scores, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice|once_differentiable|does not require grad"):
        grad.square().sum().backward()


def test_a_window_after_the_query_is_refused() -> None:
    module = sm.FusedScaleMaskSoftmax(False, True, "padding", True, None, True, None, window_size=(1, 1))
    with pytest.raises(ValueError, match="keys after the query"):
        module(torch.randn(1, 1, 4, 4), None)
