"""Norms: parity, N13, N21's siblings, N22, N23, N25."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fusions import fused_layer_norm as norms
from tests.numerics import compare_with_fp64

KINDS = {
    "LayerNorm": (norms.reference_layer_norm, norms.compiled_layer_norm),
    "RMSNorm": (norms.reference_rms_norm, norms.compiled_rms_norm),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_mean_does_not_cancel(kind: str) -> None:
    reference, compiled = KINDS[kind]
    x = torch.randn(64, 512) + 1000.0
    compare_with_fp64(lambda x: reference(x, None, None, 1e-5), lambda x: compiled(x, None, None, 1e-5), [x], torch.float32)


def test_the_reference_rms_norm_is_torchs() -> None:
    x, weight = torch.randn(9, 33), torch.randn(33)
    torch.testing.assert_close(norms.reference_rms_norm(x, weight, None, 1e-6), F.rms_norm(x, (33,), weight, 1e-6))


def test_N22_many_rows() -> None:
    for rows in (65535, 65536, 65537, 200000):
        x = torch.randn(rows, 64)
        for reference, compiled in KINDS.values():
            torch.testing.assert_close(compiled(x, None, None, 1e-5)[-1], reference(x[-1:], None, None, 1e-5)[0])


def test_N23_without_parameters() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    out = norms.compiled_layer_norm(x, None, None, 1e-5)
    torch.testing.assert_close(out, torch.tensor([[-1.341635, -0.447212, 0.447212, 1.341635]]), atol=1e-5, rtol=0)
    out.sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("persist", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_N25_zero_centred_module(kind: str, persist: bool) -> None:
    config = SimpleNamespace(normalization=kind, layernorm_zero_centered_gamma=True, persist_layer_norm=persist)
    module, x = norms.FusedLayerNorm(config, 32, eps=1e-5), torch.randn(4, 2, 32)
    assert torch.equal(module.weight, torch.zeros(32))
    expected = F.layer_norm(x, (32,)) if kind == "LayerNorm" else F.rms_norm(x, (32,), eps=1e-5)
    torch.testing.assert_close(module(x), expected)
