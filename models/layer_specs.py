"""What sits in each slot of a model: the one reader of the fusion plan in models/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from configs.transformer import TransformerConfig
from fusions.catalogue import OPERATIONS
from fusions.registry import REFERENCE, BoundFusion, Counters, FusionPlan, TracedFusion
from models.attention import SelfAttention, SelfAttentionSubmodules
from models.core_attention import SDPAttention, UnfusedAttention
from models.fusion_sites import ATTENTION_RESIDUAL, MLP_RESIDUAL, activation_operation
from models.mlp import MLP, MLPSubmodules
from models.norm import Norm
from models.rotary import RotatePacked, SplitThenRotate
from models.spec import ModuleSpec, Slot
from models.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from models.transformer_block import TransformerBlockSubmodules
from models.transformer_layer import AddAndNorm, AddThenNorm, TransformerLayer, TransformerLayerSubmodules

_FIRST_NORM, _FINAL_NORM = "input_layernorm", "final_layernorm"


@dataclass(frozen=True)
class GPTSpec:
    """The stack's specs and the loss, which is a function of logits or of hidden states and the output weight."""

    block: TransformerBlockSubmodules
    loss_function: Callable[..., Tensor]
    loss_from_hidden: bool


def gpt_spec(config: TransformerConfig, plan: FusionPlan, counters: Counters, compile_layers: bool = False) -> GPTSpec:
    """GPT's slots, filled with what the plan decided; every call is counted in `counters`.

    With `compile_layers` the slots of a layer leave the counting to the stack, which calls it.
    """
    bind, outside = _Binder(plan, counters, compile_layers), _Binder(plan, counters)
    core = ModuleSpec(SDPAttention)
    if config.attention_backend == "unfused":
        core = ModuleSpec(UnfusedAttention, {"softmax": bind("masked_softmax_fusion", "self_attention")})
    attention = SelfAttentionSubmodules(
        bind.linear(ColumnParallelLinear, "linear_qkv"),
        bind.split_qkv(),
        core,
        bind.linear(RowParallelLinear, "linear_proj"),
    )
    mlp = MLPSubmodules(
        bind.linear(ColumnParallelLinear, "linear_fc1"),
        bind.activation(config),
        bind.linear(RowParallelLinear, "linear_fc2"),
    )
    layer = TransformerLayerSubmodules(
        input_layernorm=bind.norm(_FIRST_NORM),
        self_attention=ModuleSpec(SelfAttention, submodules=attention),
        self_attn_add=bind.add("self_attn_bda", ATTENTION_RESIDUAL),
        pre_mlp_layernorm=bind.norm("pre_mlp_layernorm"),
        mlp=ModuleSpec(MLP, submodules=mlp),
        mlp_add=bind.add("mlp_bda", MLP_RESIDUAL),
    )
    # The norm after the last layer is called by that layer, whose slot adds and normalises.
    final = bind.norm(_FINAL_NORM)
    block = TransformerBlockSubmodules(ModuleSpec(TransformerLayer, submodules=layer), final, compile_layers, bind.count)
    loss = plan.decision("cross_entropy_loss_fusion", "output_layer")
    from_hidden = loss.operation == "linear_cross_entropy" and loss.runs != REFERENCE
    # Without the projection fused in, the loss is the plain one of the logits, which the head computes as always.
    operation = loss.operation if from_hidden else "cross_entropy"
    return GPTSpec(block, outside("cross_entropy_loss_fusion", "output_layer", operation), from_hidden)


class _Binder:
    """Makes slots out of decisions."""

    def __init__(self, plan: FusionPlan, counters: Counters, traced: bool = False):
        self.plan, self.counters, self.traced = plan, counters, traced
        self.bound: list[TracedFusion] = []
        # Called once in a run through the stack: the last norm; and the first one where all others are part of an addition.
        fused = plan.decision("residual_norm_fusion", MLP_RESIDUAL).runs != REFERENCE
        self.once = (_FINAL_NORM, _FIRST_NORM) if fused else (_FINAL_NORM,)

    def __call__(self, flag: str, site: str, operation: str = "") -> BoundFusion:
        """The decided function of a site; `operation` where another one than the decided has its reference."""
        decision = self.plan.decision(flag, site)
        arguments = OPERATIONS[operation or decision.operation], decision, self.counters, self.plan.strict
        if not self.traced:
            return BoundFusion(*arguments)
        self.bound.append(TracedFusion(*arguments))
        return self.bound[-1]

    def count(self, layers: int) -> None:
        """Note one run through a stack of so many layers, for the slots that can't."""
        for bound in self.bound:
            bound.count(1 if bound.decision.site in self.once else layers)

    def norm(self, site: str) -> ModuleSpec:
        return ModuleSpec(Norm, {"function": self("persist_layer_norm", site)})

    def linear(self, kind: type, site: str) -> ModuleSpec:
        return ModuleSpec(kind, {"product": self("gradient_accumulation_fusion", site)})

    def add(self, bda_site: str, residual_site: str) -> Slot:
        if self.plan.decision("residual_norm_fusion", residual_site).runs != REFERENCE:
            return AddAndNorm(self("residual_norm_fusion", residual_site))
        return AddThenNorm(self("bias_dropout_fusion", bda_site))

    def split_qkv(self) -> Slot:
        decision = self.plan.decision("apply_rope_fusion", "self_attention")
        if decision.operation == "qkv_rope" and decision.runs != REFERENCE:
            return RotatePacked(self("apply_rope_fusion", "self_attention"))
        return SplitThenRotate(self("apply_rope_fusion", "self_attention", "rope"))

    def activation(self, config: TransformerConfig) -> Slot:
        squared = activation_operation(config) == "squared_relu"
        bound = self("use_fused_weighted_squared_relu" if squared else "bias_activation_fusion", "mlp")
        if squared:
            return bound
        if not config.gated:
            return partial(bound, activation=config.activation)
        options = {"clamp": config.activation_func_clamp_value, "fp8_input_store": config.activation_func_fp8_input_store}
        if config.activation == "swiglu":
            return partial(bound, **options)
        act = "gelu_tanh" if config.activation == "geglu" else "quick_gelu"
        return partial(bound, act=act, offset=config.glu_linear_offset, **options)
