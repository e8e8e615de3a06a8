"""A walk of many layers from walks of a few: layers are alike, so what a step does and holds is linear in their number."""

from __future__ import annotations

from collections import Counter
from typing import Any

from configs.run import RunConfig
from fusions.machine import Machine
from trainer.planner.walk import Walk, walk

# From so many on, one more adds what any other does: fully_shard gathers a layer ahead, and the first and the last differ.
_FEW = 4


def walk_by_layers(config: RunConfig, machine: Machine) -> Walk:
    """As `walk`, in a time that does not grow with the layers; activations must be recomputed in all layers or in none."""
    wanted = _stack_sizes(config)
    few = {key: min(number, _FEW) for key, number in wanted.items()}
    base = found = walk(_with_layers(config, few), machine)
    for key, number in wanted.items():
        if number > _FEW:
            longer = walk(_with_layers(config, few | {key: _FEW + 1}), machine)
            found = _more(found, longer, base, number - _FEW)
    return found


def _stack_sizes(config: RunConfig) -> dict[str, int]:
    layers = config.transformer.num_layers
    if config.model.family != "t5":
        return {"num_layers": layers}
    return {"num_layers": layers, "decoder_num_layers": config.model.decoder_num_layers or layers}


def _with_layers(config: RunConfig, sizes: dict[str, int]) -> RunConfig:
    transformer = config.transformer.model_copy(update={"num_layers": sizes["num_layers"]})
    model = config.model.model_copy(update={key: n for key, n in sizes.items() if key != "num_layers"})
    return config.model_copy(update={"transformer": transformer, "model": model})


def _more(found: Walk, longer: Walk, base: Walk, times: int) -> Walk:
    """`found` and so many times what `longer` has more than `base`."""
    peaks = tuple(
        {kind: size + times * (more[kind] - less[kind]) for kind, size in memory.items()}
        for memory, more, less in zip(found.peaks, longer.peaks, base.peaks, strict=True)
    )
    operations = Counter(found.operations)
    for operation in longer.operations | base.operations:
        operations[operation] += times * (longer.operations.get(operation, 0) - base.operations.get(operation, 0))
    collectives = [_more_calls(c, _same(c, longer), _same(c, base), times) for c in found.collectives]
    return Walk(peaks, collectives, {o: calls for o, calls in operations.items() if calls}, found.micro_batches)


def _more_calls(found: dict[str, Any], longer: dict[str, Any], base: dict[str, Any], times: int) -> dict[str, Any]:
    return found | {key: found[key] + times * (longer[key] - base[key]) for key in ("calls", "bytes")}


def _same(collective: dict[str, Any], walk: Walk) -> dict[str, Any]:
    return next(c for c in walk.collectives if all(c[key] == collective[key] for key in ("kind", "group", "ranks")))
