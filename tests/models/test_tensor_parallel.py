"""Tensor and sequence parallel against the unsharded model, per parameter: T01 to T06, T08 to T11, T13, C11's sibling.

20 iterations with dropout 0.1 of a model of 3 layers, 8 heads in 4 groups and an odd vocabulary (DESIGN section 9).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from configs.transformer import FUSION_FLAGS
from models.tensor_parallel import regions
from models.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from models.tensor_parallel.params import TensorParallel
from tests.distributed import run_ranks
from tests.models.build import build, optimizer_of, run_config, samples_of
from tests.numerics import relative
from trainer.data.families import make_batch
from trainer.gradients import partial_parameters, reduce_partial_gradients
from trainer.loop import train_step

LOSS_RTOL = GRADIENT_RTOL = 1e-5


def train(overrides: dict[str, Any], fused: bool | tuple[str, ...], iterations: int = 20) -> dict[str, Any]:
    """Losses of each iteration, gradients of the first, final weights: gathered, and whether all ranks had the same bits."""
    sp = bool(overrides.get("parallel.sequence_parallel"))
    size = dist.get_world_size() if dist.is_initialized() else 1
    config = run_config(overrides | {"parallel.tensor_parallel_size": size}, fused)
    mesh = init_device_mesh("cpu", (size,)) if size > 1 else None
    model, counters = build(config, tp=TensorParallel(mesh, sp))
    optimizer = optimizer_of(config, model, counters)
    micro, batch_size = config.training.micro_batch_size, config.training.global_batch_size
    generator = torch.Generator().manual_seed(0)
    losses, gradients, initial = [], {}, {n: whole(p) for n, p in model.named_parameters()}
    for iteration in range(1, iterations + 1):
        samples = samples_of(config, batch_size, generator)
        batches = [
            make_batch(samples[i : i + micro], list(range(i, i + micro)), config) for i in range(0, batch_size, micro)
        ]
        losses.append(train_step(model, optimizer, batches, config, iteration).loss.item())
        if iteration == 1:
            gradients = {n: whole(p.grad) for n, p in model.named_parameters()}
    return {
        "losses": losses,
        "gradients": gradients,
        "initial": initial,
        "replicated": {n: p.to_local().detach().clone() if isinstance(p, DTensor) else p.detach().clone()
                       for n, p in model.named_parameters() if not isinstance(p, DTensor) or p.placements[0].is_replicate()},
        "counters": counters.as_dict(),
    }  # fmt: skip


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def same_training(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """DESIGN section 9: losses 1e-5 relative; gradients |d| <= 1e-5 max(|g|, 1e-3 |g_all|)."""
    for ours, theirs in zip(result["losses"], expected["losses"], strict=True):
        assert ours == pytest.approx(theirs, rel=LOSS_RTOL)
    total = float(torch.stack([g.double().norm() for g in expected["gradients"].values()]).norm())
    for name, gradient in expected["gradients"].items():
        assert relative(result["gradients"][name], gradient, total) <= GRADIENT_RTOL, name


@pytest.fixture(scope="module")
def unsharded() -> dict[str, Any]:
    return train({}, False)


@pytest.mark.parametrize(("size", "sequence_parallel"), [(2, False), (2, True), (4, True)])
def test_T01_T08_T09_T11_the_same_training_at_every_size(
    size: int, sequence_parallel: bool, unsharded: dict[str, Any]
) -> None:
    ranks = run_ranks(size, train, {"parallel.sequence_parallel": sequence_parallel}, False)
    for result in ranks:
        same_training(result, unsharded)
        for name, weight in result["initial"].items():
            assert torch.equal(weight, unsharded["initial"][name]), name  # T11: the same model, bit for bit
        for name, weight in result["replicated"].items():  # T01: still bit-equal on all ranks after 20 steps
            assert torch.equal(weight, ranks[0]["replicated"][name]), name
    assert len(ranks[0]["replicated"]) > 10


# Flags whose operation the plain model doesn't have, and the models that have it.
OWN_MODEL = {
    "persist_layer_norm": {"transformer.normalization": "RMSNorm"},
    "apply_rope_fusion": {"model.position_embedding_type": "rope", "model.rotary_percent": 0.5},
    "use_fused_weighted_squared_relu": {"transformer.activation": "squared_relu"},
}


@pytest.mark.parametrize("fused", [(f,) for f in FUSION_FLAGS if f not in OWN_MODEL] + [True], ids=str)
def test_T02_each_fusion_changes_no_training(fused: bool | tuple[str, ...], unsharded: dict[str, Any]) -> None:
    result = train({}, fused)
    same_training(result, unsharded)
    assert sum(site["fused"] for site in result["counters"].values()) > 0


@pytest.mark.parametrize("flag", OWN_MODEL)
def test_T02_fusions_of_other_models_change_no_training(flag: str) -> None:
    result = train(OWN_MODEL[flag], (flag,), 5)
    same_training(result, train(OWN_MODEL[flag], False, 5))
    assert sum(site["fused"] for site in result["counters"].values()) > 0


# Everything that the plain model doesn't have, at once.
MODERN = {
    "model.position_embedding_type": "rope", "transformer.fused_single_qkv_rope": True, "transformer.activation": "swiglu",
    "transformer.normalization": "RMSNorm", "transformer.layernorm_zero_centered_gamma": True,
    "transformer.softmax_type": "learnable", "transformer.cross_entropy_fusion_impl": "linear",
    "training.micro_batch_size": 2,  # no clamp: its gradient jumps, so that a rounding can change it
}  # fmt: skip


def test_T02_T17_a_modern_model_fused_and_sharded_is_the_same() -> None:
    """RoPE on packed QKV, SwiGLU, sinks, RMSNorm, loss from hidden states, accumulation: fused is unfused, tp 2 is tp 1."""
    expected = train(MODERN, False, 5)
    fused = train(MODERN, True, 5)
    same_training(fused, expected)
    assert {d for d, site in fused["counters"].items() if site["fused"]} >= {
        "apply_rope_fusion @ self_attention", "cross_entropy_loss_fusion @ output_layer", "bias_activation_fusion @ mlp",
        "residual_norm_fusion @ mlp_bda + output_layernorm", "gradient_accumulation_fusion @ linear_qkv", "optimizer.fusion @ optimizer",
    }  # fmt: skip
    for result in run_ranks(2, train, MODERN | {"parallel.sequence_parallel": True}, True, 5):
        same_training(result, expected)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_memory_efficient_norm_trains_the_same(kind: str) -> None:
    plain = {"transformer.normalization": kind}
    result = train(plain | {"transformer.memory_efficient_layer_norm": True}, ("persist_layer_norm",), 8)
    same_training(result, train(plain, False, 8))


def test_T02_K10_all_fusions_with_sequence_parallel(unsharded: dict[str, Any]) -> None:
    """LayerNorm; the modern model above has RMSNorm."""
    for result in run_ranks(2, train, {"parallel.sequence_parallel": True}, True):
        same_training(result, unsharded)


@pytest.mark.parametrize("micro", [1, 2])
def test_N20_accumulation_and_micro_batch_change_nothing(micro: int, unsharded: dict[str, Any]) -> None:
    same_training(train({"training.micro_batch_size": micro}, False), unsharded)


VARIANT = {
    "model.position_embedding_type": "rope", "model.share_embeddings_and_output_weights": False, "transformer.num_query_groups": 2,
    "transformer.add_bias_linear": False, "transformer.window_size": 9, "transformer.activation": "gelu",
}  # fmt: skip


def test_a_different_architecture_is_the_same_at_two_ranks() -> None:
    expected = train(VARIANT, False, 5)
    for result in run_ranks(2, train, VARIANT | {"parallel.sequence_parallel": True}, True, 5):
        same_training(result, expected)


def _layers() -> dict[str, Any]:
    """T03, T04, T05, T13 and the regions, in one start of the processes."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh, device, out = init_device_mesh("cpu", (size,)), torch.device("cpu"), {}
    for sp in (False, True):
        tp = TensorParallel(mesh, sp)
        row = RowParallelLinear(2, 1, bias=True, init_std=1.0, tp=tp, device=device)
        with torch.no_grad():
            row.weight.to_local().fill_(1.0)
            row.bias.to_local().fill_(10.0)
        y, bias = row(torch.ones(4, 1, 2 // size))
        out["T03", sp] = (y + bias).flatten().tolist()
        (y + bias).sum().backward()
        reduce_partial_gradients(partial_parameters(row), mesh.get_group())
        out["T04", sp] = row.bias.grad.to_local().tolist()
    column = ColumnParallelLinear(8, (8,), bias=False, init_std=1.0, tp=TensorParallel(mesh), device=device)
    from models.init import initialise

    initialise(torch.nn.ModuleList([column]), 1)
    out["T13"] = column.weight.to_local().clone()
    group = mesh.get_group()
    x = torch.arange(8.0).view(4, 2) + 100 * rank
    out["gather last"] = regions.gather_from_tensor_parallel_region(x, group)
    scattered = (torch.arange(8.0).view(4, 2)).requires_grad_()
    part = regions.scatter_to_sequence_parallel_region(scattered, group)
    (part * (rank + 1)).sum().backward()
    out["scatter"], out["scatter grad"] = part.detach(), scattered.grad
    return out


def test_T03_T04_T13_layers_and_regions() -> None:
    ranks = run_ranks(2, _layers)
    for rank, out in enumerate(ranks):
        assert out["T03", False] == [12.0] * 4 and out["T03", True] == [12.0] * 2  # 22 where the bias is added twice
        assert out["T04", False] == [4.0] and out["T04", True] == [4.0]  # 2 where the sum over ranks is missing
        first, second = torch.arange(8.0).view(4, 2), torch.arange(8.0).view(4, 2) + 100
        assert torch.equal(out["gather last"], torch.cat([first, second], -1))
        assert torch.equal(out["scatter"], torch.arange(8.0).view(4, 2)[2 * rank : 2 * rank + 2])
        assert torch.equal(out["scatter grad"], torch.tensor([[1.0, 1], [1, 1], [2, 2], [2, 2]]))
    assert not torch.equal(ranks[0]["T13"], ranks[1]["T13"])


def _refuses() -> list[str]:
    config = run_config({"parallel.tensor_parallel_size": 2})
    model, _ = build(config, tp=TensorParallel(init_device_mesh("cpu", (2,))))
    messages = []
    for call in (
        lambda: model(torch.zeros(1, 32, dtype=torch.long), labels=torch.zeros(1, 32, dtype=torch.long)),
        lambda: model.output_layer.loss_of_logits(
            torch.zeros(4, 1, config.model.padded_vocab_size), torch.zeros(1, 4, dtype=torch.long)
        ),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_N15_gathered_logits_and_missing_keys_are_refused() -> None:
    for messages in run_ranks(2, _refuses):
        assert "needs dropout_keys" in messages[0] and "Gathered logits" in messages[1]
