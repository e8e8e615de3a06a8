"""When each backend can run: every precondition stated once, for each operation. Imports no torch.

A function `(facts) -> list[Obstacle]` per backend and operation; catalogue.py puts them together. An empty list: it can run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fusions.registry import Facts, Obstacle

Check = Callable[[Facts], list[Obstacle]]

# The widths Apex's FastLayerNorm is compiled for (apex/contrib/csrc/layer_norm).
APEX_FAST_NORM_SIZES = frozenset({
    768, 1024, 1536, 2048, 2304, 3072, 3840, 4096, 5120, 6144, 8192, 10240, 12288, 12800, 14336, 15360, 16384, 18432, 20480,
    24576, 25600, 30720, 32768, 40960, 49152, 65536,
})  # fmt: skip


def no_elements(shape: tuple[int, ...]) -> list[Obstacle]:
    """An empty tensor has nothing to compile or launch for."""
    return [Obstacle("shape", f"{list(shape)} has no elements")] if math.prod(shape) == 0 else []


def compiler(facts: Facts) -> list[Obstacle]:
    """torch.compile needs a C++ compiler on a CPU; on a GPU Triton, and a C compiler for its launchers."""
    problem = facts.machine.compile_problem
    found = [Obstacle("compiler", problem)] if problem else []
    return found + (_package(facts, "triton") if facts.machine.device == "cuda" else [])


def triton(facts: Facts) -> list[Obstacle]:
    """Triton needs an NVIDIA GPU, or its interpreter."""
    problem = facts.machine.compile_problem if facts.machine.device == "cuda" else ""
    found = [Obstacle("compiler", problem)] if problem else []
    return ([] if facts.machine.triton_interpreted else _cuda(facts)) + found + _package(facts, "triton")


def _package(facts: Facts, name: str) -> list[Obstacle]:
    problem = facts.machine.import_problem(name)
    return [Obstacle("package", problem)] if problem else []


def _cuda(facts: Facts) -> list[Obstacle]:
    return [] if facts.machine.device == "cuda" else [Obstacle("device", f"{facts.machine.device}, needs cuda")]


def _all(*checks: Check) -> Check:
    return lambda facts: [obstacle for check in checks for obstacle in check(facts)]


def _extension(name: str) -> Check:
    return lambda facts: _package(facts, name)


def _half(facts: Facts) -> list[Obstacle]:
    return [] if facts.dtype in ("bf16", "fp16") else [Obstacle("dtype", f"{facts.dtype}; the kernel takes fp16 and bf16")]


def _own_gradient(facts: Facts) -> list[Obstacle]:
    """Under data parallel a layer computes with fully_shard's copy of its weight, whose gradient has the copy's dtype."""
    if facts.dtype == "fp32" or facts.option("data_parallel") in (None, 1):
        return []
    return [
        Obstacle(
            "dtype", f"{facts.dtype} with data parallel: a {facts.dtype} copy of the weight can't have an fp32 gradient"
        )
    ]


def _option(name: str, *allowed: object) -> Check:
    """The option must have one of these values."""

    def check(facts: Facts) -> list[Obstacle]:
        value = facts.option(name)
        words = " or ".join(map(str, allowed))
        return [] if value in allowed else [Obstacle("option", f"{name} is {value}; the kernel has only {words}")]

    return check


# A row of the generic masked kernel is kept in shared memory, 4 bytes a key, of which 48 KiB are to be had without asking.
APEX_GENERIC_KEYS = 12288


def apex_rows_per_block(keys: int) -> int:
    """Rows that a block of Apex's softmax kernels takes, which must divide them: 8 of up to 128 keys, 4 of more."""
    return 8 if keys <= 128 else 4


def apex_softmax_shape(shape: tuple[int, ...], causal: bool = True, masked: bool = False) -> list[Obstacle]:
    """Apex's kernels by shape [b, np, sq, sk]: causal squares to 16384; with a mask any length by the generic kernel."""
    *lead, sq, sk = shape
    rows, found = apex_rows_per_block(sk), []
    if causal and not masked:
        if sq != sk:
            found.append(Obstacle("shape", f"causal with sq {sq} != sk {sk}"))
        if not 16 < sk <= 16384:
            found.append(Obstacle("shape", f"key length {sk} is not in 17..16384"))
        if sk % 4 or math.prod(lead) % rows:
            words = f"key length {sk} must be divisible by 4 and batch x heads {math.prod(lead)} by {rows}"
            found.append(Obstacle("shape", words))
    elif not masked:
        if not 16 < sk <= 4096:
            found.append(Obstacle("shape", f"key length {sk} is not in 17..4096"))
        if sq % rows or sk % 4 or math.prod(lead) % 4:
            words = f"sq {sq} must be divisible by {rows}, sk {sk} and batch x heads {math.prod(lead)} by 4"
            found.append(Obstacle("shape", words))
    elif sk > APEX_GENERIC_KEYS:
        found.append(Obstacle("shape", f"key length {sk} > {APEX_GENERIC_KEYS} with a mask"))
    return found


def _apex_softmax(facts: Facts) -> list[Obstacle]:
    causal = bool(facts.option("causal"))
    masked = facts.option("window") is not None or bool(facts.option("mask"))
    kernel = "scaled_masked_softmax_cuda" if masked else (
        "scaled_upper_triang_masked_softmax_cuda" if causal else "scaled_softmax_cuda")  # fmt: skip
    found = _package(facts, kernel) + (_package(facts, "generic_scaled_masked_softmax_cuda") if masked else [])
    return found + apex_softmax_shape(facts.shape, causal, masked)


def _apex_affine(facts: Facts) -> list[Obstacle]:
    """FusedLayerNorm's extension; FastLayerNorm's is used where it has the width."""
    return _package(facts, "apex") + _package(facts, "fused_layer_norm_cuda")


def _te_version(minimum: tuple[int, ...]) -> Check:
    def check(facts: Facts) -> list[Obstacle]:
        version = facts.machine.version("transformer_engine")
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if numbers and numbers < minimum:
            return [Obstacle("package", f"transformer_engine {version} is older than {'.'.join(map(str, minimum))}")]
        return []

    return check


def _te_cross_entropy(facts: Facts) -> list[Obstacle]:
    found = []
    if facts.option("padding"):
        found.append(
            Obstacle("option", f"{facts.option('padding')} columns of vocabulary padding, which the kernel would count")
        )
    return found


_TE = _all(_cuda, _extension("transformer_engine"))
_APEX = _all(_cuda, _extension("apex"))

APEX: dict[str, Check] = {
    "layer_norm": _all(_cuda, _apex_affine, _option("affine", True)),
    "rms_norm": _all(_cuda, _apex_affine, _option("affine", True)),
    "scale_mask_softmax": _all(_cuda, _half, _apex_softmax, _option("sink", "vanilla")),
    "rope": _all(
        _cuda,
        _extension("fused_rotary_positional_embedding"),
        _option("interleaved", False),
        _option("positions_per_sample", False),
    ),
    "linear_wgrad": _all(_cuda, _extension("fused_weight_gradient_mlp_cuda"), _own_gradient),
    "adamw": _all(_APEX, _extension("amp_C")),
}
TRANSFORMER_ENGINE: dict[str, Check] = {
    "layer_norm": _all(_TE, _option("affine", True), _option("memory_efficient", False)),
    "rms_norm": _all(_TE, _option("affine", True), _option("memory_efficient", False)),
    "rope": _all(_TE, _te_version((2, 3)), _option("positions_per_sample", False), _option("magnitude", 1.0)),
    "qkv_rope": _all(
        _TE,
        _te_version((2, 8)),
        _option("positions_per_sample", False),
        _option("magnitude", 1.0),
        _option("qk_bias", False),
    ),
    "cross_entropy": _all(_TE, _te_version((2, 1)), _te_cross_entropy, _option("z_loss", 0.0), _option("soft_cap", None)),
    "linear_wgrad": _all(_TE, _te_version((2, 20)), _own_gradient),  # older ones want a workspace from the caller
    "adamw": _TE,
}


def addmm(facts: Facts) -> list[Obstacle]:
    """cuBLAS adds a half-precision product to fp32; on a CPU only fp32 does (oneDNN has no mixed addmm)."""
    if facts.machine.device == "cpu" and facts.dtype != "fp32":
        return [Obstacle("dtype", f"{facts.dtype} on a cpu: addmm can't add a {facts.dtype} product to an fp32 gradient")]
    return _own_gradient(facts)


def torch_fused(facts: Facts) -> list[Obstacle]:
    """torch.optim.AdamW(fused=True) has every device and dtype that parameters at rest have."""
    return []
