"""What a step leaves behind: a leak goes on, a pool that fills up does not."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from trainer.compare.memory import malloc_bytes, memory_of_steps
from trainer.compare.plan import LEAK_BYTES


def memory_of_growing_steps(grows_for: int) -> tuple[dict[str, Any], int]:
    """What was found, and the number of steps."""
    optimizer: Any = SimpleNamespace(
        parameters=[torch.zeros(1000)], state=lambda: {"m": torch.zeros(500)}, zero_grad=lambda: None
    )
    kept: list[torch.Tensor] = []
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        held = torch.zeros(1 << 18)
        time.sleep(0.02)  # malloc is asked from another thread, which a busy machine lets wait
        del held
        if len(kept) < grows_for:
            kept.append(torch.zeros(10_000))

    return memory_of_steps(step, optimizer, torch.device("cpu")), steps


@pytest.mark.skipif(malloc_bytes() is None, reason="malloc can't be asked here")
@pytest.mark.parametrize(("grows_for", "is_leak"), [(10**9, True), (30, False), (0, False)])
def test_growth_that_ends_is_no_leak(grows_for: int, is_leak: bool) -> None:
    # malloc counts a whole process, and what earlier tests left to the garbage collector is freed in ours: a fresh one.
    [(found, steps)] = run_ranks(1, memory_of_growing_steps, grows_for)
    assert found["state_bytes"] == 6000 and max(found["peak_bytes"]) > 6000 + (1 << 20)
    assert (min(found["left_over_bytes"][1:]) > LEAK_BYTES) == is_leak
    assert steps <= 104  # a suspicion has an end too
