"""What is computed again changes no bit, and is counted apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.models.build import BERT, T5, build, optimizer_of, run_config, samples_of
from tests.trainer.test_data_parallel import BATCH, train_data_parallel
from trainer.data.families import make_batch
from trainer.loop import train_step

MODERN = {
    "model.position_embedding_type": "rope",
    "transformer.activation": "swiglu",
    "transformer.normalization": "RMSNorm",
    "transformer.layernorm_zero_centered_gamma": True,
    "transformer.softmax_type": "learnable",
}


def steps(
    overrides: dict[str, Any], fused: Any, count: int = 3
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    config = run_config(overrides, fused)
    model, counters = build(config)
    optimizer = optimizer_of(config, model, counters)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for iteration in range(1, count + 1):
        batch = make_batch(samples_of(config, 4, generator), [0, 1, 2, 3], config)
        losses.append(train_step(model, optimizer, [batch], config, iteration).loss.item())
    return losses, {n: p.detach() for n, p in model.named_parameters()}, counters.as_dict()


@pytest.mark.parametrize("fused", [False, ("bias_activation_fusion", "masked_softmax_fusion"), True], ids=str)
@pytest.mark.parametrize("family", [{}, MODERN, BERT, T5], ids=["gpt", "modern", "bert", "t5"])
def test_same_bits_with_dropout(family: dict[str, Any], fused: Any) -> None:
    if fused is True and family is T5:
        fused = ("residual_norm_fusion", "bias_activation_fusion", "masked_softmax_fusion")
    losses, weights, plain = steps(family, fused)
    for mode in ("selective", "full"):
        again, theirs, counts = steps(family | {"training.recompute": mode}, fused)
        assert again == losses, mode
        for name, weight in weights.items():
            assert torch.equal(weight, theirs[name]), (mode, name)
        assert all(site["recomputed"] == 0 for site in plain.values())
        for name, site in counts.items():  # the same calls beside the recomputed ones
            assert (site["fused"], site["reference"]) == (plain[name]["fused"], plain[name]["reference"]), name
        stack = "encoder." if family is T5 else ""
        expected = 3 * 3  # iterations x layers
        softmax = counts[f"masked_softmax_fusion @ {stack}self_attention"]
        assert softmax["recomputed"] == expected, (mode, softmax)
        assert counts[f"bias_activation_fusion @ {stack}mlp"]["recomputed"] == expected


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_by_block_only_the_first_layers(mode: str) -> None:
    losses, _, _ = steps({}, False)
    again, _, counts = steps({"training.recompute": mode, "training.recompute_num_layers": 1}, False)
    assert again == losses and counts["masked_softmax_fusion @ self_attention"]["recomputed"] == 3


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_the_same_bits_at_four_ranks(mode: str, sharding: str) -> None:
    shared = BATCH | {
        "parallel.tensor_parallel_size": 2,
        "parallel.sequence_parallel": True,
        "parallel.data_sharding": sharding,
    }
    plain = run_ranks(4, train_data_parallel, shared, False, 4)
    for ours, theirs in zip(
        run_ranks(4, train_data_parallel, shared | {"training.recompute": mode}, False, 4), plain, strict=True
    ):
        assert ours["losses"] == theirs["losses"]
        for name, gradient in theirs["gradients"].items():
            assert torch.equal(ours["gradients"][name], gradient), name


def test_compiled_layers_are_recomputed_whole() -> None:
    compiled = {"training.compile_layers": True}
    losses, _, _ = steps(compiled, True)
    again, _, _ = steps(compiled | {"training.recompute": "full"}, True)
    assert again == losses
