"""What sits in each slot of a model: the one reader of the fusion plan in models/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from configs.transformer import TransformerConfig
from fusions.catalogue import FUSIONS
from fusions.registry import BoundFusion, Counters, FusionPlan
from models.attention import SelfAttention, SelfAttentionSubmodules
from models.core_attention import SDPAttention, UnfusedAttention
from models.mlp import MLP, MLPSubmodules
from models.norm import Norm
from models.spec import ModuleSpec
from models.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from models.transformer_block import TransformerBlockSubmodules
from models.transformer_layer import TransformerLayer, TransformerLayerSubmodules


@dataclass(frozen=True)
class GPTSpec:
    """The stack's specs and the loss."""

    block: TransformerBlockSubmodules
    loss_function: Callable[..., Tensor]


def gpt_spec(config: TransformerConfig, plan: FusionPlan, counters: Counters) -> GPTSpec:
    """GPT's slots, filled with what the plan decided; every call is counted in `counters`."""

    def bound(flag: str, site: str) -> BoundFusion:
        return BoundFusion(FUSIONS[flag], plan.decision(flag, site), counters, plan.strict)

    def norm(site: str) -> ModuleSpec:
        return ModuleSpec(Norm, {"function": bound("persist_layer_norm", site)})

    core = ModuleSpec(SDPAttention)
    if config.attention_backend == "unfused":
        core = ModuleSpec(UnfusedAttention, {"softmax": bound("masked_softmax_fusion", "self_attention")})
    attention = SelfAttentionSubmodules(ColumnParallelLinear, core, RowParallelLinear)
    mlp = MLPSubmodules(ColumnParallelLinear, bound("bias_activation_fusion", "mlp"), RowParallelLinear)
    layer = TransformerLayerSubmodules(
        input_layernorm=norm("input_layernorm"),
        self_attention=ModuleSpec(SelfAttention, submodules=attention),
        self_attn_bda=bound("bias_dropout_fusion", "self_attn_bda"),
        pre_mlp_layernorm=norm("pre_mlp_layernorm"),
        mlp=ModuleSpec(MLP, submodules=mlp),
        mlp_bda=bound("bias_dropout_fusion", "mlp_bda"),
    )
    block = TransformerBlockSubmodules(ModuleSpec(TransformerLayer, submodules=layer), norm("final_layernorm"))
    return GPTSpec(block, bound("cross_entropy_loss_fusion", "output_layer"))
