"""From bytes to batches: D01 to D20 as far as they concern GPT data."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.load import load_config
from configs.run import DataConfig
from tests.conftest import ROOT, write_tokens
from trainer.data.blend import Blend, blend_counts
from trainer.data.gpt_dataset import gpt_training_set, gpt_validation_set, make_gpt_batch
from trainer.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, smallest_dtype
from trainer.data.preprocess import encode_documents
from trainer.data.sample_index import build_sample_index, cached_sample_index
from trainer.data.sampler import training_batches, validation_batches
from trainer.data.sources import TrainingSet
from trainer.data.tokenizer import END_OF_DOCUMENT, train_tokenizer
from trainer.errors import DataError

# Two documents of uint16 tokens, [5, 6, 7] and [8, 9]: every byte from the format's description.
HAND_BIN = struct.pack("<5H", 5, 6, 7, 8, 9)
HAND_IDX = (
    b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", 8) + struct.pack("<Q", 2) + struct.pack("<Q", 3)
    + struct.pack("<2i", 3, 2) + struct.pack("<2q", 0, 6) + struct.pack("<3q", 0, 1, 2)
)  # fmt: skip


def test_a_pair_written_by_hand_reads_right_and_ours_has_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "hand.bin").write_bytes(HAND_BIN)
    (tmp_path / "hand.idx").write_bytes(HAND_IDX)
    dataset = IndexedDataset(tmp_path / "hand")
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[5, 6, 7], [8, 9]]
    assert dataset.get(0, 1, 2).tolist() == [6, 7] and dataset.document_indices.tolist() == [0, 1, 2]
    write_tokens(tmp_path / "ours", [[5, 6, 7], [8, 9]])
    assert (tmp_path / "ours.bin").read_bytes() == HAND_BIN and (tmp_path / "ours.idx").read_bytes() == HAND_IDX


def test_D01_counters_are_64_bit() -> None:
    index = build_sample_index(np.full(3, 2**30, np.int32), 2**20, 0)  # 3 * 2^30 tokens
    assert index.starts.dtype == np.int64 and len(index) == (3 * 2**30 - 1) // 2**20
    last = index.starts[-1]
    assert int(last[0]) * 2**30 + int(last[1]) == len(index) * 2**20


def test_D02_ids_never_wrap(tmp_path: Path) -> None:
    ids = [0, 65535, 65541]
    write_tokens(tmp_path / "wide", [ids], smallest_dtype(70000).type)
    assert IndexedDataset(tmp_path / "wide")[0].tolist() == ids
    with pytest.raises(DataError, match="65541 do not fit in uint16"):
        write_tokens(tmp_path / "narrow", [ids], np.uint16)
    assert not list(tmp_path.glob("narrow*"))
    assert smallest_dtype(65536) == np.uint16 and smallest_dtype(65537) == np.int32


@pytest.mark.parametrize("vocab", [100, 255, 256, 32768, 65535, 65536, 65537, 200000])
def test_D03_every_dtype_that_can_be_chosen_round_trips(tmp_path: Path, vocab: int) -> None:
    write_tokens(tmp_path / "x", [[0, vocab - 1], [1]], smallest_dtype(vocab).type)
    assert [d.tolist() for d in (IndexedDataset(tmp_path / "x")[0], IndexedDataset(tmp_path / "x")[1])] == [
        [0, vocab - 1],
        [1],
    ]


@pytest.mark.parametrize("texts", [["", "a b", "", "c"], ["a b", "c", ""]])
def test_D04_empty_documents_are_dropped_and_counted(tmp_path: Path, texts: list[str]) -> None:
    report = encode_documents(texts, train_tokenizer(["a b c"], 300), tmp_path / "x", append_eod=True)
    assert report.documents == 2 and report.empty_documents == texts.count("") and len(IndexedDataset(tmp_path / "x")) == 2


def test_D04_nothing_but_empty_documents_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no document has any text"):
        encode_documents(["", ""], train_tokenizer(["a"], 300), tmp_path / "x", append_eod=True)
    assert list(tmp_path.iterdir()) == []


def test_D06_sizes_count_the_end_of_document(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["ab"], 257)  # bytes and the end of document
    encode_documents(["abc", "de"], tokenizer, tmp_path / "x", append_eod=True)
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.sequence_lengths.tolist() == [4, 3]
    assert (tmp_path / "x.bin").stat().st_size == 7 * dataset.dtype.itemsize
    assert all(dataset[i][-1] == tokenizer.token_to_id(END_OF_DOCUMENT) for i in range(2))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: p.with_suffix(".idx").write_bytes(p.with_suffix(".idx").read_bytes()[:-8]), "truncated"),
        (lambda p: p.with_suffix(".idx").write_bytes(b"X" + p.with_suffix(".idx").read_bytes()[1:]), "not a Megatron index"),
        (lambda p: p.with_suffix(".idx").write_bytes(b"short"), "shorter than its header"),
        (
            lambda p: p.with_suffix(".bin").write_bytes(p.with_suffix(".bin").read_bytes()[:-2]),
            "8 bytes but .* describes 10",
        ),
        (lambda p: p.with_suffix(".bin").write_bytes(b"\0" * 14), "14 bytes but .* describes 10"),
        (lambda p: p.with_suffix(".bin").unlink(), "is missing"),
        (lambda p: p.with_suffix(".idx").unlink(), "is missing"),
    ],
)
def test_D07_D08_each_damage_has_its_own_message(tmp_path: Path, damage, words: str) -> None:
    write_tokens(tmp_path / "x", [[5, 6, 7], [8, 9]])
    damage(tmp_path / "x.bin")
    with pytest.raises(DataError, match=words):
        IndexedDataset(tmp_path / "x")


def test_D09_no_sample_is_seen_more_often_than_the_epochs() -> None:
    index = build_sample_index(np.full(10, 11), 10, 7)
    assert len(index) == 10
    seen = np.bincount([index.sample(n) for n in range(25)], minlength=10)
    assert set(seen.tolist()) <= {2, 3} and seen.sum() == 25
    assert np.bincount([index.sample(n) for n in range(30)]).tolist() == [3] * 10
    orders = [[index.sample(n) for n in range(e * 10, e * 10 + 10)] for e in range(3)]
    assert orders[0] != orders[1] != orders[2]


def test_samples_cover_the_shuffled_documents_end_to_end(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    documents, token = [], 0
    for length in [0, 3, 17, 1, 0, 40, 9]:
        documents.append(list(range(token, token + length)))
        token += length
    write_tokens(tmp_path / "x", documents)
    dataset = IndexedDataset(tmp_path / "x")
    index = build_sample_index(dataset.sequence_lengths, 8, int(rng.integers(100)))
    laid_out = [t for d in index.documents for t in documents[d]]
    from trainer.data.gpt_dataset import read_sample

    for sample in range(len(index)):
        tokens = read_sample(dataset, index, sample, 8, 100)
        assert tokens.tolist() == laid_out[sample * 8 : sample * 8 + 9]


def test_D10_a_source_of_almost_no_weight() -> None:
    assert blend_counts([1e-9, 1.0], 100).tolist() == [0, 100]
    assert all(Blend([1e-9, 1.0]).locate(n) == (1, n) for n in range(1000))


def test_D11_a_weight_is_a_share_of_the_samples() -> None:
    blend = Blend([3, 1])
    sources = [blend.locate(n) for n in range(400)]
    assert abs(sum(s == 0 for s, _ in sources) - 300) <= 1
    for source in (0, 1):  # each source's samples come in order, none left out
        assert [w for s, w in sources if s == source] == list(range(sum(s == source for s, _ in sources)))
    far = [blend.locate(n) for n in range(3 * blend.period, 3 * blend.period + 8)]
    assert far[0] == (0, 3 * int(blend.counts[0])) and {s for s, _ in far} == {0, 1}


def test_D12_the_cache_is_built_whole_or_not_at_all(tiny: Path) -> None:
    dataset = IndexedDataset(tiny / "data")
    first = cached_sample_index(dataset, 16, 1, tiny / "cache")
    files = list((tiny / "cache").iterdir())
    assert len(files) == 1 and files[0].suffix == ".npz"
    again = cached_sample_index(dataset, 16, 1, tiny / "cache")
    assert np.array_equal(first.starts, again.starts) and np.array_equal(first.documents, again.documents)
    cached_sample_index(dataset, 32, 1, tiny / "cache")
    cached_sample_index(dataset, 16, 2, tiny / "cache")
    assert len(list((tiny / "cache").iterdir())) == 3  # each setting that matters has a name of its own
    write_tokens(tiny / "data", [[1] * 100])
    changed = cached_sample_index(IndexedDataset(tiny / "data"), 16, 1, tiny / "cache")
    assert len(changed) == 6  # rewritten under the same name: not the stale index


def test_D15_the_writer_streams(tmp_path: Path) -> None:
    code = (
        "import resource, sys, numpy as np; sys.path.insert(0, '.')\n"
        "from trainer.data.indexed_dataset import IndexedDatasetBuilder\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"with IndexedDatasetBuilder({str(tmp_path / 'x')!r}, np.uint16) as b:\n"
        "    for _ in range(1000000): b.add_item([7]); b.end_document()\n"
        "    b.finalize()\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 300  # MiB


EOD = 99


def data_config(**changes: object) -> DataConfig:
    return DataConfig.model_validate({"train": ["x"], "seq_length": 8, "eod_token": EOD} | changes)


SAMPLE = np.array([5, 6, EOD, 7, 8, 9, EOD, 4, 3])


def test_D16_positions_and_mask_and_loss_reset_apart() -> None:
    plain = make_gpt_batch([SAMPLE], [0], data_config())
    assert plain.position_ids is None and plain.attention_mask is None and plain.loss_mask.tolist() == [[1.0] * 8]
    batch = make_gpt_batch([SAMPLE], [0], data_config(reset_position_ids=True))
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]] and batch.attention_mask is None
    batch = make_gpt_batch([SAMPLE], [0], data_config(eod_mask_loss=True))
    assert batch.loss_mask.tolist() == [[1, 1, 0, 1, 1, 1, 0, 1]] and batch.position_ids is None
    batch = make_gpt_batch([SAMPLE], [0], data_config(reset_attention_mask=True))
    visible = ~batch.attention_mask[0, 0] & torch.ones(8, 8).tril().bool()
    assert visible[3].nonzero().flatten().tolist() == [3]  # the first token of a document sees only itself
    assert visible[6].nonzero().flatten().tolist() == [3, 4, 5, 6] and batch.position_ids is None


def test_D18_the_loss_mask_is_by_position_not_by_value() -> None:
    batch = make_gpt_batch(
        [np.array([11, 12, 0, 13, 0, 0, 0, 0, 0]), np.zeros(9, np.int64)], [0, 1], data_config(eod_token=0), [True, False]
    )
    assert batch.loss_mask.tolist() == [[1.0] * 8, [0.0] * 8]


def test_labels_are_the_next_tokens() -> None:
    batch = make_gpt_batch([SAMPLE], [0], data_config())
    assert batch.tokens[0].tolist() == SAMPLE[:-1].tolist() and batch.labels[0].tolist() == SAMPLE[1:].tolist()


def test_D19_a_small_validation_set_is_used_whole(tiny: Path) -> None:
    write_tokens(tiny / "small", [list(range(97))])
    config = load_config(tiny / "tiny.yaml", [f"data.valid=[{tiny}/small]", "training.eval_iters=5"]).config
    valid = gpt_validation_set(config)
    assert len(valid) == 3
    batches = list(validation_batches(valid, config))
    assert sum(float(b.loss_mask.sum()) for b in batches) == 3 * 32
    assert [b.tokens[:, 0].tolist() for b in batches] == [[0, 32], [64, 64]] and batches[1].loss_mask[1].sum() == 0


def test_an_id_beyond_the_vocabulary_names_file_and_key(tiny: Path) -> None:
    write_tokens(tiny / "big", [[700] * 200])
    dataset = gpt_training_set(load_config(tiny / "tiny.yaml", [f"data.train=[{tiny}/big]"]).config, tiny / "cache")
    with pytest.raises(DataError, match=r"big.bin has token id 700 .*model.vocab_size is 301"):
        dataset[0]


def test_too_little_data_is_one_message(tiny: Path) -> None:
    write_tokens(tiny / "few", [[1, 2, 3]])
    with pytest.raises(DataError, match="few.bin: 3 tokens don't fill one sample of seq_length 32"):
        gpt_training_set(load_config(tiny / "tiny.yaml", [f"data.train=[{tiny}/few]"]).config, tiny / "cache")


def test_C01_the_batches_of_an_iteration_are_a_function_of_its_number(tiny: Path) -> None:
    config = load_config(tiny / "tiny.yaml").config

    def dataset() -> TrainingSet:
        return gpt_training_set(config, tiny / "cache")

    epoch = 1 + 2 * 1200 // 32 // 4  # beyond the first epoch
    for iteration in (1, 7, epoch):
        first, again = training_batches(dataset(), config, iteration), training_batches(dataset(), config, iteration)
        assert len(first) == 2
        for a, b in zip(first, again, strict=True):
            assert torch.equal(a.tokens, b.tokens) and torch.equal(a.samples, b.samples)
    whole = load_config(tiny / "tiny.yaml", ["training.micro_batch_size=4"]).config
    pieces = torch.cat([b.tokens for b in training_batches(dataset(), config, 3)])
    assert torch.equal(pieces, training_batches(dataset(), whole, 3)[0].tokens)


def test_preprocess_names_the_line_that_is_wrong(tmp_path: Path) -> None:
    train_tokenizer(["a b c"], 300).save(str(tmp_path / "t.json"))
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "a b"}) + "\n" + '{"txt": 1}\n')
    command = [sys.executable, "scripts/preprocess_data.py", "--input", str(tmp_path / "in.jsonl"), "--tokenizer",
               str(tmp_path / "t.json"), "--output-prefix", str(tmp_path / "out")]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "in.jsonl:2" in done.stderr and not list(tmp_path.glob("out*"))
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "a b"}) + "\n")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "1 documents" in done.stdout and len(IndexedDataset(tmp_path / "out")) == 1


def test_a_builder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), IndexedDatasetBuilder(tmp_path / "x", np.uint16) as builder:
        builder.add_item([1])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
