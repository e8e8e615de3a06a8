"""From request to decision: L08, strictness, fallbacks that are counted."""

from __future__ import annotations

import pytest
import torch

from fusions.catalogue import OPERATIONS
from fusions.machine import Machine, compile_problem
from fusions.registry import BoundFusion, Counters, Facts, FusionError, Request, resolve

GOOD = Machine("cpu", "", "2.13.0")
NO_COMPILER = Machine("cpu", "no C++ compiler (g++ is not on PATH)", "2.13.0")


def request(asked: bool | str, machine: Machine = GOOD, idle: str = "") -> Request:
    facts = Facts(machine, "fp32", 1, False, (8, 2, 16))
    return Request("bias_dropout_fusion", "mlp_bda", OPERATIONS["bias_dropout_add"], asked, facts, idle)


def test_L08_each_state_has_one_meaning() -> None:
    assert resolve([request(False)]).decisions[0].runs == "reference"
    assert resolve([request(True)]).decisions[0].runs == "compile"
    assert resolve([request("compile")]).decisions[0].runs == "compile"


def test_L08_a_fallback_is_recorded_with_its_reason() -> None:
    decision = resolve([request(True, NO_COMPILER)]).decisions[0]
    assert decision.runs == "reference" and decision.fell_back and "g++ is not on PATH" in decision.why


def test_a_required_backend_that_cannot_run_is_an_error() -> None:
    with pytest.raises(FusionError, match=r"bias_dropout_fusion at mlp_bda.*'compile' was required.*g\+\+ is not on PATH"):
        resolve([request("compile", NO_COMPILER)])
    with pytest.raises(FusionError, match="'apex' was required.*it has triton, compile"):
        resolve([request("apex")])


def test_strict_turns_a_fallback_into_an_error() -> None:
    with pytest.raises(FusionError, match="strict_fusions"):
        resolve([request(True, NO_COMPILER)], strict=True)
    assert resolve([request(False, NO_COMPILER)], strict=True).decisions[0].runs == "reference"


def test_a_flag_that_cannot_matter_says_so() -> None:
    decision = resolve([request(True, idle="sdpa does it")]).decisions[0]
    assert decision.why == "no effect: sdpa does it" and not decision.fell_back


def test_plans_have_equal_hashes_exactly_when_they_are_equal() -> None:
    assert resolve([request(True)]).hash() == resolve([request(True)]).hash()
    assert resolve([request(True)]).hash() != resolve([request(True, NO_COMPILER)]).hash()


def bind(strict: bool = False) -> tuple[BoundFusion, Counters]:
    plan, counters = resolve([request(True)], strict), Counters()
    return BoundFusion(OPERATIONS["bias_dropout_add"], plan.decisions[0], counters, strict), counters


def test_calls_are_counted_and_a_shape_that_cannot_run_falls_back_with_its_reason() -> None:
    bound, counters = bind()
    x = torch.randn(3, 2, 8)
    for _ in range(2):
        bound(x, None, x, 0.0, True)
    empty = torch.randn(0, 2, 8)
    assert bound(empty, None, empty, 0.1, True).shape == (0, 2, 8)
    counts = counters.site("bias_dropout_fusion", "mlp_bda")
    assert (counts.fused, counts.reference, list(counts.fallbacks.values())) == (2, 1, [1])
    assert "no elements" in next(iter(counts.fallbacks))


def test_under_strict_the_same_shape_is_an_error() -> None:
    bound, _ = bind(strict=True)
    empty = torch.randn(0, 2, 8)
    with pytest.raises(FusionError, match="no elements"):
        bound(empty, None, empty, 0.1, True)


def test_active_but_never_called_is_reported() -> None:
    bound, counters = bind()
    plan = resolve([request(True)])
    assert [d.site for d in counters.never_called(plan)] == ["mlp_bda"]
    bound(torch.randn(3, 2, 8), None, torch.randn(3, 2, 8), 0.0, True)
    assert counters.never_called(plan) == []


def test_the_compiler_probe_sees_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_problem.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler is not on PATH" in compile_problem()
    compile_problem.cache_clear()


def test_tritons_interpreter_runs_only_by_name() -> None:
    interpreted = Machine("cpu", "no compiler", "2.13.0", (("triton", ""),), triton_interpreted=True)
    assert resolve([request(True, interpreted)]).decisions[0].runs == "reference"
    assert resolve([request("triton", interpreted)]).decisions[0].runs == "triton"
    with pytest.raises(FusionError, match=r"'triton' was required.*needs cuda"):
        resolve([request("triton")])
