"""jit_fuser: a function compiled by torch.compile, with a switch that also reaches functions already decorated.

Megatron's switch only rebinds a name, so everything decorated at import stays compiled; here each call looks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_enabled = True


def enable_jit_fuser() -> None:
    """From the next call on, every function decorated with jit_fuser runs compiled."""
    global _enabled
    _enabled = True


def disable_jit_fuser() -> None:
    """From the next call on, every function decorated with jit_fuser runs as plain Python."""
    global _enabled
    _enabled = False


def jit_fuser(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled on its first call while the fuser is enabled.

    A graph is specialised to the first shapes; a dimension that changes becomes symbolic in the second graph, so
    changing lengths cost one recompile, not one each. The recompile limit raises instead of going back to eager.
    """
    compiled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if not _enabled or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if compiled is None:
            _configure()
            compiled = torch.compile(function, fullgraph=True)
        return compiled(*args, **kwargs)

    return call


@functools.cache
def _configure() -> None:
    """Options of torch.compile that hold for the whole process, set before the first compilation."""
    torch._dynamo.config.recompile_limit = 32  # one function serves several dtypes, ranks and broadcast patterns
    torch._dynamo.config.fail_on_recompile_limit_hit = True
