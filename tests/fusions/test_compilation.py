"""torch.compile and Triton as users meet them: recompiles, caches, other compilers around ours, devices, index arithmetic."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusions import (
    fused_bias_dropout,
    fused_bias_gelu,
    fused_bias_swiglu,
    fused_cross_entropy,
    fused_layer_norm,
    fused_rope,
    fused_softmax,
    jit,
)
from tests.conftest import ROOT, needs_triton
from tests.models.build import build, run_config, tokens_of

KERNEL_FILES = sorted((ROOT / "fusions/triton").glob("*.py"))


def angles(s: int, d: int) -> tuple[Tensor, Tensor]:
    a = torch.outer(torch.arange(s).float(), torch.arange(1, d // 2 + 1).float()).repeat(1, 2)[:, None, None]
    return a.cos(), a.sin()


def gelu(s: int) -> Tensor:
    return fused_bias_gelu.compiled(torch.randn(s, 2, 16, requires_grad=True), torch.randn(16, requires_grad=True), "gelu")


def bda(s: int) -> Tensor:
    x = torch.randn(s, 2, 16, requires_grad=True)
    return fused_bias_dropout.compiled(x, torch.randn(16, requires_grad=True), torch.randn(s, 2, 16), 0.1, True)


def softmax(s: int) -> Tensor:
    return fused_softmax.compiled(torch.randn(2, 2, s, s, requires_grad=True), causal=True, dropout_prob=0.1)


def loss(s: int) -> Tensor:
    return fused_cross_entropy.compiled(torch.randn(s, 2, 33, requires_grad=True), torch.randint(0, 33, (s, 2)), None)


def norm(s: int) -> Tensor:
    return fused_layer_norm.compiled_rms_norm(torch.randn(s, 2, 16, requires_grad=True), torch.ones(16), None, 1e-5)


def rope(s: int) -> Tensor:
    return fused_rope.compiled(torch.randn(s, 2, 3, 8, requires_grad=True), *angles(s, 8))


@pytest.mark.parametrize("call", [gelu, bda, softmax, loss, norm, rope], ids=lambda f: f.__name__)
def test_K04_twenty_lengths_cost_a_few_graphs_and_never_eager(call: Callable[[int], Tensor]) -> None:
    before = jit.graphs()
    for length in range(16, 336, 16):
        call(length).sum().backward()
    new = {name: n - before.get(name, 0) for name, n in jit.graphs().items() if n > before.get(name, 0)}
    assert new and all(number <= 3 for number in new.values()), new  # the first length, any length, and one of slack


def test_a_run_whose_length_changes_every_iteration(capsys: pytest.CaptureFixture) -> None:
    config = run_config({"model.max_position_embeddings": 64}, fused=True)
    model, counters = build(config)
    before = sum(jit.graphs().values())
    for length in (16, 32, 48, 64, 16, 48, 32, 64):
        tokens = torch.randint(0, 301, (2, length))
        model(tokens, labels=tokens).mean().backward()
    assert sum(jit.graphs().values()) - before <= 40
    assert sum(counts.reference for counts in counters.sites.values() if counts.fused) == 0


@pytest.mark.parametrize("call", [gelu, bda, softmax, norm, rope], ids=lambda f: f.__name__)
def test_K05_inside_another_compilation_the_numbers_are_the_same(call: Callable[[int], Tensor]) -> None:
    torch.manual_seed(3)
    expected = call(16)
    torch.manual_seed(3)
    compiled = torch.compile(call, backend="eager")(16)
    torch.testing.assert_close(compiled, expected)


def test_K05_compiled_and_eager_kernels_give_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config({}, fused=True)
    tokens, labels = tokens_of(config, 2)
    found: list[list[Tensor]] = []
    for enabled in (True, False):
        monkeypatch.setattr(jit, "_enabled", enabled)
        model, _ = build(config)
        torch.manual_seed(0)
        value = model(tokens, labels=labels).mean()
        value.backward()
        found.append([value.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


BF16: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "rope": (lambda x: fused_rope.reference(x, *angles(64, 16)), lambda x: fused_rope.compiled(x, *angles(64, 16))),
    "gelu": (lambda x: fused_bias_gelu.reference(x, None, "gelu"), lambda x: fused_bias_gelu.compiled(x, None, "gelu")),
    "norm": (
        lambda x: fused_layer_norm.reference_rms_norm(x, None, None, 1e-5),
        lambda x: fused_layer_norm.compiled_rms_norm(x, None, None, 1e-5),
    ),
    "softmax": (
        lambda x: fused_softmax.reference(x.transpose(0, 2)),
        lambda x: fused_softmax.compiled(x.transpose(0, 2).contiguous()),
    ),
}


@pytest.mark.parametrize("name", BF16)
def test_K06_bf16_is_at_least_as_close_to_the_truth_as_eager(name: str) -> None:
    plain, fused = BF16[name]
    x = torch.randn(64, 2, 3, 16).bfloat16()
    true = plain(x.double())
    error, allowed = ((f(x).double() - true).abs().max() for f in (fused, plain))
    assert error <= 1.1 * allowed + 1e-9


def test_K02_a_compile_cache_is_added_to_and_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "other-run").mkdir()
    (tmp_path / "other-run/kernel.so").write_text("in use")
    code = "import torch; from fusions import fused_bias_gelu as g; g.compiled(torch.randn(4, 8), None, 'gelu')"
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
    assert (tmp_path / "other-run/kernel.so").read_text() == "in use" and len(list(tmp_path.iterdir())) > 1


def test_K08_swiglu_is_one_kernel_per_pass() -> None:
    before = jit.graphs()
    x = torch.randn(8, 32, requires_grad=True)
    fused_bias_swiglu.compiled(x, torch.randn(32, requires_grad=True)).sum().backward()
    new = [name for name, n in jit.graphs().items() if n > before.get(name, 0)]
    assert sorted(new) == ["activation._backward_kernel", "activation._forward_kernel"]


def launches(path: Path) -> list[tuple[ast.Call, list[str]]]:
    """Every `kernel[grid](…)` of a file, with the context managers around it."""
    found: list[tuple[ast.Call, list[str]]] = []

    def visit(node: ast.AST, around: list[str]) -> None:
        if isinstance(node, ast.With):
            around = [*around, *(ast.unparse(item.context_expr) for item in node.items)]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and "kernel" in ast.unparse(node.func.value):
            found.append((node, around))
        for child in ast.iter_child_nodes(node):
            visit(child, around)

    visit(ast.parse(path.read_text()), [])
    return found


def test_N24_every_launch_is_on_the_tensors_device() -> None:
    total = 0
    for path in KERNEL_FILES:
        for _, around in launches(path):
            total += 1
            assert any(context.startswith("on_device_of(") for context in around), path
    assert total >= 14


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda p: p.stem)
def test_kernels_count_rows_in_64_bits(path: Path) -> None:
    """A tensor of more than 2^31 elements has rows whose offset is not an int32: every launched kernel widens its row first."""
    tree = ast.parse(path.read_text())
    names = {ast.unparse(call.func.value) for call, _ in launches(path)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in names and node.name != "_advance_kernel":
            assert "tl.int64" in ast.unparse(node), node.name


@needs_triton
def test_every_triton_kernel_compiles_for_a_gpu() -> None:
    """As far as Triton's IR, for sm_90, without a GPU: what the interpreter accepts is not always what the compiler does."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "tests/fusions/triton_frontend.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert {name: errors for name, (_, errors) in kernels.items() if errors} == {}
    assert {name.rpartition(".")[2] for name in kernels} >= {
        "_forward_kernel",
        "_backward_kernel",
        "_kernel",
        "_advance_kernel",
    }
    launched = {f"fusions.triton.{p.stem}.{ast.unparse(call.func.value)}" for p in KERNEL_FILES for call, _ in launches(p)}
    assert set(kernels) == launched
