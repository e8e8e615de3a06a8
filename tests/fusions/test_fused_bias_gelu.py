"""bias + GELU: N08 and parity."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fusions import fused_bias_gelu as gelu

ACTIVATIONS = ["gelu", "gelu_tanh", "quick_gelu"]


@pytest.mark.parametrize("function", [gelu.reference, gelu.compiled])
@pytest.mark.parametrize(
    ("activation", "at_1", "at_minus_3"), [("gelu", 0.8413447, -0.0040497), ("gelu_tanh", 0.8411920, -0.0036374)]
)
def test_N08_the_activation_is_the_configured_one(function, activation: str, at_1: float, at_minus_3: float) -> None:
    out = function(torch.tensor([[1.0, -3.0]]), torch.zeros(2), activation)[0]
    assert out[0].item() == pytest.approx(at_1, abs=1e-6) and out[1].item() == pytest.approx(at_minus_3, abs=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_inputs_stay_finite(activation: str) -> None:
    x = torch.tensor([[-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4]], requires_grad=True)
    out = gelu.compiled(x, None, activation)
    out.sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(x.grad).all()
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 0.0, 0.0, 20.0, 100.0, 1e4]]), atol=1e-6, rtol=0)


def test_megatrons_names() -> None:
    x, bias, g = torch.randn(4, 2, 16), torch.randn(16), torch.randn(4, 2, 16)
    expected = F.gelu(x + bias, approximate="tanh")
    for out in (gelu.bias_gelu_impl(x, bias), gelu.GeLUFunction.apply(x, bias), gelu.bias_gelu(bias, x)):
        torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gelu.bias_gelu_impl(x, bias, approximate="none"), F.gelu(x + bias))
    leaf = (x + bias).requires_grad_()
    F.gelu(leaf, approximate="tanh").backward(g)
    torch.testing.assert_close(gelu.bias_gelu_back(g, bias, x), leaf.grad)
    with pytest.raises(ValueError, match="expected 'tanh' or 'none'"):
        gelu.bias_gelu_impl(x, bias, approximate="erf")
