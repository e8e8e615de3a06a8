"""Code written for Megatron's fusion modules: names, argument orders, shapes, and what its own unit tests check."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F

from fusions.fused_bias_dropout import bias_dropout_add_fused_inference, get_bias_dropout_add
from fusions.fused_bias_geglu import (
    bias_geglu,
    bias_geglu_back,
    bias_geglu_impl,
    geglu,
    quick_gelu,
    weighted_bias_quick_geglu_back,
    weighted_bias_quick_geglu_impl,
)
from fusions.fused_bias_gelu import bias_gelu, bias_gelu_back, bias_gelu_impl
from fusions.fused_bias_swiglu import (
    bias_swiglu_impl,
    clamped_swiglu,
    swiglu,
    swiglu_back,
    weighted_bias_swiglu_impl,
    weighted_swiglu,
    weighted_swiglu_back,
)
from fusions.fused_indices_converter import fused_indices_to_multihot
from fusions.fused_layer_norm import FusedLayerNorm
from fusions.fused_mla_yarn_rope_apply import fused_mla_rope_inplace, fused_mla_rope_kv_split, rows_for_tokens
from fusions.fused_pad_routing_map import fused_pad_routing_map
from fusions.fused_rope import fused_apply_rotary_pos_emb, fused_single_qkv_rope
from fusions.fused_softmax import (
    FusedScaleMaskSoftmax,
    ScaledMaskedSoftmax,
    ScaledSoftmax,
    ScaledUpperTriangMaskedSoftmax,
    SoftmaxOne,
)
from fusions.fused_weighted_squared_relu import (
    weighted_squared_relu,
    weighted_squared_relu_back,
    weighted_squared_relu_impl,
)

# ---- bias + dropout + add -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_inference_writes_into_x_and_the_output_has_the_residuals_dtype(fused: bool, with_bias: bool) -> None:
    x, residual = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    bias = torch.randn(8) if with_bias else None
    expected = residual + (x if bias is None else x + bias)
    out = get_bias_dropout_add(False, fused)((x, bias), residual, 0.5)
    assert out.data_ptr() == x.data_ptr()
    torch.testing.assert_close(out, expected)
    half = torch.randn(4, 2, 8).bfloat16()
    out = get_bias_dropout_add(True, fused)((half, None if bias is None else bias.bfloat16()), residual, 0.0)
    assert out.dtype == torch.float32 and out.data_ptr() != half.data_ptr()


def test_inference_with_a_gradient_is_not_in_place() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    assert bias_dropout_add_fused_inference((x, None), torch.randn(4, 8), 0.5).data_ptr() != x.data_ptr()


# ---- activations ----------------------------------------------------------------------------------------------------


def test_N09_gate_first() -> None:
    x = torch.tensor([[1.0, 2, 3, 4]])
    for out in (swiglu(x), bias_swiglu_impl(x, None), bias_swiglu_impl(x, torch.zeros(4))):
        torch.testing.assert_close(out, torch.tensor([[2.193176, 7.046377]]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_with_weights_clamp_and_fp8_store(dtype: torch.dtype) -> None:
    x, w = torch.randn(6, 16).to(dtype), torch.rand(6, 1)
    out = weighted_bias_swiglu_impl(x, None, w)
    assert out.dtype == dtype and out.shape == (6, 8)
    gate, linear = x.float().chunk(2, -1)
    torch.testing.assert_close(out.float(), (F.silu(gate) * linear * w).to(dtype).float(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(out, weighted_swiglu(x, w))
    clamped = F.silu(gate.clamp(max=0.5)) * linear.clamp(-0.5, 0.5)
    torch.testing.assert_close(clamped_swiglu(x, 0.5).float(), clamped, rtol=1e-2, atol=1e-2)
    with pytest.raises(NotImplementedError):
        weighted_bias_swiglu_impl(x, torch.zeros(16), w)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for leaf, store in zip(leaves, (False, True), strict=True):
        bias_swiglu_impl(leaf, None, store).float().sum().backward()
    assert not torch.equal(leaves[0].grad, leaves[1].grad)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=0.2, atol=0.2)  # fp8 rounds to 2^-4


def test_three_dimensions_with_one_weight_per_token() -> None:
    x, w = torch.randn(3, 2, 8), torch.rand(6, 1)
    flat = x.view(6, 8)
    for ours, plain in (
        (weighted_bias_swiglu_impl(x, None, w), weighted_bias_swiglu_impl(flat, None, w)),
        (weighted_bias_quick_geglu_impl(x, None, w), weighted_bias_quick_geglu_impl(flat, None, w)),
        (weighted_squared_relu_impl(x, w), weighted_squared_relu_impl(flat, w)),
    ):
        assert ours.shape[:2] == (3, 2)
        torch.testing.assert_close(ours.view(plain.shape), plain)


def test_a_bias_per_row_is_not_taken_for_one_per_column() -> None:
    x, bias = torch.randn(2, 3, 3), torch.randn(3, 1)
    torch.testing.assert_close(bias_gelu_impl(x, bias), F.gelu(x + bias, approximate="tanh"))
    out = get_bias_dropout_add(True, True)((x, bias), torch.zeros(2, 3, 3), 0.0)
    torch.testing.assert_close(out, x + bias)


@pytest.mark.parametrize("fused", [False, True])
def test_probability_1_drops_everything_and_a_parameter_is_never_written(fused: bool) -> None:
    x, residual = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    out = get_bias_dropout_add(True, fused)((x, None), residual, 1.0)
    assert torch.equal(out.detach(), residual)
    out.sum().backward()
    assert x.grad.abs().max() == 0
    parameter = torch.nn.Parameter(torch.ones(4, 8))
    with torch.no_grad():
        get_bias_dropout_add(False, fused)((parameter, None), residual, 0.5)
    assert torch.equal(parameter, torch.ones(4, 8))


def test_helpers_and_their_backs_agree_with_autograd() -> None:
    x, g, b, w = torch.randn(5, 12), torch.randn(5, 6), torch.randn(12), torch.rand(5, 1)
    cases = [
        (lambda x: F.silu(x[:, :6]) * x[:, 6:], swiglu_back(g, x)),
        (lambda x: F.gelu((x + b)[:, :6], approximate="tanh") * (x + b)[:, 6:], bias_geglu_back(g, x, b)),
        (lambda x: F.silu(x[:, :6]) * x[:, 6:] * w, weighted_swiglu_back(g, x, w)[0]),
        (
            lambda x: quick_gelu((x + b)[:, :6]) * ((x + b)[:, 6:] + 1) * w,
            weighted_bias_quick_geglu_back(g, x, b, w, 1.0)[0],
        ),
    ]
    for function, ours in cases:
        leaf = x.clone().requires_grad_()
        function(leaf).backward(g)
        torch.testing.assert_close(ours, leaf.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bias_geglu(b, x), bias_geglu_impl(x, b))
    torch.testing.assert_close(geglu(x), bias_geglu_impl(x, None))
    torch.testing.assert_close(bias_gelu(b, x), bias_gelu_impl(x, b))
    leaf = x.clone().requires_grad_()
    bias_gelu_impl(leaf, b).backward(torch.ones(5, 12))
    torch.testing.assert_close(bias_gelu_back(torch.ones(5, 12), b, x), leaf.grad)


def test_quick_geglu_clamps_after_the_bias() -> None:
    x, b, w = torch.full((1, 4), 0.4), torch.full((4,), 0.4), torch.ones(1, 1)
    out = weighted_bias_quick_geglu_impl(x, b, w, False, 1.0, 0.5)
    torch.testing.assert_close(out, quick_gelu(torch.full((1, 2), 0.5)) * 1.5)


def test_weighted_squared_relu() -> None:
    x, w, g = torch.randn(7, 5, requires_grad=True), torch.rand(7, 1, requires_grad=True), torch.randn(7, 5)
    out = weighted_squared_relu_impl(x, w)
    torch.testing.assert_close(out, F.relu(x).square() * w)
    out.backward(g)
    dx, dw = weighted_squared_relu_back(g, x.detach(), w.detach())
    torch.testing.assert_close(dx, x.grad)
    torch.testing.assert_close(dw, w.grad)
    half = weighted_squared_relu(x.detach().bfloat16(), w.detach())
    assert half.dtype == torch.bfloat16


# ---- norm ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("persist", [False, True])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_fused_layer_norm_takes_any_config(persist: bool, zero_centered: bool) -> None:
    config = types.SimpleNamespace(
        normalization="LayerNorm", layernorm_zero_centered_gamma=zero_centered, persist_layer_norm=persist,
        memory_efficient_layer_norm=False, sequence_parallel=True,
    )  # fmt: skip
    norm = FusedLayerNorm(config, 16, 1e-6)
    x = torch.randn(3, 2, 16)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (16,), eps=1e-6))
    assert {n for n, _ in norm.named_parameters()} == {"weight", "bias"} and norm.weight.sequence_parallel
    assert FusedLayerNorm(types.SimpleNamespace(), 16)(x).shape == x.shape


def test_a_memory_efficient_norm_is_right_where_gamma_is_0() -> None:
    config = types.SimpleNamespace(persist_layer_norm=True, memory_efficient_layer_norm=True)
    for zero in (False, True):
        norm, plain = FusedLayerNorm(config, 8), torch.nn.LayerNorm(8)
        with torch.no_grad():
            for module in (norm, plain):
                module.weight.copy_(torch.linspace(0.0 if zero else 0.5, 1, 8))
        x = torch.randn(5, 8)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        for leaf, module in zip(leaves, (norm, plain), strict=True):
            (module(leaf) * torch.arange(8.0)).sum().backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(norm.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-5)


# ---- softmax ---------------------------------------------------------------------------------------------------------


def _softmax(kind: str = "causal", fused: bool = False, **options: object) -> FusedScaleMaskSoftmax:
    names = {"input_in_fp16": False, "input_in_bf16": False, "attn_mask_type": types.SimpleNamespace(name=kind)}
    more = {"scaled_masked_softmax_fusion": fused, "mask_func": None, "softmax_in_fp32": True, "scale": None}
    return FusedScaleMaskSoftmax(**(names | more | options))


def test_causal_needs_a_square_and_is_kernel_available_is_a_bool() -> None:
    with pytest.raises(AssertionError):
        _softmax()(torch.randn(1, 2, 3, 4), None)
    for fused in (False, True):
        assert _softmax(fused=fused).is_kernel_available(None, 2, 4, 16, 16) is fused
    with pytest.raises(AssertionError):
        _softmax(input_in_fp16=True, input_in_bf16=True)
    with pytest.raises(AssertionError):
        _softmax(softmax_in_fp32=False, scale=2.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0, "learnable"])
def test_softmax_one(fused: bool, offset: float | str) -> None:
    x = torch.randn(2, 4, 5, 5)
    sink = torch.randn(4, requires_grad=True) if offset == "learnable" else torch.full((4,), float(offset))
    expected = torch.exp(x) / (torch.exp(sink.view(1, -1, 1, 1)) + torch.exp(x).sum(-1, keepdim=True))
    torch.testing.assert_close(SoftmaxOne(-1, sink)(x), expected)
    torch.testing.assert_close(_softmax("padding", fused)(x, None, sink), expected)
    if offset != "learnable":
        torch.testing.assert_close(SoftmaxOne(-1, offset)(x), expected)
        return
    _softmax("padding", fused)(x, None, sink).square().sum().backward()
    ours, sink.grad = sink.grad, None
    expected.square().sum().backward()
    torch.testing.assert_close(ours, sink.grad)


@pytest.mark.parametrize("fused", [False, True])
def test_windows_are_megatrons_tuple(fused: bool) -> None:
    probs = _softmax(fused=fused, window_size=(3, 0))(torch.zeros(1, 1, 8, 8), None)[0, 0]
    assert probs[7].tolist() == [0, 0, 0, 0, 0.25, 0.25, 0.25, 0.25] and probs[1, :2].tolist() == [0.5, 0.5]


def test_the_three_softmax_functions() -> None:
    x = torch.randn(6, 5, 5)
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    torch.testing.assert_close(
        ScaledUpperTriangMaskedSoftmax.apply(x, 0.5), torch.softmax((x * 0.5).masked_fill(future, float("-inf")), -1)
    )
    x, mask = torch.randn(2, 3, 4, 6), torch.rand(2, 1, 4, 6) < 0.3
    mask[..., 0] = False
    expected = torch.softmax((x * 2).masked_fill(mask, float("-inf")), -1)
    torch.testing.assert_close(ScaledMaskedSoftmax.apply(x, mask.to(torch.uint8), 2.0), expected)
    torch.testing.assert_close(ScaledSoftmax.apply(x, 2.0), torch.softmax(x * 2, -1))


# ---- rope ------------------------------------------------------------------------------------------------------------


def test_rope_entry_points() -> None:
    t, freqs = torch.randn(5, 2, 3, 8), torch.randn(5, 1, 1, 4).repeat(1, 1, 1, 2)
    rotated = fused_apply_rotary_pos_emb(t, freqs)
    first, second = t.chunk(2, -1)
    torch.testing.assert_close(rotated, t * freqs.cos() + torch.cat([-second, first], -1) * freqs.sin())
    mixed = torch.randn(5, 2, 3, 32)
    q, k, v = fused_single_qkv_rope(mixed, freqs, freqs, [16, 8, 8])
    assert q.shape == (5, 2, 6, 8) and k.shape == v.shape == (5, 2, 3, 8)
    torch.testing.assert_close(k, fused_apply_rotary_pos_emb(mixed[..., 16:24], freqs))
    torch.testing.assert_close(v, mixed[..., 24:])


def test_mla_in_place_marks_its_input_and_inverse_turns_back() -> None:
    angles = torch.randn(5, 1, 1, 2).repeat(1, 1, 1, 2)
    t = torch.randn(5, 2, 3, 10)
    leaf = t.clone().requires_grad_()
    turned = leaf * 1.0
    out = fused_mla_rope_inplace(turned, angles.cos(), angles.sin(), 6, 4)
    assert out.data_ptr() == turned.data_ptr() and torch.equal(out[..., :6], t[..., :6])
    x1, x2 = t[..., 6::2], t[..., 7::2]
    cos, sin = angles[..., :2].cos(), angles[..., :2].sin()
    torch.testing.assert_close(out[..., 6:].detach(), torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1))
    out.square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * t)  # a rotation keeps lengths
    pairs = fused_mla_rope_inplace(t.clone(), angles.cos(), angles.sin(), 6, 4, remove_interleaving=True)
    back = fused_mla_rope_inplace(pairs, angles.cos(), angles.sin(), 6, 4, inverse=True, remove_interleaving=True)
    torch.testing.assert_close(back, t)
    for bad in ({"rotary_interleaved": True}, {}):
        with pytest.raises(AssertionError):
            fused_mla_rope_inplace(t, angles.cos(), angles.sin(), 6 if bad else 5, 4, **bad)


def test_mla_packed_tokens_start_again_with_each_sequence() -> None:
    angles = torch.randn(8, 1, 1, 2).repeat(1, 1, 1, 2)
    cu = torch.tensor([0, 3, 8])
    kv, emb = torch.randn(8, 2, 7), torch.randn(8, 1, 4)
    key, value = fused_mla_rope_kv_split(kv, emb, angles.cos(), angles.sin(), 4, 5, 2, cu)
    one, _ = fused_mla_rope_kv_split(kv[3:, None], emb[3:, None], angles.cos(), angles.sin(), 4, 5, 2)
    torch.testing.assert_close(key[3:], one[:, 0])
    torch.testing.assert_close(value, kv[..., 5:])
    rows = torch.arange(16.0).view(16, 1, 1, 1)
    assert rows_for_tokens(rows, 8, torch.tensor([0, 3, 6]), 0, 1).flatten().tolist()[:6] == [
        0,
        1,
        2,
        0,
        1,
        2,
    ]  # two of padding
    assert rows_for_tokens(rows, 4, torch.tensor([0, 8]), 1, 2).flatten().tolist() == [2, 3, 4, 5]


# ---- mixture of experts ----------------------------------------------------------------------------------------------


def test_routing() -> None:
    indices, probs = torch.tensor([[0, 2], [-1, 1]]), torch.tensor([[0.7, 0.3], [0.9, 0.1]], requires_grad=True)
    multihot, spread = fused_indices_to_multihot(indices, probs, 4)
    assert multihot.tolist() == [[True, False, True, False], [False, True, False, False]]
    torch.testing.assert_close(spread.detach(), torch.tensor([[0.7, 0, 0.3, 0], [0, 0.1, 0, 0]]))
    (spread * torch.arange(8.0).view(2, 4)).sum().backward()
    assert probs.grad.tolist() == [[0, 2], [0, 5]]
    routing = torch.tensor([[1, 0], [0, 0], [0, 1], [1, 1], [0, 0]])
    padded = fused_pad_routing_map(routing, 4)
    assert padded.sum(0).tolist() == [4, 4] and padded.dtype == torch.int32
    assert padded.tolist() == [[1, 1], [1, 1], [1, 1], [1, 1], [0, 0]]
