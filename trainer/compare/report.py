"""From what was measured to a report: plain data, from which every verdict can be recomputed. Imports no torch."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict
from typing import Any

import numpy as np

from trainer.compare.arms import FUSION_KEYS
from trainer.compare.attribution import attribution
from trainer.compare.conductor import Measured
from trainer.compare.parity import judge
from trainer.compare.plan import LEAK_BYTES, ComparisonPlan, differences, other_losses
from trainer.compare.statistics import CONFIDENCE, EQUIVALENCE, Estimate, corrected, estimate
from trainer.compare.turns import Pair

MEMORY_EQUIVALENCE = 0.005


def make_report(plan: ComparisonPlan, measured: Measured, command: list[str]) -> dict[str, Any]:
    """Everything that report.json holds."""
    _join_blocks(measured)
    safety = {name: judge(measured.arms, measured.noise, name, measured.reference[name]) for name in measured.arms}
    alive = [name for name in measured.arms if name not in measured.dead]
    pairs = [pair for pair in plan.pairs if pair.arm in alive and pair.against in alive]
    comparisons = [_comparison(measured, pair, safety) for pair in pairs]
    machine = next((arm["machine"] for arm in measured.arms.values() if "machine" in arm), {})
    report = {
        "command": command,
        "config_path": plan.config_path,
        "overrides": plan.overrides,
        "comparisons": comparisons,
        "faults": _faults(measured),
        "dead": measured.dead,
        "left_out": plan.left_out,
        "notes": measured.notes,
        "ablation": _ablation(plan, measured, safety),
        "attribution": [found for pair in pairs if (found := attribution(measured.arms, pair))],
        "environment": machine,
        "how_measured": {
            "rounds": measured.turns.rounds,
            "ended": measured.turns.ended,
            "steps_per_block": measured.steps_per_block,
            "loss_iterations": plan.loss_iters,
            "familywise_confidence": CONFIDENCE,
            "confidence_of_each": corrected(CONFIDENCE, len(measured.turns.pairs)),
            "equivalence": EQUIVALENCE,
        },
        "loss_noise": measured.noise,
        "arms": [arm | {"loss_safety": safety[name]} for name, arm in measured.arms.items()],
    }
    report["headline"] = headline(report)
    return _finite(report)


def headline(report: dict[str, Any]) -> str:
    """The verdict in a sentence: that of the first comparison."""
    if report["comparisons"]:
        first = report["comparisons"][0]["sentence"]
        return first[0].upper() + first[1:] + "."
    return f"No verdict: {'; '.join(f'{name} died: {why}' for name, why in report['dead'].items())}"


def _join_blocks(measured: Measured) -> None:
    """Say of each block which comparison and round it belongs to."""
    for name, arm in measured.arms.items():
        order = measured.turns.order.get(name, [])
        arm["blocks"] = [
            {"round": number, "pair": pair, **block}
            for (number, pair), block in zip(order, arm.get("blocks", []), strict=False)
        ]


def _comparison(measured: Measured, pair: Pair, safety: dict[str, dict[str, Any]]) -> dict[str, Any]:
    arm, base = measured.arms[pair.arm], measured.arms[pair.against]
    found = measured.turns.estimate(pair)
    assert found is not None, "two arms that are alive have taken part in every round"
    different = differences(base["config"], arm["config"])
    nothing = bool(different) and set(different) <= set(FUSION_KEYS) and _ran(arm) == _ran(base)
    identical = not [key for key in different if not key.startswith("run.")] and _started(arm) == _started(base)
    verdict = "no_difference" if nothing else found.verdict()
    memory = _memory(base, arm)
    comparable = measured.reference[pair.arm] == measured.reference[pair.against]
    safe = _both([safety[pair.arm], safety[pair.against]])
    safe = safe if comparable or safe is False else None
    result = {
        "arm": pair.arm,
        "against": pair.against,
        "ratio": found.ratio,
        "interval": list(found.interval),
        "confidence": found.confidence,
        "rounds": found.rounds,
        "verdict": verdict,
        "smallest_visible": found.half_width,
        "toggle_did_nothing": nothing,
        "identical_arms": identical,
        "loss_safe": safe,
        "memory": memory,
        "break_even_iterations": _break_even(pair, base, arm) if verdict == "faster" else None,
    }
    result["sentence"] = _sentence(result, found, measured, safety)
    return result


def _sentence(result: dict[str, Any], found: Estimate, measured: Measured, safety: dict[str, dict[str, Any]]) -> str:
    arm, against = result["arm"], result["against"]
    parts = [found.sentence(arm, against)]
    if result["toggle_did_nothing"]:
        parts = [f"{arm}: the toggle did nothing: what was asked for differs from {against}, what ran does not"]
    elif result["identical_arms"]:
        parts = [f"A/A, the same arm twice: {parts[0]}"]
    if result["memory"] and result["memory"]["verdict"] != "no_difference":
        parts.append(f"{abs(1 - 1 / result['memory']['ratio']):.1%} {result['memory']['verdict']} peak memory")
    for name in (arm, against):
        if result["loss_safe"] is False and safety[name]["safe"] is False:
            parts.append(f"{name} is {safety[name]['sentence']}" if name != arm else safety[name]["sentence"])
    if result["loss_safe"] is None:
        keys = other_losses(measured.arms[against]["config"], measured.arms[arm]["config"])
        parts.append(f"losses can't be compared ({', '.join(keys)} differ)" if keys else "losses were not compared")
    return "; ".join(parts)


def _both(safeties: list[dict[str, Any]]) -> bool | None:
    values = [safety["safe"] for safety in safeties]
    return False if False in values else None if None in values else True


def _memory(base: dict[str, Any], arm: dict[str, Any]) -> dict[str, Any] | None:
    """Peak bytes: above 1, the arm needs less. The interval spans the steps that were measured."""
    if "memory" not in base or "memory" not in arm:
        return None
    ours, theirs = arm["memory"]["peak_bytes"][1:], base["memory"]["peak_bytes"][1:]
    ratio = statistics.median(theirs) / statistics.median(ours)
    interval = [min(theirs) / max(ours), max(theirs) / min(ours)]
    verdict = "less" if interval[0] > 1 else "more" if interval[1] < 1 else "no_difference"
    if abs(ratio - 1) <= MEMORY_EQUIVALENCE:
        verdict = "no_difference"
    return {"ratio": ratio, "interval": interval, "verdict": verdict, "arm_bytes": max(ours), "against_bytes": max(theirs)}


def median_step(arm: dict[str, Any], pair: Pair | None = None) -> float:
    """Seconds of a step; of one comparison's blocks, or of all."""
    return statistics.median(b["seconds_per_step"] for b in arm["blocks"] if pair is None or b["pair"] == pair.key)


def compile_seconds(arm: dict[str, Any]) -> float:
    """What the first step took beyond a usual one."""
    return max(0.0, arm["step_seconds"][0] - statistics.median(arm["step_seconds"][1:]))


def _break_even(pair: Pair, base: dict[str, Any], arm: dict[str, Any]) -> int | None:
    saved = median_step(base, pair) / base["tokens_per_step"] - median_step(arm, pair) / arm["tokens_per_step"]
    extra = compile_seconds(arm) - compile_seconds(base)
    return round(extra / (saved * arm["tokens_per_step"])) if saved > 0 and extra > 0 else None


def _ran(arm: dict[str, Any]) -> tuple[Any, ...]:
    ran = [(d["flag"], d["site"], d["operation"], d["runs"]) for d in arm["plan"]["decisions"]]
    return ran, arm["options"], arm["counters"], _started(arm)


def _started(arm: dict[str, Any]) -> tuple[Any, ...]:
    return arm["processes"], arm["environment"], arm["config"]["run"]["threads"], arm["config"]["run"]["device"]


def _faults(measured: Measured) -> list[str]:
    """What is wrong whatever the times say."""
    faults = [f"{name} died: {why}" for name, why in measured.dead.items()]
    for name, arm in measured.arms.items():
        faults += [f"{name}: {site} is active but was called zero times" for site in arm.get("never_called", [])]
        left = arm.get("memory", {}).get("left_over_bytes", [0, 0])[1:]
        if min(left) > LEAK_BYTES:
            faults.append(f"{name} leaks memory: each step leaves {min(left):,} bytes or more behind")
    return faults


def _ablation(plan: ComparisonPlan, measured: Measured, safety: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The effect of each flag, alone and last; and whether the single effects add up to the joint one."""
    parts = plan.ablation
    if parts is None or {parts.none, parts.all} & set(measured.dead):
        return None
    turns, confidence = measured.turns, corrected(CONFIDENCE, len(measured.turns.pairs))

    def logs(arm: str, against: str) -> dict[int, float]:
        """By round; of an arm that died, none."""
        pair = Pair(arm, against)
        if pair not in turns.pairs or {arm, against} & set(measured.dead):
            return {}
        return {number: math.log(base / mine) for number, (base, mine) in turns.series(pair).items()}

    def effect(by_round: dict[int, float], sign: int = 1) -> dict[str, Any] | None:
        return asdict(estimate(sign * np.array(list(by_round.values())), confidence)) if by_round else None

    rows = [
        {
            "flag": flag,
            "alone": effect(logs(arm, parts.none)),
            "last": effect(logs(parts.without[flag], parts.all), -1) if flag in parts.without else None,
            "loss_safe": safety[arm]["safe"],
        }
        for flag, arm in parts.single.items()
    ]
    singles = [logs(arm, parts.none) for arm in parts.single.values()]
    whole = logs(parts.all, parts.none)
    found = {
        "flags": rows,
        "loss_safe": _both([safety[name] for name in (parts.all, *parts.single.values())]),
        "joint": effect(whole),
        "product_of_singles": None,
        "joint_over_product": None,
    }
    rounds = sorted(set(whole).intersection(*singles))
    if not rounds:
        return found | {"sentence": "an arm of a single flag died, so whether the effects add up is not known"}
    added = np.array([sum(single[number] for single in singles) for number in rounds])
    joint = np.array([whole[number] for number in rounds])
    estimates = [estimate(values, confidence) for values in (added, joint, joint - added)]
    found |= {"product_of_singles": asdict(estimates[0]), "joint_over_product": asdict(estimates[2])}
    mark = "; NOT LOSS-SAFE, for at least one of these arms" if found["loss_safe"] is False else ""
    return found | {"sentence": _sum_sentence(*estimates) + mark}


def _sum_sentence(added: Estimate, joint: Estimate, difference: Estimate) -> str:
    begin = f"the single effects multiply to {added.ratio:.3f}, all flags together give {joint.ratio:.3f}: "
    low, high = difference.interval
    if high < 1:
        return f"{begin}they overlap by {1 - difference.ratio:.1%} ({1 - high:.1%} to {1 - low:.1%})"
    if low > 1:
        return f"{begin}they help each other by {difference.ratio - 1:.1%} ({low - 1:.1%} to {high - 1:.1%})"
    if math.isinf(difference.half_width):
        return f"{begin}{difference.rounds} rounds are too few to say whether that is the same"
    return f"{begin}no overlap larger than {max(1 - low, high - 1):.1%}"


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become null."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
