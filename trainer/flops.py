"""Model FLOPs, parameters and memory. FLOPs count every matrix product, forward and twice backward, attention as the full square.

Not counted: recomputation, the embedding look-up, anything elementwise. The output layer is counted at its padded width. Imports
no torch.
"""

from __future__ import annotations

from configs.run import RunConfig
from models.fusion_sites import Stack, stacks


def tokens_per_sample(config: RunConfig) -> int:
    """Tokens that a sample puts into the model: of a T5 those of both stacks."""
    return sum(stack.seq_length for stack in stacks(config))


def tokens_per_iteration(config: RunConfig) -> int:
    """Tokens of one optimizer step over the global batch."""
    return tokens_per_sample(config) * config.training.global_batch_size


def flops_per_sample(config: RunConfig) -> int:
    """FLOPs of training on one sample."""
    m, h = config.model, config.transformer.hidden_size
    multiply_adds = sum(stack.num_layers * _layer_multiply_adds(config, stack) for stack in stacks(config))
    multiply_adds += stacks(config)[-1].seq_length * h * m.padded_vocab_size
    if m.family == "bert":
        multiply_adds += config.data.seq_length * h * h  # the masked-LM head's own product
        if m.sentence_head is not None:
            multiply_adds += h * h + 2 * h
    return 6 * multiply_adds


def _layer_multiply_adds(config: RunConfig, stack: Stack) -> int:
    """Of one layer, for all tokens of a sample."""
    tf, h, s = config.transformer, config.transformer.hidden_size, stack.seq_length
    n, g, d = tf.num_attention_heads, tf.query_groups, tf.head_size
    mlp = (3 if tf.gated else 2) * h * tf.ffn_size
    total = s * (h * (n + 2 * g) * d + n * d * h + mlp + 2 * n * d * s)
    if stack.context_length is not None:
        total += s * (2 * h * n * d + 2 * n * d * stack.context_length) + stack.context_length * h * 2 * g * d
    return total


def flops_per_token(config: RunConfig) -> float:
    """FLOPs of training on one token, of a sample's on average."""
    return flops_per_sample(config) / tokens_per_sample(config)


def flops_per_iteration(config: RunConfig) -> int:
    """FLOPs of one optimizer step over the global batch."""
    return flops_per_sample(config) * config.training.global_batch_size


def num_parameters(config: RunConfig) -> int:
    """Elements of all parameters, a tied one once, vocabulary padding included."""
    tf, m, h = config.transformer, config.model, config.transformer.hidden_size
    norm = h * (2 if tf.normalization == "LayerNorm" else 1)
    total = m.padded_vocab_size * h * (1 if m.share_embeddings_and_output_weights else 2)
    for stack in stacks(config):
        total += stack.num_layers * _layer_parameters(config, stack) + norm
        if m.position_embedding_type == "relative":
            total += m.relative_attention_num_buckets * tf.num_attention_heads
    if m.position_embedding_type == "learned_absolute":
        total += m.max_position_embeddings * h
    if m.family == "bert":
        total += m.num_token_types * h + h * h + h + norm + m.padded_vocab_size  # the head's product, norm and bias
        total += 0 if m.sentence_head is None else h * h + h + 2 * h + 2
    return total


def _layer_parameters(config: RunConfig, stack: Stack) -> int:
    tf, h = config.transformer, config.transformer.hidden_size
    n, g, d, f = tf.num_attention_heads, tf.query_groups, tf.head_size, tf.ffn_size
    norm, up = h * (2 if tf.normalization == "LayerNorm" else 1), (2 if tf.gated else 1) * f
    sinks = n if tf.softmax_type == "learnable" else 0
    qkv = (n + 2 * g) * d
    attention = h * qkv + n * d * h + (qkv if tf.has_qkv_bias else 0) + (h if tf.add_bias_linear else 0) + sinks + norm
    mlp = h * (up + f) + (up + h if tf.add_bias_linear else 0) + norm
    return attention * (1 if stack.context_length is None else 2) + mlp


def memory_estimate_gib(config: RunConfig) -> dict[str, float]:
    """GiB on one rank: parameters, gradients and AdamW's two moments as they are sharded (fp32 at rest), and what the backward
    needs of one micro-batch, unfused. A formula; `scripts/plan.py` walks the step itself."""
    t, b, h = config.parallel.tensor_parallel_size, config.training.micro_batch_size, config.transformer.hidden_size
    size = 4 if config.training.precision == "fp32" else 2
    per_rank = num_parameters(config) / (t * config.parallel.shard_size)
    activations = sum(_stack_activations(config, stack, size) for stack in stacks(config))
    activations += stacks(config)[-1].seq_length * b * config.model.padded_vocab_size / t * (size + 8)
    if config.model.family == "bert":
        activations += config.data.seq_length * b * h * 3 * size / (t if config.parallel.sequence_parallel else 1)
    return {
        "parameters": 4 * per_rank / 2**30,
        "gradients": 4 * per_rank / 2**30,
        "optimizer state": 8 * per_rank / 2**30,
        "activations (estimate)": activations / 2**30,
    }


def _stack_activations(config: RunConfig, stack: Stack, size: int) -> float:
    """Bytes kept for the backward of a stack: of layers that are recomputed what `training.recompute` leaves; and one layer
    whole, the one whose backward is at work."""
    mode, whole = config.training.recompute, _layer_activations(config, stack, size)
    if mode == "none":
        return stack.num_layers * whole
    again = min(config.training.recompute_num_layers or stack.num_layers, stack.num_layers)
    tp = config.parallel.tensor_parallel_size if config.parallel.sequence_parallel else 1
    layer_input = stack.seq_length * config.training.micro_batch_size * config.transformer.hidden_size * size / tp
    kept = layer_input if mode == "full" else _layer_activations(config, stack, size, selective=True)
    return (stack.num_layers - again) * whole + again * kept + (whole - kept)


def _layer_activations(config: RunConfig, stack: Stack, size: int, selective: bool = False) -> float:
    """Bytes kept for the backward of one layer: norm inputs and outputs and dropout masks on the residual stream; q, k, v and the
    context; the MLP's inner tensors; attention weights before and after dropout, and its mask. Selective recompute makes the
    norms' outputs, the MLP's activation and the attention weights anew."""
    tf, t, b = config.transformer, config.parallel.tensor_parallel_size, config.training.micro_batch_size
    s, n, d, h = stack.seq_length, tf.num_attention_heads, tf.head_size, tf.hidden_size
    blocks = 2 if stack.context_length is None else 3  # sub-blocks on the residual stream
    stream = s * b * h * blocks * ((2 if selective else 3) * size + 1) / (t if config.parallel.sequence_parallel else 1)
    qkv = 2 * (n + 2 * tf.query_groups) * d + n * d
    inner = s * b * (qkv + ((4 if tf.gated else 3) - selective) * tf.ffn_size) * size / t
    per_score = 2 * size + (1 if tf.attention_dropout else 0) if tf.attention_backend == "unfused" and not selective else 0
    scores = b * n * s * s * per_score / t
    if stack.context_length is not None:
        inner += b * (2 * s * n + 2 * stack.context_length * tf.query_groups) * d * 2 * size / t
        scores += b * n * s * stack.context_length * per_score / t
    return stream + inner + scores
