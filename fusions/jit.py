"""jit_fuser: a function compiled by torch.compile, with a switch that also reaches functions already decorated.

Megatron's switch only rebinds a name, so everything decorated at import stays compiled; here each call looks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

Function = Callable[..., Any]
Watcher = Callable[[Function, Function, tuple[Any, ...], dict[str, Any]], Any]

_enabled = True
_watcher: Watcher | None = None
_graphs: dict[str, int] = {}


def enable_jit_fuser() -> None:
    """From the next call on, every function decorated with jit_fuser runs compiled."""
    global _enabled
    _enabled = True


def disable_jit_fuser() -> None:
    """From the next call on, every function decorated with jit_fuser runs as plain Python."""
    global _enabled
    _enabled = False


@contextlib.contextmanager
def watch_calls(watcher: Watcher) -> Iterator[None]:
    """Inside, each call of a decorated function is watcher(as plain Python, compiled, args, kwargs), which runs one of the two:
    for whoever has to see it as one operation."""
    global _watcher
    before, _watcher = _watcher, watcher
    try:
        yield
    finally:
        _watcher = before


def run_plain(plain: Function, compiled: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A watcher for whatever a compiled function can't be called with, or under."""
    return plain(*args, **kwargs)


def jit_fuser(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled on its first call while the fuser is enabled.

    A graph is specialised to the first shapes; a dimension that changes becomes symbolic in the second graph, so changing
    lengths cost one recompile, not one each. Every graph that is built is counted, see `graphs`. The recompile limit raises
    instead of going back to eager.
    """
    compiled: Callable[..., Any] | None = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if compiled is None:
            _configure()
            compiled = torch.compile(function, fullgraph=True, backend=_counting(function.__qualname__, function.__module__))
        return compiled(*args, **kwargs)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        chosen = run if _enabled else function
        return chosen(*args, **kwargs) if _watcher is None else _watcher(function, chosen, args, kwargs)

    return call


def graphs() -> dict[str, int]:
    """How many graphs were built since the start for each function, by module.function: more than one means recompiles."""
    return dict(_graphs)


def _counting(name: str, module: str) -> Callable[..., Any]:
    """Inductor as a backend that counts what it builds, and rounds where a function says so.

    Without emulate_precision_casts it drops a rounding to half precision whose result is widened again, and a kernel computes
    something else than its own backward, or than the reference.
    """

    def build(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        key = f"{module.rpartition('.')[2]}.{name}"
        _graphs[key] = _graphs.get(key, 0) + 1
        return compile_fx(graph, inputs, config_patches={"emulate_precision_casts": True})

    return build


@functools.cache
def _configure() -> None:
    """Options of torch.compile that hold for the whole process, set before the first compilation."""
    torch._dynamo.config.recompile_limit = 32  # one function serves several dtypes, ranks and broadcast patterns
    torch._dynamo.config.fail_on_recompile_limit_hit = True
