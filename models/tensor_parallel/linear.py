"""Communication around the product of a column-parallel layer, hidden behind the products that don't need it.

    forward       x whole = gather(x);                  y = x W^T
    backward      start gather(x)        dx = dy W      the gather overlaps this product
                  start reduce(dx)       dW = dy^T x    the reduction overlaps this one

Under sequence parallel x is this rank's share of the tokens [s/t, b, in], and the share is what is kept for the backward: one
more all-gather for (t - 1)/t of the memory (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from models.tensor_parallel import regions
from models.tensor_parallel.params import TensorParallel


@dataclass(frozen=True)
class Pending:
    """The output of a collective that may still be running; `work` None: it is there."""

    output: Tensor
    work: Any = None

    def wait(self) -> Tensor:
        """The output, complete."""
        if self.work is not None:
            self.work.wait()
        return self.output


@dataclass(frozen=True)
class ColumnInput:
    """The input of a product with a weight split by rows: whole on every rank before it, its gradient summed after it."""

    tp: TensorParallel

    def gather(self, x: Tensor) -> Pending:
        """Start to bring [s/t, b, in] together to [s, b, in]; without sequence parallel x is whole already."""
        if not self.tp.sequence_parallel:
            return Pending(x)
        out = x.new_empty(x.shape[0] * self.tp.size, *x.shape[1:])
        return Pending(out, regions.all_gather_single(out, x.contiguous(), group=self.tp.group, async_op=True))

    def reduce(self, grad: Tensor) -> Pending:
        """Start to sum the gradient of the whole x over the ranks, each of which has a part; the sum, or this rank's share of it.

        Without sequence parallel the sum is written into `grad`.
        """
        if not self.tp.sequence_parallel:
            grad = grad.contiguous()
            return Pending(grad, dist.all_reduce(grad, group=self.tp.group, async_op=True))
        out = grad.new_empty(grad.shape[0] // self.tp.size, *grad.shape[1:])
        return Pending(out, regions.reduce_scatter_single(out, grad.contiguous(), group=self.tp.group, async_op=True))
