"""What sits in each slot of a model: the one reader of the fusion plan in models/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from configs.transformer import TransformerConfig
from fusions.catalogue import OPERATIONS
from fusions.registry import REFERENCE, BoundFusion, Counters, Decision, FusionPlan, TracedFusion
from models.attention import CrossAttention, CrossAttentionSubmodules, SelfAttention, SelfAttentionSubmodules
from models.core_attention import SDPAttention, UnfusedAttention
from models.fusion_sites import (
    CROSS_ATTENTION_RESIDUAL,
    DECODER,
    ENCODER,
    LM_TRANSFORM,
    MLP_RESIDUAL,
    OUTPUT,
    activation_operation,
    head_activation,
    self_attention_residual,
)
from models.mlp import MLP, MLPSubmodules
from models.norm import Norm
from models.recompute import Recompute
from models.rotary import RotatePacked, SplitThenRotate
from models.spec import ModuleSpec, Slot
from models.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from models.transformer_block import TransformerBlockSubmodules
from models.transformer_layer import AddAndNorm, AddThenNorm, TransformerLayer, TransformerLayerSubmodules

_FIRST_NORM = "input_layernorm"


@dataclass(frozen=True)
class GPTSpec:
    """The stack's specs and the loss, which is a function of logits or of hidden states and the output weight."""

    block: TransformerBlockSubmodules
    loss_function: Callable[..., Tensor]
    loss_from_hidden: bool


@dataclass(frozen=True)
class BertSpec:
    """The stack's specs, the slots of the masked-LM head, and the loss as a function of logits."""

    block: TransformerBlockSubmodules
    head_activation: Callable[..., Tensor]
    head_norm: ModuleSpec
    loss_function: Callable[..., Tensor]


@dataclass(frozen=True)
class T5Spec:
    """The specs of both stacks, and the loss as in a GPT."""

    encoder: TransformerBlockSubmodules
    decoder: TransformerBlockSubmodules
    loss_function: Callable[..., Tensor]
    loss_from_hidden: bool


# Every call is counted in `counters`. With `compile_layers` the slots of a layer leave that to the stack, which calls it.


def gpt_spec(
    config: TransformerConfig,
    plan: FusionPlan,
    counters: Counters,
    compile_layers: bool = False,
    recompute: Recompute | None = None,
) -> GPTSpec:
    """GPT's slots, filled with what the plan decided."""
    block = _block(config, _Binder(plan, counters, compile_layers, recompute=recompute), causal=True)
    return GPTSpec(block, *_loss(plan, counters))


def bert_spec(
    config: TransformerConfig,
    plan: FusionPlan,
    counters: Counters,
    compile_layers: bool = False,
    recompute: Recompute | None = None,
) -> BertSpec:
    """BERT's slots, filled with what the plan decided."""
    block = _block(config, _Binder(plan, counters, compile_layers, recompute=recompute), causal=False)
    bind = _Binder(plan, counters)
    activation = partial(bind("bias_activation_fusion", LM_TRANSFORM), activation=head_activation(config))
    return BertSpec(block, activation, bind.norm(LM_TRANSFORM), _loss(plan, counters)[0])


def t5_spec(
    config: TransformerConfig,
    plan: FusionPlan,
    counters: Counters,
    compile_layers: bool = False,
    recompute: Recompute | None = None,
) -> T5Spec:
    """T5's slots, filled with what the plan decided."""
    encoder = _block(config, _Binder(plan, counters, compile_layers, ENCODER, recompute), causal=False)
    decoder = _block(config, _Binder(plan, counters, compile_layers, DECODER, recompute), causal=True, cross_attention=True)
    return T5Spec(encoder, decoder, *_loss(plan, counters))


def _block(
    config: TransformerConfig, bind: _Binder, *, causal: bool, cross_attention: bool = False
) -> TransformerBlockSubmodules:
    """The slots of one stack."""
    attention = SelfAttentionSubmodules(
        bind.linear(ColumnParallelLinear, "linear_qkv"),
        bind.split_qkv(),
        bind.core(config, "self_attention", causal),
        bind.linear(RowParallelLinear, "linear_proj"),
    )
    mlp = MLPSubmodules(
        bind.linear(ColumnParallelLinear, "linear_fc1"),
        bind.activation(config),
        bind.linear(RowParallelLinear, "linear_fc2"),
    )
    slots: dict[str, Any] = {}
    if cross_attention:
        cross = CrossAttentionSubmodules(
            bind.linear(ColumnParallelLinear, "linear_q"),
            bind.linear(ColumnParallelLinear, "linear_kv"),
            bind.core(config, "cross_attention", causal=False),
            bind.linear(RowParallelLinear, "cross_linear_proj"),
        )
        slots = {
            "pre_cross_attn_layernorm": bind.norm("pre_cross_attn_layernorm"),
            "cross_attention": ModuleSpec(CrossAttention, submodules=cross),
            "cross_attn_add": bind.add("cross_attn_bda", CROSS_ATTENTION_RESIDUAL),
        }
    layer = TransformerLayerSubmodules(
        self_attention=ModuleSpec(SelfAttention, submodules=attention),
        self_attn_add=bind.add("self_attn_bda", self_attention_residual(cross_attention)),
        pre_mlp_layernorm=bind.norm("pre_mlp_layernorm"),
        mlp=ModuleSpec(MLP, submodules=mlp),
        mlp_add=bind.add("mlp_bda", MLP_RESIDUAL),
        output_layernorm=bind.norm("output_layernorm"),
        **slots,
    )
    # The norm before the layers is no part of one, so it counts its own calls.
    first = _Binder(bind.plan, bind.counters, stack=bind.stack).norm(_FIRST_NORM)
    spec = ModuleSpec(TransformerLayer, submodules=layer)
    return TransformerBlockSubmodules(first, spec, bind.traced, bind.count, bind.recompute)


def _loss(plan: FusionPlan, counters: Counters) -> tuple[BoundFusion, bool]:
    """The loss, and whether it is one of hidden states."""
    loss = plan.decision("cross_entropy_loss_fusion", OUTPUT)
    from_hidden = loss.operation == "linear_cross_entropy" and loss.runs != REFERENCE
    # Without the projection fused in, the loss is the plain one of the logits, which the head computes as always.
    operation = loss.operation if from_hidden else "cross_entropy"
    return _Binder(plan, counters)("cross_entropy_loss_fusion", OUTPUT, operation), from_hidden


class _Binder:
    """Makes slots of one stack out of decisions; `stack` is what its sites' names start with."""

    def __init__(
        self,
        plan: FusionPlan,
        counters: Counters,
        traced: bool = False,
        stack: str = "",
        recompute: Recompute | None = None,
    ):
        self.plan, self.counters, self.traced, self.stack = plan, counters, traced, stack
        self.recompute = recompute or Recompute()
        self.bound: list[TracedFusion] = []

    def decision(self, flag: str, site: str) -> Decision:
        return self.plan.decision(flag, self.stack + site)

    def __call__(self, flag: str, site: str, operation: str = "") -> BoundFusion:
        """The decided function of a site; `operation` where another one than the decided has its reference."""
        decision = self.decision(flag, site)
        arguments = OPERATIONS[operation or decision.operation], decision, self.counters, self.plan.strict
        if not self.traced:
            return BoundFusion(*arguments)
        self.bound.append(TracedFusion(*arguments))
        return self.bound[-1]

    def count(self, layers: int) -> None:
        """Note one run through a stack of so many layers, for the slots that can't."""
        for bound in self.bound:
            bound.count(layers)

    def norm(self, site: str) -> ModuleSpec:
        return ModuleSpec(Norm, {"function": self("persist_layer_norm", site)})

    def linear(self, kind: type, site: str) -> ModuleSpec:
        return ModuleSpec(kind, {"product": self("gradient_accumulation_fusion", site)})

    def core(self, config: TransformerConfig, site: str, causal: bool) -> ModuleSpec:
        if config.attention_backend == "sdpa":
            return ModuleSpec(SDPAttention, {"causal": causal})
        return ModuleSpec(UnfusedAttention, {"softmax": self("masked_softmax_fusion", site), "causal": causal})

    def add(self, bda_site: str, residual_site: str) -> Slot:
        if self.decision("residual_norm_fusion", residual_site).runs != REFERENCE:
            return AddAndNorm(self("residual_norm_fusion", residual_site))
        return AddThenNorm(self("bias_dropout_fusion", bda_site))

    def split_qkv(self) -> Slot:
        decision = self.decision("apply_rope_fusion", "self_attention")
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
