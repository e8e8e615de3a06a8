"""Activations that are not kept for the backward but computed again there. Masks come from counters, so they are the same again.

full         a layer keeps what enters it, and runs once more in the backward (torch.utils.checkpoint)
selective    what is large and cheap: the scores and softmax of unfused attention; the output of the MLP's activation, and of
             norms that are operations of their own, which the next product would keep for its weight gradient
             (Korthikanti et al. 2022, arXiv:2205.05198, section 5)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

Context = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Recompute:
    """What is computed again, in the first `num_layers` layers of a stack (None: in all). `again` is entered around it."""

    mode: str = "none"
    num_layers: int | None = None
    again: Context = field(default=contextlib.nullcontext)

    def of_layer(self, index: int) -> str:
        """none, selective or full for a layer, counted from 0."""
        return self.mode if self.num_layers is None or index < self.num_layers else "none"

    def run(self, function: Callable[..., Any], *args: Any, draws: bool) -> Any:
        """function(*args), of which nothing but the arguments is kept. `draws`: it draws from torch's generator."""
        contexts = contextlib.nullcontext(), self.again()
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=draws, context_fn=lambda: contexts)

    def forget(self, output: Tensor, make: Callable[[], Tensor] | None) -> AbstractContextManager[Any]:
        """While active, whatever would keep `output` for its backward keeps `make` instead, and calls it then.

        `make` must give the same bits, and keep alive only what is kept anyway. None: nothing is forgotten.
        """
        if make is None or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        storage, numel, start = output.untyped_storage()._cdata, output.numel(), output.storage_offset()

        def pack(kept: Tensor) -> Any:
            if kept.untyped_storage()._cdata != storage or kept.numel() != numel:
                return kept
            return kept.size(), kept.stride(), kept.storage_offset() - start

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            with torch.no_grad(), self.again():
                return make().as_strided(*packed)

        return saved_tensors_hooks(pack, unpack)
