"""The parallel layers. A linear returns (output, bias): the bias is not added, so that what follows can fuse it.

Shapes: s sequence, b micro-batch, t tensor-parallel size; [s/t, ...] only under sequence parallel.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fusions import fused_linear_wgrad
from models.init import constant, normal
from models.tensor_parallel import regions
from models.tensor_parallel.linear import ColumnInput
from models.tensor_parallel.params import ParallelModule, ParameterGradient, TensorParallel

Output = tuple[Tensor, Tensor | None]
Product = Callable[..., Tensor]  # the slot's function of a linear: (x, weight, gradient slot, communication around it)


class ColumnParallelLinear(ParallelModule):
    """y = x A^T with A split by rows. x [s, b, in] (or [s/t, b, in]) -> y [s, b, out/t].

    `output_shape` (its product is `out`) is the shape of the weight before its last dimension; dimension 0 is sharded:
    (f,) for an MLP, (f, 2) for a gated one, (groups, heads/groups + 2, head_dim) for QKV. The bias is the same, flat.
    With (f, 2) the output has the first f/t halves before the second ones: the compute copy is permuted.
    `product(x, weight [out/t, in], gradient slot)` comes from the fusion plan.
    """

    def __init__(
        self,
        input_size: int,
        output_shape: tuple[int, ...],
        *,
        bias: bool,
        init_std: float,
        tp: TensorParallel,
        device: torch.device,
        product: Product = fused_linear_wgrad.reference,
    ):
        super().__init__(tp, device)
        self.add_parameter("weight", (*output_shape, input_size), normal(init_std), shard_dim=0)
        self.halves, self.product = len(output_shape) == 2, product
        self.has_bias = bias
        if bias:
            self.add_parameter("bias", (math.prod(output_shape),), constant(0.0), shard_dim=0)

    def forward(self, x: Tensor) -> Output:
        """(x A^T, bias [out/t] or None)."""
        weight = self.local("weight", x.dtype)
        bias = self.local("bias", x.dtype) if self.has_bias else None
        if self.halves:
            weight = weight.transpose(0, 1)
            bias = None if bias is None else bias.view(-1, 2).t().flatten()
        slot = ParameterGradient(self.get_parameter("weight"))
        return product_of_columns(self.product, x, weight.flatten(0, -2), slot, self.tp), bias  # [s, b, out/t]


def product_of_columns(
    product: Product, x: Tensor, weight: Tensor, slot: ParameterGradient | None, tp: TensorParallel
) -> Tensor:
    """x [s, b, in] (or [s/t, b, in]), weight [out/t, in] -> [s, b, out/t], with the communication hidden behind the products.

    A layer that is compiled as a whole has it in the open, where the compiler can move it.
    """
    if tp.group is None or torch.compiler.is_compiling():
        return product(gather_for_columns(x, tp), weight, slot)
    return product(x, weight, slot, ColumnInput(tp))


def gather_for_columns(x: Tensor, tp: TensorParallel) -> Tensor:
    """x [s, b, in] or [s/t, b, in] -> [s, b, in], whole on every rank, as a product with a weight split by rows needs it."""
    if tp.sequence_parallel:
        return regions.gather_from_sequence_parallel_region(x, tp.group)
    return regions.copy_to_tensor_parallel_region(x, tp.group)


class RowParallelLinear(ParallelModule):
    """y = x A^T with A split by columns. x [s, b, in/t] -> y [s, b, out] (or [s/t, b, out]), summed over the ranks.

    The bias is whole on every rank and belongs after the sum, so it is handed on.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        init_std: float,
        tp: TensorParallel,
        device: torch.device,
        product: Product = fused_linear_wgrad.reference,
    ):
        super().__init__(tp, device)
        self.product = product
        self.add_parameter("weight", (output_size, input_size), normal(init_std), shard_dim=1)
        self.has_bias = bias
        if bias:
            self.add_parameter("bias", (output_size,), constant(0.0), on_sharded_tokens=tp.sequence_parallel)

    def forward(self, x: Tensor) -> Output:
        """(sum over ranks of x A^T, bias [out] or None)."""
        output = self.product(x, self.local("weight", x.dtype), ParameterGradient(self.get_parameter("weight")))
        if self.tp.sequence_parallel:
            output = regions.reduce_scatter_to_sequence_parallel_region(output, self.tp.group)
        else:
            output = regions.reduce_from_tensor_parallel_region(output, self.tp.group)
        if not self.has_bias:
            return output, None
        return output, self.local("bias", x.dtype)


class VocabParallelEmbedding(ParallelModule):
    """Rows of the table split over the ranks. tokens [b, s] -> [s, b, h] (or [s/t, b, h])."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, *, init_std: float, tp: TensorParallel, device: torch.device
    ):
        super().__init__(tp, device)
        self.add_parameter("weight", (num_embeddings, embedding_dim), normal(init_std), shard_dim=0)
        self.rows_per_partition = num_embeddings // tp.size

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows of the tokens; each rank looks up its own and the rest comes by the sum."""
        tokens = tokens.t()  # [s, b]
        weight = self.local("weight", torch.float32)
        if self.tp.group is None:
            return F.embedding(tokens, weight).to(dtype)
        local = tokens - self.tp.rank * self.rows_per_partition
        elsewhere = (local < 0) | (local >= self.rows_per_partition)
        rows = F.embedding(local.masked_fill(elsewhere, 0), weight).to(dtype)
        rows = rows.masked_fill(elsewhere[..., None], 0.0)
        if self.tp.sequence_parallel:
            return regions.reduce_scatter_to_sequence_parallel_region(rows, self.tp.group)
        return regions.reduce_from_tensor_parallel_region(rows, self.tp.group)
