"""Every fusion there is, with its backends and when each of them can run. Imports no torch."""

from __future__ import annotations

import math

from fusions.registry import Backend, Facts, Fusion, Obstacle


def _compile_obstacles(facts: Facts) -> list[Obstacle]:
    if facts.machine.compile_problem:
        return [Obstacle("compiler", facts.machine.compile_problem)]
    return []


def _no_elements(shape: tuple[int, ...]) -> list[Obstacle]:
    return [Obstacle("shape", f"{list(shape)} has no elements")] if math.prod(shape) == 0 else []


COMPILE = Backend("compile", _compile_obstacles, _no_elements)

FUSIONS = {
    fusion.flag: fusion
    for fusion in (
        Fusion("bias_dropout_fusion", "fusions.fused_bias_dropout", (COMPILE,)),
        Fusion("bias_activation_fusion", "fusions.fused_bias_gelu", (COMPILE,)),
        Fusion("masked_softmax_fusion", "fusions.fused_softmax", (COMPILE,)),
        Fusion("persist_layer_norm", "fusions.fused_layer_norm", (COMPILE,)),
        Fusion("cross_entropy_loss_fusion", "fusions.fused_cross_entropy", (COMPILE,)),
    )
}
