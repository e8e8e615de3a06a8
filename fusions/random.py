"""Counter-based dropout masks: a mask is a function of where it is used, not of a generator's state.

    key of a row  = hash(seed, site, iteration, sample in the global batch, row inside the sample)   64 bits
    element       = mix(column, key of its row);  kept when it is at least prob * 2^32

So the same run has the same masks at every tensor-parallel size, micro-batch size and accumulation, fused or not, with
or without recompute, and after a resume. Columns are never sharded; rows (positions, heads) carry their global index.

The mixes are lowbias32 by Chris Wellons (github.com/skeeto/hash-prospector), whose multipliers are used here. An element
goes through two keyed multiplications: with a key only in front of one fixed mix, every stream would be a permutation of
one mask. All arithmetic is int32 with wrap-around, since torch's uint32 has no shift or compare on a CPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_GOLDEN, _MULTIPLIER_1, _MULTIPLIER_2 = 0x9E3779B1, 0x7FEB352D, 0x846CA68B
_CHUNK_ELEMENTS = 1 << 19  # two int32 buffers of this size stay in a CPU's last-level cache; 8 Mi elements do not


def _signed(word: int) -> int:
    """The int32 with the bits of a 32-bit word."""
    return word - (1 << 32) if word >= 1 << 31 else word


_A, _M1, _M2 = _signed(_GOLDEN), _signed(_MULTIPLIER_1), _signed(_MULTIPLIER_2)


@dataclass(frozen=True)
class MaskKey:
    """The 64-bit row keys of one mask: two int32 tensors of the shape of the dropped tensor without its last dimension."""

    first: Tensor
    second: Tensor


class DropoutKeys:
    """The row keys of one micro-batch, for every dropout site of a model.

    `words` is int32 [sites, 2] from `site_words`, `samples` int64 [b]: each sample's index in the global batch.
    """

    def __init__(self, words: Tensor, samples: Tensor):
        self.words, self.samples = words, samples

    def hidden(self, site: int, positions: Tensor) -> MaskKey:
        """Keys [s, b] for a tensor [s, b, h]; `positions` int64 [s]: each row's position in the whole sequence."""
        return self._rows(site, self.samples[None, :], positions[:, None])

    def attention(self, site: int, heads: Tensor, num_queries: int) -> MaskKey:
        """Keys [b, n, sq] for weights [b, n, sq, sk]; `heads` int64 [n]: each head's index among all heads."""
        queries = torch.arange(num_queries, device=heads.device)
        return self._rows(site, self.samples[:, None, None], heads[:, None] * num_queries + queries)

    def _rows(self, site: int, samples: Tensor, rows: Tensor) -> MaskKey:
        shape = torch.broadcast_shapes(samples.shape, rows.shape)
        first, second = self.words[site].unbind()
        for word in (samples & 0xFFFFFFFF, samples >> 32, rows):
            first, second = _absorb(first, second, _low_word(word))
        return MaskKey(first.expand(shape).contiguous(), second.expand(shape).contiguous())


def site_words(seed: int, iteration: int, num_sites: int) -> Tensor:
    """int32 [num_sites, 2]: the hash of (seed, site, iteration) for each site. On the CPU; move it once per iteration."""
    first = np.full(num_sites, 0x243F6A88, np.uint32)
    second = np.full(num_sites, 0x85A308D3, np.uint32)
    low = 0xFFFFFFFF
    for word in (seed & low, seed >> 32, iteration & low, iteration >> 32, np.arange(num_sites)):
        first, second = _absorb_numpy(first, second, np.asarray(word).astype(np.uint32))
    return torch.from_numpy(np.stack([first, second], 1).view(np.int32).copy())


def random_mask_key(x: Tensor) -> MaskKey:
    """Row keys for a tensor of x's shape, from torch's default generator (so torch.manual_seed makes them repeat)."""
    words = torch.randint(-(1 << 31), 1 << 31, (1, 2), dtype=torch.int64).to(torch.int32).to(x.device)
    shape = x.shape[:-1]
    rows = torch.arange(shape.numel(), device=x.device)
    key = DropoutKeys(words, torch.zeros(1, dtype=torch.int64, device=x.device))._rows(0, torch.zeros_like(rows), rows)
    return MaskKey(key.first.reshape(shape), key.second.reshape(shape))


def keep_mask(key: MaskKey, columns: int, prob: float) -> Tensor:
    """Boolean mask of key's shape + [columns]: False with probability `prob`. Eager, in place, a cache-sized chunk at a time.

    In a layer that is compiled as a whole it is one expression: a loop would be unrolled.
    """
    if torch.compiler.is_compiling():
        device = key.first.device
        return keep_mask_expression(column_counters(columns, device), key.first, key.second, drop_threshold(prob, device))
    first, second = key.first.reshape(-1, 1), key.second.reshape(-1, 1)
    rows, threshold = first.shape[0], drop_threshold_value(prob)
    counters = column_counters(columns, first.device)
    mask = torch.empty(rows, columns, dtype=torch.bool, device=first.device)
    chunk = max(1, min(rows, _CHUNK_ELEMENTS // max(1, columns))) if first.device.type == "cpu" else max(1, rows)
    v = torch.empty(chunk, columns, dtype=torch.int32, device=first.device)
    shifted = torch.empty_like(v)
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        v_, s_ = v[: part.stop - start], shifted[: part.stop - start]
        torch.bitwise_xor(counters, first[part], out=v_)
        torch.bitwise_right_shift(v_, 16, out=s_)
        v_.bitwise_xor_(s_.bitwise_and_(0xFFFF)).mul_(_M1).bitwise_xor_(second[part])
        torch.bitwise_right_shift(v_, 15, out=s_)
        v_.bitwise_xor_(s_.bitwise_and_(0x1FFFF)).mul_(_M2)
        torch.ge(v_, threshold, out=mask[part])
    return mask.view(*key.first.shape, columns)


def keep_mask_expression(counters: Tensor, first: Tensor, second: Tensor, threshold: Tensor) -> Tensor:
    """The bits of `keep_mask` as one pure expression, for use inside a compiled function.

    `counters` and `threshold` come from `column_counters` and `drop_threshold`, made outside. Inductor would turn arange *
    constant into an index expression of signed C++ integers, whose overflow lets the C++ compiler drop the loop's end (torch
    2.13: it writes past the output); and a second value of a Python float makes it symbolic, and the threshold wrong.
    """
    v = counters ^ first[..., None]
    v = (v ^ ((v >> 16) & 0xFFFF)) * _M1
    v = v ^ second[..., None]
    v = (v ^ ((v >> 15) & 0x1FFFF)) * _M2
    return v >= threshold


def drop_threshold(prob: float, device: torch.device) -> Tensor:
    """int32 scalar: elements below it are dropped."""
    return _traced_threshold(prob, device) if torch.compiler.is_compiling() else _kept_threshold(prob, device)


def column_counters(columns: int, device: torch.device) -> Tensor:
    """int32 [columns]: what each column contributes to the hash of its element."""
    return _traced_counters(columns, device) if torch.compiler.is_compiling() else _kept_counters(columns, device)


@functools.lru_cache(maxsize=32)
def _kept_threshold(prob: float, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # the cache outlives the mode of its first caller
        return torch.tensor(drop_threshold_value(prob), dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=32)
def _kept_counters(columns: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(columns, dtype=torch.int32, device=device) * _A


def forget_kept_tensors() -> None:
    """Make the small tensors that are kept between calls anew: those made under a fake-tensor mode are good for nothing else."""
    _kept_threshold.cache_clear()
    _kept_counters.cache_clear()


# In a layer that is compiled as a whole these two are operators that Inductor can't look into, for the reasons given above.
@torch.library.custom_op("fuseline::drop_threshold", mutates_args=())
def _traced_threshold(prob: float, device: torch.device) -> Tensor:
    return _kept_threshold(prob, device).clone()


@torch.library.custom_op("fuseline::column_counters", mutates_args=())
def _traced_counters(columns: int, device: torch.device) -> Tensor:
    return _kept_counters(columns, device).clone()


@_traced_threshold.register_fake
def _(prob: float, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int32, device=device)


@_traced_counters.register_fake
def _(columns: int, device: torch.device) -> Tensor:
    return torch.empty(columns, dtype=torch.int32, device=device)


def dropout(x: Tensor, prob: float, key: MaskKey) -> Tensor:
    """x / (1 - prob) where kept, 0 elsewhere. Saves the boolean mask for the backward: 1 byte per element."""
    return torch.where(keep_mask(key, x.shape[-1], prob), x, 0.0).mul_(keep_scale(prob))


def random_bits(key: MaskKey, columns: int, offset: int = 0) -> Tensor:
    """int32 [..., columns] of uniform bits for the columns [offset, offset + columns); used to initialise weights."""
    column = torch.arange(offset, offset + columns, device=key.first.device).to(torch.int32)
    v = _mix((column * _A) ^ key.first[..., None])
    return _mix(v ^ key.second[..., None])


def keep_scale(prob: float) -> float:
    """What a kept element is multiplied with; 0 at probability 1, where none is kept."""
    return 1.0 / (1.0 - prob) if prob < 1 else 0.0


def drop_threshold_value(prob: float) -> int:
    """The signed int32 at or above which an element is kept."""
    return min(round(prob * 2**32), 2**32 - 1) - 2**31


def _low_word(word: Tensor) -> Tensor:
    """The low 32 bits of an int64 tensor as int32."""
    word = word & 0xFFFFFFFF
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def _mix(v: Tensor) -> Tensor:
    v = (v ^ ((v >> 16) & 0xFFFF)) * _M1
    v = (v ^ ((v >> 15) & 0x1FFFF)) * _M2
    return v ^ ((v >> 16) & 0xFFFF)


def _absorb(first: Tensor, second: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
    """One keyed round: both halves of the state depend on the word and on the first half."""
    first = _mix(first ^ word)
    return first, _mix((second ^ (word * _A)) + first)


def _mix_numpy(v: np.ndarray) -> np.ndarray:
    v = (v ^ (v >> np.uint32(16))) * np.uint32(_MULTIPLIER_1)
    v = (v ^ (v >> np.uint32(15))) * np.uint32(_MULTIPLIER_2)
    return v ^ (v >> np.uint32(16))


def _absorb_numpy(first: np.ndarray, second: np.ndarray, word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    first = _mix_numpy(first ^ word)
    return first, _mix_numpy((second ^ (word * np.uint32(_GOLDEN))) + first)
