"""Apex and TransformerEngine, which are not here: every call of an adapter must bind to the real signature (signatures.json).

Stand-in modules take the calls, bind them, and compute the reference, so that the adapters' results are tested too; what the
real kernels compute is not.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusions import (
    fused_adam,
    fused_cross_entropy,
    fused_layer_norm,
    fused_linear_wgrad,
    fused_rope,
    fused_softmax,
    obstacles,
)
from fusions.catalogue import OPERATIONS
from fusions.machine import OPTIONAL_MODULES, Machine
from fusions.registry import Facts, Obstacle

SIGNATURES = json.loads(Path(__file__).with_name("signatures.json").read_text())


def signature(words: list[str]) -> inspect.Signature:
    """A Signature from ["input", "eps=1e-05", "*", ...]; notes after a name ("input_2d [n, h]") are not part of it."""
    parameters, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
    for word in words:
        if word == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        if word.startswith("**"):
            parameters.append(inspect.Parameter(word[2:], inspect.Parameter.VAR_KEYWORD))
            continue
        name, default = re.match(r"(\w+)(?:=(.*))?", word).groups()
        parameters.append(inspect.Parameter(name, kind, default=inspect.Parameter.empty if default is None else default))
    return inspect.Signature(parameters)


def bound(words: list[str], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called only with arguments that the real one accepts."""
    real = signature([w for w in words if w not in ("self", "ctx")])

    def call(*args: Any, **kwargs: Any) -> Any:
        real.bind(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def install(monkeypatch: pytest.MonkeyPatch, module: str, **members: Any) -> None:
    """Put a stand-in, and the packages above it, where the adapter imports from."""
    parts = module.split(".")
    for end in range(1, len(parts)):
        name = ".".join(parts[:end])
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    stand_in = types.ModuleType(module)
    vars(stand_in).update(members)
    monkeypatch.setitem(sys.modules, module, stand_in)


def extension(name: str, **functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    words = SIGNATURES["apex C++ extensions"][name]
    return {key: bound(words[key], function) for key, function in functions.items()}


def same(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def results(function: Callable[..., Tensor], *tensors: Tensor | None) -> list[Tensor]:
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    upstream = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    kept = upstream.clone()
    out.backward(upstream)
    assert torch.equal(kept, upstream), "the incoming gradient was written into"
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf is not None and leaf.grad is not None)]


@pytest.mark.parametrize("width", [1024, 40])
def test_apex_norms(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    words = SIGNATURES["apex.normalization.fused_layer_norm"]
    calls: list[str] = []

    def layer(name: str) -> Callable[..., Tensor]:
        def apply(x: Tensor, w: Tensor, b: Tensor, *rest: Any) -> Tensor:
            calls.append(name)
            return torch.nn.functional.layer_norm(x, x.shape[-1:], w, b, 1e-5)

        return apply

    def rms(x: Tensor, w: Tensor, shape: Any, eps: float, memory_efficient: bool) -> Tensor:
        return torch.nn.functional.rms_norm(x, tuple(shape), w, eps)

    install(
        monkeypatch,
        "apex.normalization.fused_layer_norm",
        FusedLayerNormAffineFunction=types.SimpleNamespace(
            apply=bound(words["FusedLayerNormAffineFunction"]["forward"], layer("affine"))
        ),
        FusedRMSNormAffineFunction=types.SimpleNamespace(apply=bound(words["FusedRMSNormAffineFunction"]["forward"], rms)),
    )
    fast = SIGNATURES["apex.contrib.layer_norm.layer_norm"]["FastLayerNormFN"]["forward"]
    install(
        monkeypatch,
        "apex.contrib.layer_norm.layer_norm",
        FastLayerNormFN=types.SimpleNamespace(apply=bound(fast, layer("fast"))),
    )
    monkeypatch.setattr("fusions.apex._missing", lambda name: False)
    x, w, b = torch.randn(3, width), torch.randn(width), torch.randn(width)
    for name, bias in (("layer_norm", b), ("rms_norm", None)):
        operations = fused_layer_norm.BACKENDS[name]
        same(
            results(lambda x, w, b, f=operations["apex"]: f(x, w, b, 1e-5), x, w, bias),
            results(lambda x, w, b, f=operations["reference"]: f(x, w, b, 1e-5), x, w, bias),
        )
    assert calls == ["fast" if width == 1024 else "affine"]


def _softmax_extension(name: str, masked: bool, causal: bool) -> dict[str, Callable[..., Any]]:
    def probs(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        hidden = torch.zeros_like(x, dtype=torch.bool) if mask is None else mask.bool().expand(x.shape)
        if causal:
            hidden = hidden | torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
        p = torch.softmax((x.float() * scale).masked_fill(hidden, -1e30), -1).masked_fill(hidden, 0.0)
        return p.to(x.dtype)

    def backward(grad: Tensor, p: Tensor, scale: float) -> Tensor:
        g = scale * p.float() * (grad.float() - (p.float() * grad.float()).sum(-1, keepdim=True))
        grad.copy_(g)  # as the real one does
        return grad

    forward = probs if masked else (lambda x, scale: probs(x, None, scale))
    return extension(name, forward=forward, backward=backward)


@pytest.mark.parametrize("case", ["causal", "plain", "window", "mask"])
def test_apex_softmax_by_each_of_its_kernels_and_N05(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    for name, masked, causal in (
        ("scaled_upper_triang_masked_softmax_cuda", False, True),
        ("scaled_softmax_cuda", False, False),
        ("scaled_masked_softmax_cuda", True, False),
        ("generic_scaled_masked_softmax_cuda", True, False),
    ):
        install(monkeypatch, name, **_softmax_extension(name, masked, causal))
    n = 20 if case != "mask" else 18
    scores = torch.randn(2, 4, n, n).bfloat16()
    mask = torch.rand(2, 1, n, n) < 0.3 if case == "mask" else None
    if mask is not None:
        mask[0, 0, 3] = True  # a row with every key masked
    options = {"causal": case in ("causal", "window"), "window": 5 if case == "window" else None, "scale": 2.0}
    operations = fused_softmax.BACKENDS["scale_mask_softmax"]
    same(
        results(lambda s: operations["apex"](s, mask, **options), scores),
        results(lambda s: operations["reference"](s, mask, **options), scores),
    )


def test_apex_rope_and_wgrad(monkeypatch: pytest.MonkeyPatch) -> None:
    def back(grad: Tensor, cos: Tensor, sin: Tensor, transpose: bool) -> Tensor:
        first, second = grad.chunk(2, -1)
        turned = torch.cat([second, -first], -1)
        return grad.copy_(grad * cos + turned * sin)

    name = "fused_rotary_positional_embedding"
    forward = lambda x, cos, sin, transpose: fused_rope.reference(x, cos, sin)  # noqa: E731
    install(monkeypatch, name, **extension(name, forward_cached=forward, backward_cached=back))
    angles = torch.randn(5, 1, 1, 4).repeat(1, 1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    x = torch.randn(5, 2, 3, 8)
    same(
        results(lambda x: fused_rope.BACKENDS["rope"]["apex"](x, cos, sin), x),
        results(lambda x: fused_rope.BACKENDS["rope"]["reference"](x, cos, sin), x),
    )

    def accumulate(x: Tensor, grad: Tensor, total: Tensor) -> None:
        total += grad.t() @ x

    name = "fused_weight_gradient_mlp_cuda"
    install(monkeypatch, name, **extension(name, wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate))
    weight = torch.randn(4, 8, requires_grad=True)
    weight.main_grad = torch.ones(4, 8)
    slot = fused_linear_wgrad._MainGrad(weight)
    y = fused_linear_wgrad.BACKENDS["linear_wgrad"]["apex"](x, weight, slot)
    y.sum().backward()
    torch.testing.assert_close(weight.main_grad, 1 + x.reshape(-1, 8).sum(0).expand(4, 8))


def _te(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every TransformerEngine module that an adapter imports."""
    rope = SIGNATURES["transformer_engine.pytorch.attention.rope"]

    def apply(t: Tensor, freqs: Tensor, tensor_format: str, interleaved: bool, fused: bool) -> Tensor:
        assert tensor_format == "sbhd" and fused
        return fused_rope.reference(t, freqs.cos(), freqs.sin(), interleaved)

    def packed(
        qkv: Tensor, q_freqs: Tensor, k_freqs: Tensor, split: list[int], tensor_format: str, interleaved: bool
    ) -> Any:
        return fused_rope.reference_qkv(qkv, None, split[1], q_freqs.cos(), q_freqs.sin(), interleaved)

    install(
        monkeypatch,
        "transformer_engine.pytorch.attention.rope",
        apply_rotary_pos_emb=bound(rope["apply_rotary_pos_emb"], apply),
        apply_fused_qkv_rotary_pos_emb=bound(rope["apply_fused_qkv_rotary_pos_emb"], packed),
    )

    def loss(inp: Tensor, target: Tensor, smoothing: float, reduce: bool, group: Any, ignore: int, graph: bool) -> Tensor:
        out = torch.nn.functional.cross_entropy(
            inp.flatten(0, -2).float(), target.flatten(), reduction="none", label_smoothing=smoothing, ignore_index=ignore
        )
        return out.view(target.shape)

    words = SIGNATURES["transformer_engine.pytorch.cross_entropy"]["parallel_cross_entropy"]
    install(monkeypatch, "transformer_engine.pytorch.cross_entropy", parallel_cross_entropy=bound(words, loss))
    norms = SIGNATURES["transformer_engine.pytorch.ops"]

    def norm(kind: str, plain: type) -> Callable[..., Any]:
        def make(width: int, *, eps: float, device: Any, dtype: Any) -> Any:
            return plain(width, eps=eps, device=device, dtype=dtype)

        return bound(norms[kind]["__init__"], make)

    install(
        monkeypatch,
        "transformer_engine.pytorch.ops",
        LayerNorm=norm("LayerNorm", torch.nn.LayerNorm),
        RMSNorm=norm("RMSNorm", torch.nn.RMSNorm),
    )


def test_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    _te(monkeypatch)
    x, w, b = torch.randn(3, 16), torch.randn(16), torch.randn(16)
    for name, bias in (("layer_norm", b), ("rms_norm", None)):
        operations = fused_layer_norm.BACKENDS[name]
        same(
            results(lambda x, w, b, f=operations["transformer_engine"]: f(x, w, b, 1e-5), x, w, bias),
            results(lambda x, w, b, f=operations["reference"]: f(x, w, b, 1e-5), x, w, bias),
        )
    angles = torch.rand(5, 1, 1, 4).repeat(1, 1, 1, 2) * 6 - 3
    q = torch.randn(5, 2, 3, 8)
    for name, call in (
        ("rope", lambda f: lambda x: f(x, angles.cos(), angles.sin(), False)),
        ("qkv_rope", lambda f: lambda x: torch.cat(f(x.flatten(2)[:, :, None], None, 8, angles.cos(), angles.sin()), 2)),
    ):
        operations = fused_rope.BACKENDS[name]
        same(results(call(operations["transformer_engine"]), q), results(call(operations["reference"]), q))
    logits, target = torch.randn(6, 2, 11), torch.randint(0, 11, (6, 2))
    operations = fused_cross_entropy.BACKENDS["cross_entropy"]
    same(
        results(lambda x: operations["transformer_engine"](x, target, None, vocab_size=11, label_smoothing=0.1), logits),
        results(lambda x: operations["reference"](x, target, None, vocab_size=11, label_smoothing=0.1), logits),
    )


class _FusedAdam(torch.optim.Optimizer):
    """Does with its state and a grad scaler what the real ones do."""

    def __init__(self, params: Any, **options: Any):
        self.options = options
        super().__init__(params, {"lr": options["lr"], "betas": options["betas"], "eps": options["eps"]})

    def step(self, grad_scaler: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            found = grad_scaler._check_inf_per_device(self)[group["params"][0].device]
            group["step"] += (found == 0).to(torch.int).reshape(1)
            if found:
                continue
            t = int(group["step"])
            for p in group["params"]:
                g, state = p.grad / grad_scaler._get_scale_async(), self.state[p]
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.lerp_(g, 1 - group["betas"][0])
                v.mul_(group["betas"][1]).addcmul_(g, g, value=1 - group["betas"][1])
                m_hat, v_hat = m / (1 - group["betas"][0] ** t), v / (1 - group["betas"][1] ** t)
                with torch.no_grad():
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * m_hat / (v_hat.sqrt() + group["eps"]))


@pytest.mark.parametrize(
    ("backend", "module"),
    [("apex", "apex.optimizers.fused_adam"), ("transformer_engine", "transformer_engine.pytorch.optimizers.fused_adam")],
)
def test_fused_adam_of_both(monkeypatch: pytest.MonkeyPatch, backend: str, module: str) -> None:
    words = SIGNATURES[module]["FusedAdam"]
    install(monkeypatch, module, FusedAdam=bound(words["__init__"], _FusedAdam))
    signature([w for w in words["step"] if w != "self"]).bind(grad_scaler=None)
    monkeypatch.setattr(fused_adam, "_OPTIMIZERS", {})
    ours, plain = ([torch.linspace(-1, 1, 7) for _ in range(4)] for _ in range(2))
    groups = [
        fused_adam.Group([t[0]], [t[1].clone()], [t[2] * 0], [t[3] * 0], [torch.zeros(())], 0.1) for t in (ours, plain)
    ]
    for skip in (0.0, 1.0, 0.0):
        for group, name in zip(groups, (backend, "reference"), strict=True):
            update = fused_adam.BACKENDS["adamw"][name]
            update(group, 1e-2, (0.9, 0.95), 1e-8, torch.tensor(2.0), torch.tensor(skip))
    torch.testing.assert_close(groups[0].parameters[0], groups[1].parameters[0])
    assert float(groups[0].steps[0]) == float(groups[1].steps[0]) == 2.0


def on_gpu(operation: str, backend: str, dtype: str, shape: tuple[int, ...], **options: Any) -> list[Obstacle]:
    """Obstacles on a machine with everything installed."""
    machine = Machine(
        "cuda",
        "",
        "2.13.0",
        tuple((m, "") for m in OPTIONAL_MODULES),
        (("transformer_engine", options.pop("te", "2.20.0")),),
    )
    found = OPERATIONS[operation].backend(backend)
    assert found is not None
    return found.all_obstacles(Facts(machine, dtype, 1, False, shape, tuple(options.items())))


def test_N02_a_kernels_limit_is_an_obstacle_that_names_shape_and_limit() -> None:
    causal = {"causal": True, "window": None, "sink": "vanilla"}
    assert on_gpu("scale_mask_softmax", "apex", "bf16", (2, 4, 2048, 2048), **causal) == []
    (obstacle,) = on_gpu("scale_mask_softmax", "apex", "bf16", (2, 4, 20480, 20480), **causal)
    assert obstacle.kind == "shape" and "20480" in str(obstacle) and "16384" in str(obstacle)
    (obstacle,) = on_gpu("scale_mask_softmax", "apex", "fp32", (2, 4, 64, 64), **causal)
    assert obstacle.kind == "dtype"
    (obstacle,) = on_gpu("scale_mask_softmax", "apex", "bf16", (2, 4, 64, 64), **(causal | {"sink": "learnable"}))
    assert "sink is learnable" in str(obstacle)
    assert on_gpu("scale_mask_softmax", "apex", "bf16", (2, 4, 9, 13), **(causal | {"causal": False, "window": 3})) == []
    (obstacle,) = on_gpu("scale_mask_softmax", "apex", "bf16", (1, 4, 64, 64), **causal)  # 8 rows a block up to 128 keys
    assert "batch x heads 4 by 8" in str(obstacle)
    (obstacle,) = on_gpu("scale_mask_softmax", "apex", "bf16", (2, 4, 20480, 20480), **(causal | {"mask": True}))
    assert "12288" in str(obstacle)


def test_every_precondition_is_an_obstacle() -> None:
    rope = {"interleaved": False, "positions_per_sample": False, "magnitude": 1.0, "qk_bias": False}
    assert on_gpu("rope", "apex", "bf16", (8, 2, 4, 64), **rope) == []
    assert "interleaved is True" in str(on_gpu("rope", "apex", "bf16", (8, 2, 4, 64), **(rope | {"interleaved": True}))[0])
    assert "older than 2.3" in str(on_gpu("rope", "transformer_engine", "bf16", (8, 2, 4, 64), te="2.2.1", **rope)[0])
    assert "magnitude" in str(
        on_gpu("rope", "transformer_engine", "bf16", (8, 2, 4, 64), **(rope | {"magnitude": "yarn's"}))[0]
    )
    loss = {"padding": 0, "z_loss": 0.0, "soft_cap": None}
    assert on_gpu("cross_entropy", "transformer_engine", "bf16", (8, 2, 64), **loss) == []
    assert "7 columns" in str(
        on_gpu("cross_entropy", "transformer_engine", "bf16", (8, 2, 64), **(loss | {"padding": 7}))[0]
    )
    assert "z_loss" in str(on_gpu("cross_entropy", "transformer_engine", "bf16", (8, 2, 64), **(loss | {"z_loss": 1e-4}))[0])
    assert on_gpu("layer_norm", "apex", "bf16", (8, 1000), affine=True) == []
    assert on_gpu("layer_norm", "transformer_engine", "bf16", (8, 64), affine=True, memory_efficient=True)
    assert on_gpu("linear_wgrad", "apex", "bf16", (8, 64)) == []


def test_the_unrelated_apex_of_pypi_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fusions.machine import import_problem

    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("")
    (tmp_path / "amp_C.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    import_problem.cache_clear()
    assert "unrelated package" in import_problem("apex")
    assert "undefined symbol: _ZN3c10" in import_problem("amp_C")
    assert import_problem("no_such_module") == "no_such_module not importable (No module named 'no_such_module')"
    import_problem.cache_clear()


def test_a_cpu_names_only_the_device() -> None:
    machine = Machine("cpu", "", "2.13.0")
    facts = Facts(machine, "fp32", 1, False, (8, 64), (("affine", True),))
    found = [obstacles.APEX[name](facts) for name in ("layer_norm", "rope", "linear_wgrad")]
    assert all(any(o.kind == "device" for o in each) for each in found)
    assert dataclasses.replace(machine, triton_interpreted=True).triton_interpreted
