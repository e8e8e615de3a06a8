"""Every fused operation: its module, its flag, and its backends, best first. Imports no torch."""

from __future__ import annotations

from fusions import obstacles
from fusions.registry import Backend, Operation


def _operation(name: str, module: str, *backends: str) -> Operation:
    made = {
        "transformer_engine": lambda: obstacles.TRANSFORMER_ENGINE[name],
        "apex": lambda: obstacles.APEX[name],
        "triton": lambda: obstacles.triton,
        "compile": lambda: obstacles.compiler,
        "addmm": lambda: obstacles.addmm,
        "torch": lambda: obstacles.torch_fused,
    }
    order = [b for b in made if b in backends]  # `true` takes the first without an obstacle
    return Operation(name, f"fusions.{module}", tuple(Backend(b, made[b](), obstacles.no_elements) for b in order))


OPERATIONS = {
    operation.name: operation
    for operation in (
        _operation("bias_dropout_add", "fused_bias_dropout", "compile", "triton"),
        _operation("residual_norm", "fused_residual_norm", "compile", "triton"),
        _operation("bias_gelu", "fused_bias_gelu", "compile", "triton"),
        _operation("bias_geglu", "fused_bias_geglu", "compile", "triton"),
        _operation("bias_swiglu", "fused_bias_swiglu", "compile", "triton"),
        _operation("squared_relu", "fused_weighted_squared_relu", "compile", "triton"),
        _operation("layer_norm", "fused_layer_norm", "compile", "triton", "apex", "transformer_engine"),
        _operation("rms_norm", "fused_layer_norm", "compile", "triton", "apex", "transformer_engine"),
        _operation("scale_mask_softmax", "fused_softmax", "compile", "triton", "apex"),
        _operation("rope", "fused_rope", "compile", "triton", "apex", "transformer_engine"),
        _operation("qkv_rope", "fused_rope", "compile", "triton", "transformer_engine"),
        _operation("mla_rope_query", "fused_mla_yarn_rope_apply", "compile", "triton"),
        _operation("mla_rope_key_value", "fused_mla_yarn_rope_apply", "compile", "triton"),
        _operation("cross_entropy", "fused_cross_entropy", "compile", "triton", "transformer_engine"),
        _operation("linear_cross_entropy", "fused_linear_cross_entropy", "compile", "triton"),
        _operation("indices_to_multihot", "fused_indices_converter", "compile", "triton"),
        _operation("pad_routing_map", "fused_pad_routing_map", "compile", "triton"),
        _operation("linear_wgrad", "fused_linear_wgrad", "addmm", "apex", "transformer_engine"),
        _operation("adamw", "fused_adam", "torch", "triton", "apex", "transformer_engine"),
    )
}
