"""A measured comparison made up for tests: four arms of an ablation, one of which is wrong, leaks, and does nothing beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from configs.load import load_config
from trainer.compare.arms import Ablation, Arm
from trainer.compare.conductor import Measured
from trainer.compare.plan import ComparisonPlan
from trainer.compare.turns import Budget, Pair, Turns

ROUNDS = 24


def arm(tiny: Path, name: str, asked: dict[str, bool], seconds: float, *, runs: bool = True, drift: float = 0.0, leak: int = 0,
        peak: int = 4 << 20, first: float = 1.0) -> dict[str, Any]:  # fmt: skip
    """What the conductor notes of one arm."""
    rng = np.random.default_rng(sum(map(ord, name)))
    overrides = [f"transformer.{flag}={str(value).lower()}" for flag, value in asked.items()]
    config = load_config(tiny / "tiny.yaml", ["run.device=cpu", *overrides]).config.model_dump()
    decisions = [
        {"flag": flag, "site": "mlp", "operation": "op", "asked": value, "runs": "compile" if value and runs else "reference",
         "obstacles": [] if runs else [{"backend": "compile", "kind": "device", "text": "<none>"}], "note": ""}
        for flag, value in asked.items()
    ]  # fmt: skip
    calls = {f"{flag} @ mlp": {"fused": 60 * (value and runs), "reference": 60 * (not (value and runs)), "fallbacks": {}}
             for flag, value in asked.items()}  # fmt: skip
    losses = [5 - 0.1 * i for i in range(20)]
    sites = {"decoder.layers.*.mlp": {"forward": seconds * 0.4, "backward": seconds * 0.5}}
    profile = {"total": seconds, "sites": sites, "phases": {"optimizer": seconds * 0.1}}
    roof = {"operation": "bias_gelu", "backend": "compile", "flags": [], "sites": ["mlp"], "part": "forward", "shape": [8],
            "calls_per_step": 3, "bytes": 1 << 20, "ms": 0.3, "copy_ms": 0.1, "gigabytes_per_second": 3.5,
            "copy_gigabytes_per_second": 10.0, "share_of_copy_bandwidth": 0.33, "headroom_ms": 0.6, "bound": "memory", "floor_ms": 0.1}  # fmt: skip
    return {
        "name": name, "overrides": overrides, "environment": {}, "processes": 1, "config": config, "sources": {},
        "losses": [loss * (1 + drift * i) for i, loss in enumerate(losses)],
        "grad_norms": [1.0 + drift] * 20,
        "step_seconds": [first, *[seconds] * 19],
        "tokens_per_step": 128,
        "plan": {"strict": False, "decisions": decisions},
        "options": [],
        "counters": calls,
        "never_called": [],
        "machine": {"device": "a <made-up> machine", "world_size": 1, "threads_per_process": 2, "torch": "2.13", "gpu": False},
        "memory": {"state_bytes": 1 << 20, "peak_bytes": [peak] * 4, "left_over_bytes": [0, leak, leak, leak]},
        "blocks": [
            {"seconds_per_step": seconds * float(np.exp(0.004 * rng.standard_normal())), "untimed_steps": 1, "gpu": None}
            for _ in range(ROUNDS)
        ],
        "profiles": [profile] * 3,
        "roofline": [roof],
    }  # fmt: skip


def comparison(tiny: Path, **changes: dict[str, Any]) -> tuple[ComparisonPlan, Measured]:
    """none, all, and two singles; `changes` by arm replace arguments of `arm`."""
    off = {"bias_dropout_fusion": False, "bias_activation_fusion": False}
    given: dict[str, dict[str, Any]] = {
        "none": {"asked": off, "seconds": 0.100},
        "all": {"asked": dict.fromkeys(off, True), "seconds": 0.080, "peak": 3 << 20, "first": 4.0},
        "bias_dropout_fusion": {"asked": off | {"bias_dropout_fusion": True}, "seconds": 0.090, "drift": 5e-9},
        "bias_activation_fusion": {"asked": off | {"bias_activation_fusion": True}, "seconds": 0.095},
    }
    arms = {name: arm(tiny, name, **{**fields, **changes.get(name, {})}) for name, fields in given.items()}
    pairs = [Pair(name, "none") for name in list(arms)[1:]]
    made = [Arm(name, tuple(a["overrides"])) for name, a in arms.items()]
    singles = {name: name for name in list(arms)[2:]}
    plan = ComparisonPlan(
        str(tiny / "tiny.yaml"), ["run.device=cpu"], made, pairs, Budget(ROUNDS), str(tiny / "out"),
        left_out={"apply_rope_fusion": "no effect: position_embedding_type is <learned>"}, ablation=Ablation(single=singles),
    )  # fmt: skip
    seconds: dict[str, dict[str, dict[int, float]]] = {}
    order: dict[str, list[tuple[int, str]]] = {name: [] for name in arms}
    blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for pair in pairs:
        for name in (pair.against, pair.arm):
            a = arms[name]
            times = {number: block["seconds_per_step"] / a["tokens_per_step"] for number, block in enumerate(a["blocks"])}
            seconds.setdefault(pair.key, {})[name] = times
            order[name] += [(number, pair.key) for number in times]
            blocks[name] += a["blocks"]
    for name, a in arms.items():
        a["blocks"] = blocks[name]
    turns = Turns(0.99, pairs, seconds, order, rounds=ROUNDS, ended="all rounds done")
    noise = {"none": [{"losses": [x * (1 + 1e-7) for x in arms["none"]["losses"]], "grad_norms": [1.0 + 1e-6] * 20}]}
    return plan, Measured(arms, {}, noise, dict.fromkeys(arms, "none"), turns, 1, ["a note with <b>marks</b>"])
