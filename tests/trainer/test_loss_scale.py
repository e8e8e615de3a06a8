"""fp16: the loss scale falls and grows as it should, and a run learns what a bf16 run learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.run import LossScaleConfig
from tests.distributed import run_ranks
from tests.models.build import build, optimizer_of, run_config
from tests.trainer.test_data_parallel import BATCH, train_data_parallel
from tests.trainer.test_loop import job, run
from trainer.loop import train
from trainer.loss_scale import LossScaler
from trainer.records import read_metrics

HALF = {"training.precision": "fp16"}


def test_growth_backoff_hysteresis_and_minimum() -> None:
    config = {"initial": 8.0, "growth_interval": 3, "hysteresis": 2, "minimum": 2.0}
    scaler = LossScaler(LossScaleConfig.model_validate(config), torch.device("cpu"))
    seen = []
    for overflow in (0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0):
        scaler.update(torch.tensor(bool(overflow)))
        seen.append(scaler.scale.item())
    # The first overflow is let pass, each after it halves, down to 2; three steps in a row double and restore the patience.
    assert seen == [8, 8, 4, 2, 2, 2, 2, 4, 4, 4, 4, 8, 8, 8, 16]


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_learns_what_fp32_learns(fused: bool) -> None:
    flags = ("bias_dropout_fusion", "bias_activation_fusion", "masked_softmax_fusion") if fused else False
    half, single = train_data_parallel(BATCH | HALF, flags), train_data_parallel(BATCH)
    assert half["losses"] == pytest.approx(single["losses"], rel=5e-3)
    for name, gradient in single["gradients"].items():
        scaled = half["gradients"][name]  # unscaled: torch's fused AdamW does that in place
        if not fused or gradient.norm() > 1e-2 * max(g.norm() for g in single["gradients"].values()):
            assert (scaled - gradient).norm() <= 2e-2 * gradient.norm() + 1e-4, name


def test_fp16_is_the_same_over_data_parallel_ranks() -> None:
    expected = train_data_parallel(BATCH | HALF, False, 5)
    for result in run_ranks(2, train_data_parallel, BATCH | HALF | {"parallel.data_sharding": "full"}, False, 5):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-3)


def test_an_overflow_is_skipped_counted_and_logged(tiny: Path) -> None:
    overrides = (
        "training.precision=fp16",
        "logging.log_interval=1",
        "training.train_iters=8",
        "training.max_nonfinite_iters=1",
    )
    built = job(tiny, *overrides, "training.loss_scale.initial=1099511627776", "training.loss_scale.hysteresis=1")
    before = {n: p.detach().clone() for n, p in built.model.named_parameters()}
    train(built)
    rows = [r for r in read_metrics(tiny / "run" / "metrics.jsonl") if "loss" in r]
    assert all(r["skipped"] for r in rows) and [r["loss_scale"] for r in rows] == [2.0 ** (40 - n) for n in range(8)]
    assert all(torch.equal(before[n], p) for n, p in built.model.named_parameters())


def test_C05_the_loss_scale_is_resumed_bit_for_bit(tiny: Path) -> None:
    extra = "training.precision=fp16", "training.loss_scale.growth_interval=2", "optimizer.decay_iters=8"
    whole = run(tiny, f"run.directory={tiny}/whole", "training.train_iters=8", *extra)
    parts = f"run.directory={tiny}/parts"
    run(tiny, parts, "training.train_iters=5", *extra)
    assert run(tiny, parts, "training.train_iters=8", *extra) == whole
    scales = [
        [r["loss_scale"] for r in read_metrics(tiny / name / "metrics.jsonl") if "loss" in r] for name in ("whole", "parts")
    ]
    assert scales[0] == scales[1] and scales[0][-1] > scales[0][0]
    run(
        tiny, parts, "training.train_iters=9", "training.precision=fp32", "optimizer.decay_iters=9"
    )  # the precision may change


def test_no_scale_without_fp16() -> None:
    config = run_config({"training.precision": "bf16"})
    model, counters = build(config)
    found: Any = optimizer_of(config, model, counters)
    assert found.scaler is None and not any("loss_scale" in key for key in found.state())
