"""The fusion sites of a model, with the facts of each. Imports no torch, so that explain.py can show a plan at once."""

from __future__ import annotations

from typing import Any

from configs.run import RunConfig, rotary_dim
from configs.transformer import TransformerConfig
from fusions.catalogue import OPERATIONS
from fusions.machine import Machine
from fusions.registry import REFERENCE, Facts, FusionPlan, Request, resolve

Times = dict[str, dict[str, float]]
ATTENTION_RESIDUAL, MLP_RESIDUAL = "self_attn_bda + pre_mlp_layernorm", "mlp_bda + next layernorm"
OPTIMIZER_FLAG = "optimizer.fusion"


def fusion_plan(config: RunConfig, machine: Machine, times: Times | None = None) -> FusionPlan:
    """Decide every fusion flag at every site of the configured model. `times` is what `auto` decides by.

    Raises FusionError where a fusion is required and can't run.
    """
    return resolve(fusion_requests(config, machine, times), config.transformer.strict_fusions, times)


def fusion_requests(config: RunConfig, machine: Machine, times: Times | None = None) -> list[Request]:
    """One request per (flag, site kind) of a GPT."""
    site = _Sites(config, machine)
    residual = site.residual_norms()
    fused_sites = {d.site for d in resolve(residual, times=times, required=False).decisions if d.runs != REFERENCE}
    return [
        *residual,
        *site.residuals_and_norms(fused_sites),
        *site.mlp(),
        *site.attention(),
        *site.output(),
        *site.linears(),
        site.optimizer(),
    ]


def activation_operation(tf: TransformerConfig) -> str:
    """The operation of the configured activation."""
    gated = {"swiglu": "bias_swiglu", "geglu": "bias_geglu", "quick_geglu": "bias_geglu"}
    return gated.get(tf.activation) or ("squared_relu" if tf.activation == "squared_relu" else "bias_gelu")


class _Sites:
    """Builds requests; shapes are those of one rank."""

    def __init__(self, config: RunConfig, machine: Machine):
        self.config, self.machine, self.tf = config, machine, config.transformer
        self.t = config.parallel.tensor_parallel_size
        self.s, self.b = config.data.seq_length, config.training.micro_batch_size
        rows = self.s // self.t if config.parallel.sequence_parallel else self.s
        self.hidden = (rows, self.b, self.tf.hidden_size)

    def request(
        self,
        flag: str,
        site: str,
        operation: str,
        shape: tuple[int, ...],
        *,
        idle: str = "",
        asked: Any = None,
        **options: Any,
    ) -> Request:
        """`idle`: why the flag can't matter here; `asked` overrides the configured value."""
        facts = Facts(
            self.machine,
            self.config.training.precision,
            self.t,
            self.config.parallel.sequence_parallel,
            shape,
            tuple(options.items()),
        )
        value = getattr(self.tf, flag) if asked is None else asked
        return Request(flag, site, OPERATIONS[operation], value, facts, idle)

    def residual_norms(self) -> list[Request]:
        """The adds together with the norms after them."""
        options: dict[str, Any] = {
            "bias": self.tf.add_bias_linear,
            "dropout": self.tf.hidden_dropout,
            "normalization": self.tf.normalization,
        }
        sites = (ATTENTION_RESIDUAL, MLP_RESIDUAL)
        return [self.request("residual_norm_fusion", site, "residual_norm", self.hidden, **options) for site in sites]

    def residuals_and_norms(self, fused: set[str]) -> list[Request]:
        """The adds and the norms by themselves; those that are part of a fused site have no say."""
        tf = self.tf
        add: dict[str, Any] = {"bias": tf.add_bias_linear, "dropout": tf.hidden_dropout}
        kind = "layer_norm" if tf.normalization == "LayerNorm" else "rms_norm"
        norm: dict[str, Any] = {"affine": True, "memory_efficient": tf.memory_efficient_layer_norm}
        native = kind == "layer_norm" and self.machine.device == "cpu" and not tf.memory_efficient_layer_norm
        own = "on a CPU PyTorch's own LayerNorm is one pass already, and runs either way" if native else ""
        attention, mlp = (
            "residual_norm_fusion does it" if site in fused else "" for site in (ATTENTION_RESIDUAL, MLP_RESIDUAL)
        )
        return [
            self.request("bias_dropout_fusion", "self_attn_bda", "bias_dropout_add", self.hidden, idle=attention, **add),
            self.request("bias_dropout_fusion", "mlp_bda", "bias_dropout_add", self.hidden, idle=mlp, **add),
            self.request("persist_layer_norm", "input_layernorm", kind, self.hidden, idle=own, **norm),
            self.request("persist_layer_norm", "pre_mlp_layernorm", kind, self.hidden, idle=attention or own, **norm),
            self.request("persist_layer_norm", "final_layernorm", kind, self.hidden, idle=mlp or own, **norm),
        ]

    def mlp(self) -> list[Request]:
        """The activation, which belongs to one of two flags; the other is only mentioned if it is set."""
        tf, operation = self.tf, activation_operation(self.tf)
        inner = (self.s, self.b, tf.ffn_size // self.t * (2 if tf.gated else 1))
        options: dict[str, Any] = {"bias": tf.add_bias_linear, "activation": tf.activation}
        if tf.gated:
            act = {"geglu": "gelu_tanh", "quick_geglu": "quick_gelu"}.get(tf.activation)
            options |= {"act": act, "clamp": tf.activation_func_clamp_value, "offset": tf.glu_linear_offset}
            options["fp8_input_store"] = tf.activation_func_fp8_input_store
        owner = "use_fused_weighted_squared_relu" if operation == "squared_relu" else "bias_activation_fusion"
        requests = [self.request(owner, "mlp", operation, inner, **options)]
        for flag in ("bias_activation_fusion", "use_fused_weighted_squared_relu"):
            if flag != owner and getattr(tf, flag) is not False:
                idle = f"activation {tf.activation} has {owner}"
                requests.append(self.request(flag, "mlp", operation, inner, idle=idle, **options))
        return requests

    def attention(self) -> list[Request]:
        """The softmax, and the rotation of queries and keys."""
        tf, model = self.tf, self.config.model
        n, g, d = tf.num_attention_heads // self.t, tf.query_groups // self.t, tf.head_size
        sdpa = "attention_backend sdpa computes the softmax inside its own kernel" if tf.attention_backend == "sdpa" else ""
        softmax = self.request(
            "masked_softmax_fusion",
            "self_attention",
            "scale_mask_softmax",
            (self.b, n, self.s, self.s),
            idle=sdpa,
            causal=True,
            window=tf.window_size,
            dropout=tf.attention_dropout,
            sink=tf.softmax_type,
            mask=self.config.data.reset_attention_mask,
        )
        rope = model.position_embedding_type == "rope"
        packed = tf.fused_single_qkv_rope
        magnitude = 1.0 if model.rope_scaling is None or model.rope_scaling.type != "yarn" else "yarn's"
        rotary = self.request(
            "apply_rope_fusion",
            "self_attention",
            "qkv_rope" if packed else "rope",
            (self.s, self.b, g, (n // g + 2) * d) if packed else (self.s, self.b, n, d),
            idle="" if rope else f"position_embedding_type is {model.position_embedding_type}",
            head_dim=d,
            rotary_dim=rotary_dim(model, tf) if rope else d,
            interleaved=model.rotary_interleaved,
            positions_per_sample=self.config.data.reset_position_ids,
            qk_bias=tf.add_bias_linear,
            magnitude=magnitude,
        )
        return [softmax, rotary]

    def output(self) -> list[Request]:
        """The loss, from logits or from hidden states."""
        tf, model = self.tf, self.config.model
        linear = tf.cross_entropy_fusion_impl == "linear"
        asked = tf.cross_entropy_loss_fusion
        if tf.cross_entropy_fusion_impl == "transformer_engine" and asked is True:
            asked = "transformer_engine"
        last_rank_padding = model.padded_vocab_size - model.vocab_size
        return [
            self.request(
                "cross_entropy_loss_fusion",
                "output_layer",
                "linear_cross_entropy" if linear else "cross_entropy",
                (self.s, self.b, model.padded_vocab_size // self.t),
                asked=asked,
                padding=min(last_rank_padding, model.padded_vocab_size // self.t - 1),
                hidden=tf.hidden_size,
                z_loss=0.0,
                label_smoothing=0.0,
                soft_cap=None,
            )
        ]

    def linears(self) -> list[Request]:
        """The weight gradients of the linear layers."""
        tf, request = self.tf, self._linear
        n, g, d = tf.num_attention_heads, tf.query_groups, tf.head_size
        return [
            request("linear_qkv", tf.hidden_size, (n + 2 * g) * d // self.t),
            request("linear_proj", n * d // self.t, tf.hidden_size),
            request("linear_fc1", tf.hidden_size, tf.ffn_size // self.t * (2 if tf.gated else 1), gated=tf.gated),
            request("linear_fc2", tf.ffn_size // self.t, tf.hidden_size),
        ]

    def _linear(self, site: str, inputs: int, outputs: int, gated: bool = False) -> Request:
        idle = "the halves of a gated weight are not stored as its product has them" if gated else ""
        shape = (self.s, self.b, outputs)
        return self.request("gradient_accumulation_fusion", site, "linear_wgrad", shape, idle=idle, inputs=inputs)

    def optimizer(self) -> Request:
        """AdamW, judged by the matrices of one layer."""
        asked, elements = self.config.optimizer.fusion, 12 * self.tf.hidden_size**2 // self.t
        return self.request(OPTIMIZER_FLAG, "optimizer", "adamw", (elements,), asked=asked)
