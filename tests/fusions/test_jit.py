"""The switch of jit_fuser reaches functions that were decorated, and called, before."""

from __future__ import annotations

import pytest
import torch

from fusions import jit


@pytest.fixture(autouse=True)
def enabled():
    yield
    jit.enable_jit_fuser()


def test_the_switch_takes_effect_on_decorated_functions() -> None:
    seen: list[bool] = []

    @jit.jit_fuser
    def double(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x * 2

    jit.disable_jit_fuser()
    assert double(torch.ones(3)).tolist() == [2, 2, 2]
    assert seen == [False]
    jit.enable_jit_fuser()

    @jit.jit_fuser
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * (3 if torch.compiler.is_compiling() else 30)

    assert triple(torch.ones(3)).tolist() == [3, 3, 3]
    jit.disable_jit_fuser()
    assert triple(torch.ones(3)).tolist() == [30, 30, 30]
    jit.enable_jit_fuser()
    assert triple(torch.ones(3)).tolist() == [3, 3, 3]


def test_a_recompile_limit_is_an_error_not_a_silent_return_to_eager() -> None:
    @jit.jit_fuser
    def scaled(x: torch.Tensor, factor: str) -> torch.Tensor:
        return x * float(factor)

    with pytest.raises(Exception, match="recompile_limit"):
        for number in range(40):
            scaled(torch.ones(2), str(number))
