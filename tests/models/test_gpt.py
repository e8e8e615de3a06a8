"""GPT against HF GPT-2, and what its parts promise: N04 N05 N06 N10 N11 N13 N26 N29 T10 T12 T13 D17 G10."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from configs.model import RopeScaling
from configs.run import RunConfig
from configs.transformer import FUSION_FLAGS
from fusions.fused_rope import reference as apply_rotary
from fusions.machine import Machine
from fusions.random import DropoutKeys, site_words
from models.fusion_sites import fusion_plan
from models.gpt import GPTModel
from models.rotary import RotaryTables, magnitude, rotary_frequencies
from models.tensor_parallel.params import TensorParallel
from tests.models.build import build, optimizer_of, run_config, tokens_of
from trainer.flops import flops_per_token, num_parameters

VARIANTS = [
    {},
    {"transformer.add_bias_linear": False, "transformer.normalization": "RMSNorm"},
    {"model.position_embedding_type": "rope", "model.share_embeddings_and_output_weights": False},
    {"transformer.head_dim": 12, "transformer.ffn_hidden_size": 96},
]


@pytest.mark.parametrize("overrides", VARIANTS, ids=str)
def test_parameter_and_flop_counts_are_the_built_models(overrides: dict) -> None:
    config = run_config(overrides | {"transformer.hidden_dropout": 0.0, "transformer.attention_dropout": 0.0})
    model, _ = build(config)
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())
    tokens, labels = tokens_of(config, 2)
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=labels).sum().backward()
    assert counter.get_total_flops() == flops_per_token(config) * tokens.numel()


def test_G01_flops_of_the_worked_example() -> None:
    config = run_config(
        {"transformer.num_layers": 2, "transformer.hidden_size": 64, "transformer.num_query_groups": 8, "model.vocab_size": 512,
         "data.seq_length": 128, "model.max_position_embeddings": 128}
    )  # fmt: skip
    assert flops_per_token(config) == 983040  # the full attention square


def hf_gpt2(config: RunConfig, model: GPTModel):
    """An HF GPT-2 with the same weights. HF stores Conv1D weights input x output, and q, k, v as three blocks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tf, h = config.transformer, config.transformer.hidden_size
    hf = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.model.vocab_size, n_positions=config.model.max_position_embeddings, n_embd=h, n_layer=tf.num_layers,
            n_head=tf.num_attention_heads, activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            attn_implementation="eager",
        )
    )  # fmt: skip
    ours = dict(model.named_parameters())
    pairs: dict[str, tuple[str, object]] = {}  # HF name -> (our name, our tensor -> HF's)

    def qkv_weight(w: torch.Tensor) -> torch.Tensor:  # [g, 3, d, h] with one head a group -> [h, 3 h]
        return w.permute(1, 0, 2, 3).reshape(3 * h, h).T

    def qkv_bias(b: torch.Tensor) -> torch.Tensor:
        return b.view(tf.query_groups, 3, tf.head_size).permute(1, 0, 2).reshape(-1)

    pairs["transformer.wte.weight"] = ("embedding.word_embeddings.weight", lambda w: w[: config.model.vocab_size])
    pairs["transformer.wpe.weight"] = ("embedding.position_embeddings.weight", lambda w: w)
    for kind in ("weight", "bias"):
        pairs[f"transformer.ln_f.{kind}"] = (f"decoder.layers.{tf.num_layers - 1}.output_layernorm.{kind}", lambda w: w)
        for n in range(tf.num_layers):
            a, b = f"transformer.h.{n}", f"decoder.layers.{n}"
            before = f"decoder.layers.{n - 1}.output_layernorm" if n else "decoder.input_layernorm"
            transpose = (lambda w: w.T) if kind == "weight" else (lambda w: w)
            pairs[f"{a}.ln_1.{kind}"] = (f"{before}.{kind}", lambda w: w)
            pairs[f"{a}.ln_2.{kind}"] = (f"{b}.pre_mlp_layernorm.{kind}", lambda w: w)
            pairs[f"{a}.attn.c_attn.{kind}"] = (
                f"{b}.self_attention.linear_qkv.{kind}",
                qkv_weight if kind == "weight" else qkv_bias,
            )
            pairs[f"{a}.attn.c_proj.{kind}"] = (f"{b}.self_attention.linear_proj.{kind}", transpose)
            pairs[f"{a}.mlp.c_fc.{kind}"] = (f"{b}.mlp.linear_fc1.{kind}", transpose)
            pairs[f"{a}.mlp.c_proj.{kind}"] = (f"{b}.mlp.linear_fc2.{kind}", transpose)
    theirs = dict(hf.named_parameters())
    assert set(theirs) == set(pairs) and {name for name, _ in pairs.values()} == set(ours)
    with torch.no_grad():
        for name, (our_name, convert) in pairs.items():
            theirs[name].copy_(convert(ours[our_name]))
    return hf, pairs


@pytest.mark.parametrize("attention_backend", ["unfused", "sdpa"])
@pytest.mark.parametrize("fused", [False, True])
def test_C17_logits_and_gradients_of_hf_gpt2(fused: bool, attention_backend: str) -> None:
    config = run_config(
        {"transformer.num_query_groups": 8, "transformer.hidden_dropout": 0.0, "transformer.attention_dropout": 0.0,
         "transformer.attention_backend": attention_backend}, fused=fused,
    )  # fmt: skip
    model, _ = build(config)
    with torch.no_grad():  # biases and norms start as constants, which would hide a mix-up
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    hf, pairs = hf_gpt2(config, model)
    tokens, labels = tokens_of(config, 3)
    logits = model(tokens).transpose(0, 1)[..., : config.model.vocab_size]
    torch.testing.assert_close(logits, hf(tokens).logits, atol=2e-5, rtol=1e-5)
    model(tokens, labels=labels).mean().backward()
    # N29: HF shifts labels itself, we shift in the data; both must mean the same next token.
    hf(tokens, labels=torch.cat([tokens[:, :1], labels], 1)[:, : tokens.shape[1]]).loss.backward()
    hf.zero_grad()
    hf_logits = hf(tokens).logits
    torch.nn.functional.cross_entropy(hf_logits.flatten(0, 1), labels.flatten()).backward()
    theirs, ours = dict(hf.named_parameters()), dict(model.named_parameters())
    for name, (our_name, convert) in pairs.items():
        torch.testing.assert_close(
            convert(ours[our_name].grad), theirs[name].grad, atol=1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_N29_labels_are_shifted_once() -> None:
    config = run_config({})
    model, _ = build(config)
    labels = torch.randint(0, config.model.vocab_size, (1, 8))
    logits = torch.zeros(8, 1, config.model.padded_vocab_size)
    logits[torch.arange(8), 0, labels[0]] = 50.0
    assert model.output_layer.loss_of_logits(logits, labels).max() < 1e-6


def test_G10_T10_the_first_loss_is_ln_of_the_vocabulary() -> None:
    for vocab in (512, 7):
        config = run_config({"model.vocab_size": vocab})
        model, _ = build(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        tokens = torch.randint(0, vocab, (2, 16))
        loss = model.eval()(tokens, labels=tokens).mean().item()
        assert loss == pytest.approx(math.log(vocab), abs=1e-5)


@pytest.mark.parametrize("layer_scaling", [True, False])
def test_N04_query_key_layer_scaling_changes_nothing(layer_scaling: bool) -> None:
    results = []
    for fused in (False, True):
        config = run_config({"transformer.apply_query_key_layer_scaling": layer_scaling}, fused=fused)
        model, _ = build(config)
        results.append(model.eval()(tokens_of(config, 2)[0]))
    plain, _ = build(run_config({}))
    expected = plain.eval()(tokens_of(run_config({}), 2)[0])
    for logits in results:
        torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", ["unfused", "sdpa"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_N05_N06_D17_a_mask_holds_on_every_backend(backend: str, fused: bool, window: int | None) -> None:
    overrides = {
        "transformer.attention_backend": backend,
        "transformer.attention_dropout": 0.0,
        "transformer.window_size": window,
    }
    config = run_config(overrides, fused=fused)
    model, _ = build(config)
    model.eval()
    tokens, _ = tokens_of(config, 1)
    documents = torch.tensor([0] * 12 + [1] * (tokens.shape[1] - 12))
    mask = (documents[:, None] != documents)[None, None]
    changed = tokens.clone()
    changed[0, 3] = (changed[0, 3] + 1) % 300
    before, after = model(tokens, attention_mask=mask), model(changed, attention_mask=mask)
    assert torch.equal(before[12:], after[12:]) and not torch.equal(before[3:12], after[3:12])
    reference, _ = build(run_config(overrides | {"transformer.attention_backend": "unfused"}))
    torch.testing.assert_close(before, reference.eval()(tokens, attention_mask=mask), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["unfused", "sdpa"])
def test_left_padding_leaves_no_nan(backend: str) -> None:
    config = run_config(
        {"transformer.attention_backend": backend, "transformer.attention_dropout": 0.0, "transformer.hidden_dropout": 0.0}
    )
    model, _ = build(config)
    tokens, labels = tokens_of(config, 1)
    mask = torch.zeros(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool)
    mask[..., :5] = True
    model(tokens, attention_mask=mask, labels=labels)[:, 5:].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def tables(interleaved: bool, dim: int = 4) -> RotaryTables:
    config = run_config({"model.position_embedding_type": "rope", "model.rotary_interleaved": interleaved,
                         "transformer.head_dim": dim, "model.max_position_embeddings": 512})  # fmt: skip
    return RotaryTables(config.model, config.transformer, torch.device("cpu"))


@pytest.mark.parametrize(("interleaved", "expected"), [(False, [-1.984111, 1.959901, 2.462378, 4.019800]), (True, [-1.142640, 1.922076, 2.959851, 4.029800])])  # fmt: skip
def test_N11_pairing(interleaved: bool, expected: list[float]) -> None:
    rotary = tables(interleaved).at(torch.tensor([[1]]))
    out = apply_rotary(torch.tensor([1.0, 2, 3, 4]).view(1, 1, 1, 4), rotary.cos, rotary.sin, interleaved)
    torch.testing.assert_close(out.flatten(), torch.tensor(expected), atol=1e-5, rtol=0)


def test_N10_tables_stay_fp32_and_N13_dtype_in_is_dtype_out() -> None:
    config = run_config({"model.position_embedding_type": "rope", "model.max_position_embeddings": 512})
    model, _ = build(config)
    model.bfloat16()
    cos = model.rotary_tables.at(torch.tensor([[256, 257, 258]])).cos[:, 0, 0, 0]
    torch.testing.assert_close(cos, torch.tensor([-0.0398, 0.8193, 0.9251]), atol=1e-4, rtol=0)
    x = torch.randn(3, 1, 2, 8, dtype=torch.bfloat16)
    rotary = model.rotary_tables.at(torch.tensor([[256, 257, 258]]))
    cos, sin = rotary.cos, rotary.sin
    assert apply_rotary(x, cos, sin, False).dtype == torch.bfloat16


def test_partial_rotary_leaves_the_rest() -> None:
    config = run_config({"model.position_embedding_type": "rope", "model.rotary_percent": 0.5})
    table = RotaryTables(config.model, config.transformer, torch.device("cpu"))
    x = torch.randn(8, 2, 3, 8)
    cos, sin = table.at(torch.arange(8)[None]).cos, table.at(torch.arange(8)[None]).sin
    out = apply_rotary(x, cos, sin, False)
    assert torch.equal(out[..., 4:], x[..., 4:]) and not torch.equal(out[1:, ..., :4], x[1:, ..., :4])


@pytest.mark.parametrize("fused", [False, True])
def test_bf16_computes_in_bf16_over_fp32_parameters(fused: bool) -> None:
    config = run_config({"training.precision": "bf16"}, fused=fused)
    model, _ = build(config)
    tokens, labels = tokens_of(config, 2)
    assert model(tokens).dtype == torch.bfloat16
    keys = DropoutKeys(site_words(1, 1, model.num_dropout_sites), torch.arange(2))
    loss = model(tokens, labels=labels, dropout_keys=keys)
    loss.mean().backward()
    assert loss.dtype == torch.float32
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in model.parameters())
    exact, _ = build(run_config({}))
    full = exact(tokens, labels=labels, dropout_keys=keys)
    assert (loss - full).abs().max() < 0.05


@pytest.mark.parametrize("fused", [False, True])
def test_N26_evaluation_has_no_dropout_and_training_gets_it_back(fused: bool) -> None:
    config = run_config({"transformer.hidden_dropout": 0.5, "transformer.attention_dropout": 0.5}, fused=fused)
    model, _ = build(config)
    tokens, labels = tokens_of(config, 2)
    keys = DropoutKeys(site_words(1, 1, model.num_dropout_sites), torch.arange(2))
    training = model(tokens, labels=labels, dropout_keys=keys)
    model.eval()
    clean, again = model(tokens, labels=labels), model(tokens, labels=labels)
    no_dropout, _ = build(run_config({"transformer.hidden_dropout": 0.0, "transformer.attention_dropout": 0.0}, fused=fused))
    assert torch.equal(clean, again) and torch.equal(clean, no_dropout(tokens, labels=labels))
    model.train()
    assert torch.equal(model(tokens, labels=labels, dropout_keys=keys), training) and not torch.equal(training, clean)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("fused", [False, True])
def test_N30_only_matrices_decay(kind: str, fused: bool) -> None:
    config = run_config(
        {"transformer.normalization": kind, "optimizer.weight_decay": 0.5, "optimizer.learning_rate": 0.1}, fused=fused
    )
    model, _ = build(config)
    optimizer = optimizer_of(config, model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.1, torch.tensor(0.0), torch.tensor(0.0))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if parameter.dim() > 1 else 1.0))


def test_T12_initial_scale_is_the_configured_one() -> None:
    config = run_config({"transformer.hidden_size": 256, "transformer.init_method_std": 0.05})
    model, _ = build(config)
    layer = model.decoder.layers[0]
    assert layer.mlp.linear_fc1.weight.std().item() == pytest.approx(0.05, rel=0.02)
    assert layer.mlp.linear_fc2.weight.std().item() == pytest.approx(0.05 / math.sqrt(6), rel=0.02)
    assert abs(layer.mlp.linear_fc1.weight.mean().item()) < 1e-3
    assert (layer.mlp.linear_fc1.weight[0] != layer.mlp.linear_fc1.weight[1]).all()


def test_K03_graphs_do_not_grow_with_depth() -> None:
    from torch._dynamo.utils import counters

    graphs = []
    for layers in (2, 6):
        torch._dynamo.reset()
        counters.clear()
        config = run_config({"transformer.num_layers": layers}, fused=True)
        model, _ = build(config)
        tokens, labels = tokens_of(config, 2)
        keys = DropoutKeys(site_words(1, 1, model.num_dropout_sites), torch.arange(2))
        model(tokens, labels=labels, dropout_keys=keys).sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
        assert not counters["graph_break"]
    assert graphs[0] == graphs[1]


def test_missing_compiler_runs_the_references() -> None:
    config = run_config({f"transformer.{flag}": True for flag in FUSION_FLAGS})
    plan = fusion_plan(config, Machine("cpu", "no C++ compiler", "2.13"))
    asked = [d for d in plan.decisions if d.flag in FUSION_FLAGS and d.flag != "gradient_accumulation_fusion" and not d.note]
    assert len(asked) >= 6 and all(d.runs == "reference" and "no C++ compiler" in d.why for d in asked)
    assert build(config, plan)[0](tokens_of(config, 1)[0]).shape[0] == config.data.seq_length


def test_no_process_group_is_needed_at_size_1() -> None:
    assert not torch.distributed.is_initialized() and TensorParallel().group is None


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 4.0},
        {
            "type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128, "beta_fast": 16.0, "beta_slow": 2.0},
    ],
    ids=lambda s: s["type"],
)
def test_frequency_scaling_is_that_of_hugging_face(scaling: dict) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    options = {"rope_type" if k == "type" else k: v for k, v in scaling.items()} | {"rope_theta": 10000.0}
    theirs = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=256, rope_parameters=options)
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["type"]](theirs, torch.device("cpu"))
    ours = RopeScaling.model_validate(scaling)
    torch.testing.assert_close(rotary_frequencies(32, 10000.0, ours).float(), frequencies.float())
    assert magnitude(ours) == pytest.approx(factor)


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "quick_geglu", "squared_relu", "relu", "silu"])
def test_every_activation_builds_with_the_counted_parameters(activation: str) -> None:
    config = run_config({"transformer.activation": activation, "transformer.softmax_type": "learnable"})
    model, _ = build(config)
    assert sum(p.numel() for p in model.parameters()) == num_parameters(config)
    weight = model.decoder.layers[0].mlp.linear_fc1.weight
    assert weight.shape == ((256, 2, 64) if config.transformer.gated else (256, 64))
    tokens, labels = tokens_of(config, 2)
    model.eval()(tokens, labels=labels).mean().backward()
    assert all(
        torch.isfinite(p.grad).all() and p.grad.abs().max() > 0
        for n, p in model.named_parameters()
        if "linear_qkv.bias" not in n
    )


def test_N09_the_gate_of_a_gated_mlp_is_the_first_of_each_pair() -> None:
    config = run_config({"transformer.activation": "swiglu", "transformer.hidden_size": 64})
    mlp = build(config)[0].eval().decoder.layers[0].mlp
    x = torch.randn(3, 2, 64)
    gate, up = mlp.linear_fc1.weight.unbind(1)
    bias_gate, bias_up = mlp.linear_fc1.bias.view(-1, 2).unbind(1)
    inner = torch.nn.functional.silu(x @ gate.t() + bias_gate) * (x @ up.t() + bias_up)
    torch.testing.assert_close(mlp(x)[0], inner @ mlp.linear_fc2.weight.t(), rtol=1e-5, atol=1e-6)


def test_N28_no_attention_here_has_a_relative_bias() -> None:
    """Moving all positions of a rotary model changes nothing, and no parameter is a bias by distance."""
    config = run_config({"model.position_embedding_type": "rope"})
    model = build(config)[0].eval()
    assert not [name for name, _ in model.named_parameters() if "relative" in name]
    tokens, _ = tokens_of(config, 1)
    moved = torch.arange(config.data.seq_length)[None] + 20
    torch.testing.assert_close(model(tokens), model(tokens, position_ids=moved), rtol=1e-4, atol=1e-5)
