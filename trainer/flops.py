"""Model FLOPs. Counted: every matrix product, forward and twice backward, attention as the full square.

Not counted: recomputation, the embedding look-up, anything elementwise. The output layer is counted at its padded width.
"""

from __future__ import annotations

from configs.run import RunConfig


def flops_per_token(config: RunConfig) -> int:
    """FLOPs of training on one token at the configured sequence length."""
    tf, h = config.transformer, config.transformer.hidden_size
    n, g, d = tf.num_attention_heads, tf.query_groups, tf.head_size
    projections = h * (n + 2 * g) * d + n * d * h + (3 if tf.gated else 2) * h * tf.ffn_size
    attention = 2 * n * d * config.data.seq_length
    multiply_adds = tf.num_layers * (projections + attention) + h * config.model.padded_vocab_size
    return 6 * multiply_adds


def flops_per_iteration(config: RunConfig) -> int:
    """FLOPs of one optimizer step over the global batch."""
    return flops_per_token(config) * config.data.seq_length * config.training.global_batch_size


def num_parameters(config: RunConfig) -> int:
    """Elements of all parameters, a tied one once, vocabulary padding included."""
    tf, m, h = config.transformer, config.model, config.transformer.hidden_size
    n, g, d, f = tf.num_attention_heads, tf.query_groups, tf.head_size, tf.ffn_size
    norm = h * (2 if tf.normalization == "LayerNorm" else 1)
    up = 2 * f if tf.gated else f
    biases = (n + 2 * g) * d + up + 2 * h if tf.add_bias_linear else 0
    sinks = n if tf.softmax_type == "learnable" else 0
    layer = h * (n + 2 * g) * d + n * d * h + h * (up + f) + biases + sinks + 2 * norm
    embeddings = m.padded_vocab_size * h * (1 if m.share_embeddings_and_output_weights else 2)
    positions = m.max_position_embeddings * h if m.position_embedding_type == "learned_absolute" else 0
    return tf.num_layers * layer + norm + embeddings + positions


def memory_estimate_gib(config: RunConfig) -> dict[str, float]:
    """GiB on one rank: parameters, gradients, AdamW's two moments, and activations of one micro-batch (unfused, estimated)."""
    tf, t, b, s = (
        config.transformer,
        config.parallel.tensor_parallel_size,
        config.training.micro_batch_size,
        config.data.seq_length,
    )
    size = 4 if config.training.precision == "fp32" else 2
    per_rank = num_parameters(config) / t
    h, f, qkv = tf.hidden_size, tf.ffn_size, (tf.num_attention_heads + 2 * tf.query_groups) * tf.head_size
    shared = 1 / t if config.parallel.sequence_parallel else 1.0
    # Kept for the backward of one layer: norm inputs and outputs and dropout masks on the residual stream; q, k, v and the
    # context; the MLP's two inner tensors; attention weights before and after dropout, and its mask.
    stream = s * b * h * (6 * size + 2) * shared
    heads = s * b * (2 * qkv + tf.num_attention_heads * tf.head_size + (4 if tf.gated else 3) * f) * size / t
    scores = 0.0
    if tf.attention_backend == "unfused":
        scores = b * tf.num_attention_heads * s * s * (2 * size + (1 if tf.attention_dropout else 0)) / t
    logits = s * b * config.model.padded_vocab_size / t * (size + 8)
    return {
        "parameters": 4 * per_rank / 2**30,
        "gradients": 4 * per_rank / 2**30,
        "optimizer state": 8 * per_rank / 2**30,
        "activations (estimate)": (tf.num_layers * (stream + heads + scores) + logits) / 2**30,
    }
