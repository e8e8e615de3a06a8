"""training.compile_layers: the same function, the same masks, one graph for all layers, and counters that still count."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.utils

from fusions.random import DropoutKeys, site_words
from tests.models.build import build, run_config, tokens_of

FLAGS = ("residual_norm_fusion", "bias_activation_fusion", "masked_softmax_fusion")


@pytest.mark.parametrize("flags", [(), FLAGS], ids=["unfused", "fused"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_compiled_layers_compute_the_same(flags: tuple[str, ...], dropout: float) -> None:
    overrides = {"transformer.hidden_dropout": dropout, "transformer.attention_dropout": dropout}
    found = []
    for compiled in (False, True):
        config = run_config(overrides | {"training.compile_layers": compiled}, fused=flags)
        model, counters = build(config)
        tokens, labels = tokens_of(config, 4)
        for iteration in (1, 2, 3):
            keys = DropoutKeys(site_words(7, iteration, model.num_dropout_sites), torch.arange(4))
            model.zero_grad()
            loss = model(tokens, labels=labels, dropout_keys=keys).mean()
            loss.backward()
        found.append((loss.item(), {n: p.grad for n, p in model.named_parameters()}, counters.as_dict()))
    (eager, grads, counts), (compiled_loss, compiled_grads, compiled_counts) = found
    assert compiled_loss == pytest.approx(eager, rel=1e-5)
    total = torch.stack([g.norm() for g in grads.values()]).norm()
    for name, grad in grads.items():
        difference = (grad - compiled_grads[name]).norm()
        assert difference <= 1e-5 * max(grad.norm(), 1e-3 * total), name
    assert compiled_counts == counts
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    model(tokens, labels=labels, dropout_keys=keys)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs  # no call compiles anew


def test_all_layers_run_one_graph() -> None:
    torch._dynamo.utils.counters.clear()
    config = run_config({"training.compile_layers": True, "transformer.hidden_dropout": 0.1})
    model, _ = build(config)
    tokens, labels = tokens_of(config, 4)
    for iteration in (1, 2):
        keys = DropoutKeys(site_words(7, iteration, model.num_dropout_sites), torch.arange(4))
        model(tokens, labels=labels, dropout_keys=keys).mean().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
