"""The learning rate: a pure function of the iteration and the configuration."""

from __future__ import annotations

import math

from configs.run import RunConfig


def learning_rate(config: RunConfig, iteration: int) -> float:
    """The rate of iteration `iteration` (from 1).

    Warm-up is linear: iteration i of w has i/w of the peak. The decay then runs from the peak at iteration w to the
    minimum at `decay_iters`: linear, or half a cosine. wsd stays at the peak and decays linearly over the last
    `wsd_decay_iters`. After the decay the minimum stays.
    """
    o = config.optimizer
    peak, low, end = o.learning_rate, o.min_learning_rate, o.decay_iters or config.training.train_iters
    if iteration < o.warmup_iters:
        return peak * iteration / o.warmup_iters
    if o.schedule == "constant":
        return peak
    start = end - (o.wsd_decay_iters or 0) if o.schedule == "wsd" else o.warmup_iters
    if iteration <= start:
        return peak
    progress = min(1.0, (iteration - start) / (end - start))
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if o.schedule == "cosine" else 1 - progress
    return low + (peak - low) * remaining
