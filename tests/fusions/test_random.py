"""Counter-based masks: fixed vectors, quality, independence of how a tensor is cut up."""

from __future__ import annotations

import torch

from fusions.random import (
    DropoutKeys,
    MaskKey,
    column_counters,
    drop_threshold,
    dropout,
    keep_mask,
    keep_mask_expression,
    random_mask_key,
    site_words,
)


def hidden(
    seed: int = 1, site: int = 0, iteration: int = 1, sample: int = 0, rows: int = 64, columns: int = 256, prob: float = 0.5
):
    keys = DropoutKeys(site_words(seed, iteration, site + 1), torch.tensor([sample]))
    return keep_mask(keys.hidden(site, torch.arange(rows)), columns, prob)[:, 0]  # [rows, columns]


def test_fixed_vectors_pin_the_function() -> None:
    assert site_words(1234, 7, 3).tolist() == FIXED_WORDS
    mask = hidden(seed=1234, site=2, iteration=7, sample=2**33 + 5, rows=2, columns=16)
    assert ["".join(str(int(v)) for v in row) for row in mask] == FIXED_MASK


FIXED_WORDS = [[-2011890307, 443901083], [892408961, -2113565634], [1315743832, 886517057]]
FIXED_MASK = ["0101011101001000", "0000101011101101"]


def test_keep_rate() -> None:
    for prob in (0.1, 0.5, 0.9):
        mask = hidden(rows=2048, columns=1024, prob=prob)
        assert abs(mask.double().mean().item() - (1 - prob)) < 4 * (prob * (1 - prob) / mask.numel()) ** 0.5
        rows = mask.double().mean(1)  # every row, not only the whole
        assert (rows - (1 - prob)).abs().max() < 6 * (prob * (1 - prob) / 1024) ** 0.5


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().flatten() - a.double().mean(), b.double().flatten() - b.double().mean()
    return float((a @ b) / (a.norm() * b.norm()))


def test_neighbours_sites_steps_samples_and_seeds_are_unrelated() -> None:
    mask = hidden(rows=512, columns=512)
    limit = 5 / mask.numel() ** 0.5
    for lag in (1, 2, 8, 64):
        assert abs(correlation(mask[:, lag:], mask[:, :-lag])) < limit
        assert abs(correlation(mask[lag:], mask[:-lag])) < limit
    for change in ({"site": 1}, {"iteration": 2}, {"sample": 1}, {"sample": 2**32}, {"seed": 2}, {"seed": 1 + 2**32}):
        assert abs(correlation(mask, hidden(rows=512, columns=512, **change))) < limit


def test_no_row_is_a_permutation_or_shift_of_another() -> None:
    mask = hidden(rows=200, columns=1024)
    counts = mask.sum(1)
    assert len(counts.unique()) > 30  # permutations of one row would all keep the same number
    signal = mask.double() - 0.5
    spectra = torch.fft.rfft(signal, dim=1)
    for other in range(1, 20):  # cross-correlation at every cyclic shift at once
        at_shifts = torch.fft.irfft(spectra[0] * spectra[other].conj(), n=1024) / 1024 / 0.25
        assert at_shifts.abs().max() < 6 / 1024**0.5


def test_the_same_element_has_the_same_fate_however_the_tensor_is_cut() -> None:
    words = site_words(3, 9, 4)
    whole = keep_mask(DropoutKeys(words, torch.arange(4)).hidden(2, torch.arange(32)), 48, 0.3)
    part = keep_mask(DropoutKeys(words, torch.tensor([2, 3])).hidden(2, torch.arange(8, 16)), 48, 0.3)
    assert torch.equal(whole[8:16, 2:], part)
    whole = keep_mask(DropoutKeys(words, torch.arange(4)).attention(1, torch.arange(6), 10), 10, 0.3)
    part = keep_mask(DropoutKeys(words, torch.tensor([1])).attention(1, torch.arange(3, 6), 10), 10, 0.3)
    assert torch.equal(whole[1:2, 3:], part)


def test_chunks_do_not_show() -> None:
    key = random_mask_key(torch.empty(5, 700, 1))
    mask = keep_mask(key, 900, 0.5)  # 3.15 M elements, several chunks
    assert torch.equal(mask[3, 500:], keep_mask(MaskKey(key.first[3, 500:], key.second[3, 500:]), 900, 0.5))


def test_compiled_and_eager_bits_are_equal_at_any_width() -> None:
    # A boolean output of a width that is no multiple of the vector is what once wrote past its end; use it as a factor.
    compiled = torch.compile(lambda c, a, b, t: torch.where(keep_mask_expression(c, a, b, t), 1.0, 0.0))
    for columns, prob in ((1, 0.3), (7, 0.3), (64, 0.1), (65, 0.5), (1000, 0.9)):
        key = random_mask_key(torch.empty(9, 3, 1))
        mask = keep_mask(key, columns, prob)
        bits = compiled(column_counters(columns, mask.device), key.first, key.second, drop_threshold(prob, mask.device))
        assert torch.equal(bits.bool(), mask)


def test_manual_seed_repeats_masks_for_callers_without_a_key() -> None:
    x = torch.ones(4, 8, 32)
    torch.manual_seed(5)
    first = dropout(x, 0.5, random_mask_key(x))
    second = dropout(x, 0.5, random_mask_key(x))
    torch.manual_seed(5)
    assert torch.equal(first, dropout(x, 0.5, random_mask_key(x))) and not torch.equal(first, second)


def test_T14_masks_are_equal_in_a_tensor_parallel_group_and_differ_between_data_parallel_ranks() -> None:
    """dp 2 x tp 2, by what each rank holds: the samples of its data-parallel rank; replicated rows, or its own heads."""
    words, positions = site_words(7, 3, 2), torch.arange(5)
    ranks = {(dp, tp): DropoutKeys(words, torch.arange(2 * dp, 2 * dp + 2)) for dp in (0, 1) for tp in (0, 1)}
    hidden = {rank: keep_mask(keys.hidden(1, positions), 64, 0.3) for rank, keys in ranks.items()}
    assert torch.equal(hidden[0, 0], hidden[0, 1]) and torch.equal(hidden[1, 0], hidden[1, 1])
    assert not torch.equal(hidden[0, 0], hidden[1, 0])
    heads = {(dp, tp): keys.attention(1, torch.arange(2 * tp, 2 * tp + 2), 5) for (dp, tp), keys in ranks.items()}
    masks = [keep_mask(key, 64, 0.3) for key in heads.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
