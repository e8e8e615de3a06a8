"""Samples of BERT and T5: D05, masking, spans, tokenizers, sentences."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.families import t5_lengths, t5_spans
from configs.load import load_config
from configs.run import RunConfig
from tests.conftest import ROOT
from trainer.data.bert_dataset import IGNORED, BertReader, mask_tokens, truncate_pair
from trainer.data.families import training_set, validation_set
from trainer.data.indexed_dataset import IndexedDataset
from trainer.data.preprocess import encode_documents, encode_in_processes, split_sentences
from trainer.data.sample_index import pair_ranges, span_ranges
from trainer.data.sampler import training_batches, validation_batches
from trainer.data.t5_dataset import T5Reader, corrupt, random_lengths
from trainer.data.tokenizer import load_tokenizer, load_vocabulary, train_tokenizer, vocabulary_of
from trainer.errors import DataError

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "unbelievable",
    "extraordinary",
]


def texts(count: int, seed: int = 0, sentences: int = 12) -> list[str]:
    random = np.random.default_rng(seed)
    return [
        " ".join(" ".join(random.choice(WORDS, random.integers(3, 9))).capitalize() + "." for _ in range(sentences))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bert.json and t5.json, and data written with each."""
    folder = tmp_path_factory.mktemp("families")
    for family, size in (("bert", 120), ("t5", 300)):
        tokenizer = train_tokenizer(texts(60), size, family)
        tokenizer.save(str(folder / f"{family}.json"))
        encode_documents(texts(30), tokenizer, folder / family, append_eod=True, sentences=family == "bert")
    return folder


def config(corpus: Path, tiny: Path, family: str, *overrides: str) -> RunConfig:
    given = [f"model.family={family}", f"data.tokenizer={corpus}/{family}.json", f"data.train=[{corpus}/{family}]",
             f"data.valid=[{corpus}/{family}]", "data.seq_length=48", *overrides]  # fmt: skip
    if family == "t5":
        given += ["model.position_embedding_type=relative", "data.decoder_seq_length=20"]
    return load_config(tiny / "tiny.yaml", given).config


PAIRS = ("model.sentence_head=next_sentence",)


def test_masking_rates_the_80_10_10_split_and_what_is_never_masked(corpus: Path, tiny: Path) -> None:
    built = config(corpus, tiny, "bert")
    data, vocabulary = training_set(built, tiny / "cache"), load_vocabulary(built)
    mask, originals = vocabulary.special("mask"), IndexedDataset(corpus / "bert")
    candidates = masked = became_mask = stayed = 0
    for number in range(1500):
        sample = data[number]
        places = np.flatnonzero(sample.labels != IGNORED)
        text = np.where(sample.labels == IGNORED, sample.tokens, sample.labels)[: sample.length]
        assert not vocabulary.is_special[sample.labels[places]].any() and places.max() < sample.length
        assert text[0] == vocabulary.special("cls") and text[-1] == vocabulary.special("sep")
        assert (sample.tokens[sample.length :] == vocabulary.special("pad")).all()
        assert np.array_equal(sample.tokens[sample.labels == IGNORED][: sample.length - len(places)],
                              text[~np.isin(np.arange(sample.length), places)])  # fmt: skip
        assert len(places) == max(1, round(0.15 * (sample.length - 2)))
        candidates, masked = candidates + sample.length - 2, masked + len(places)
        now, was = sample.tokens[places], sample.labels[places]
        became_mask += int((now == mask).sum())
        stayed += int((now == was).sum())
        assert not vocabulary.is_special[now[now != mask]].any()
    assert masked / candidates == pytest.approx(0.15, abs=0.01) and len(originals) > 0
    share = 4 * (0.25 / masked) ** 0.5  # four standard deviations, at most
    assert became_mask / masked == pytest.approx(0.8, abs=share)
    assert stayed / masked == pytest.approx(0.1 + 0.1 / len(vocabulary.ordinary), abs=share)


@pytest.mark.parametrize("ngram", [1, 3])
def test_whole_words_are_masked_whole(corpus: Path, tiny: Path, ngram: int) -> None:
    built = config(corpus, tiny, "bert", "data.whole_word_masking=true", f"data.max_ngram={ngram}")
    data, vocabulary = training_set(built, tiny / "cache"), load_vocabulary(built)
    pieces, runs = 0, []
    for number in range(300):
        sample = data[number]
        text = np.where(sample.labels == IGNORED, sample.tokens, sample.labels)[: sample.length]
        hidden = (sample.labels != IGNORED)[: sample.length]
        continues = vocabulary.continues_word[text] & ~vocabulary.is_special[text]
        words = np.cumsum(~continues)
        whole = [hidden[words == w] for w in np.unique(words)]
        partly = sum(w.any() and not w.all() for w in whole)
        assert partly <= (
            hidden.sum() <= max(1, round(0.15 * (sample.length - 2))) and partly == 1
        )  # a word over the budget
        pieces += int(continues[hidden].sum())
        runs.append(max(map(len, "".join("x" if w.all() else " " for w in whole).split()), default=0))
    assert pieces > 0 and np.mean(runs) > (1.3 if ngram == 3 else 1.0)


@pytest.mark.parametrize("algorithm", ["bpe", "wordpiece", "unigram"])
def test_the_pieces_of_a_word_are_known_in_every_algorithm_and_special_is_what_the_tokenizer_says(algorithm: str) -> None:
    """Also where a byte-level vocabulary has a token "##", as that of source code does."""
    tokenizer = train_tokenizer([*texts(30), "## ## ## ##"], 400, "bert", algorithm)
    tokenizer.add_special_tokens(["[URL]"])
    vocabulary = vocabulary_of(tokenizer, "bert", "x")
    ids = tokenizer.encode(" alphabeta gammalpha", add_special_tokens=False).ids
    assert len(ids) > 2 and sum(~vocabulary.continues_word[ids]) == 2
    assert vocabulary.is_special[tokenizer.token_to_id("[URL]")] and not vocabulary.is_special[ids].any()


def test_a_word_longer_than_the_budget_still_gives_a_loss(corpus: Path, tiny: Path) -> None:
    built = config(corpus, tiny, "bert", "data.whole_word_masking=true")
    vocabulary = load_vocabulary(built)
    word = np.flatnonzero(vocabulary.continues_word & ~vocabulary.is_special)[:6]
    tokens = np.concatenate([[vocabulary.special("cls")], word, [vocabulary.special("sep")]])
    _, labels = mask_tokens(tokens, vocabulary, 4, built.data, np.random.default_rng(0))
    assert (labels != IGNORED).sum() == 1
    empty, labels = mask_tokens(tokens[[0, -1]], vocabulary, 4, built.data, np.random.default_rng(0))
    assert np.array_equal(empty, tokens[[0, -1]]) and (labels == IGNORED).all()


@pytest.mark.parametrize("head", ["next_sentence", "sentence_order"])
def test_pairs_follow_each_other_or_not_half_the_time(corpus: Path, tiny: Path, head: str) -> None:
    built = config(corpus, tiny, "bert", f"model.sentence_head={head}", "data.short_sequence_fraction=0.0")
    data, vocabulary = training_set(built, tiny / "cache"), load_vocabulary(built)
    sep, source = vocabulary.special("sep"), IndexedDataset(corpus / "bert")
    documents = [
        source.sentences(int(a), int(b)).tolist()
        for a, b in zip(source.document_indices, source.document_indices[1:], strict=False)
    ]
    labels, right = [], 0
    for number in range(200):
        sample = data[number]
        text = np.where(sample.labels == IGNORED, sample.tokens, sample.labels)[: sample.length]
        cuts = np.flatnonzero(text == sep)
        first, second = text[1 : cuts[0]].tolist(), text[cuts[0] + 1 : cuts[1]].tolist()
        assert len(cuts) == 2 and first and second and cuts[1] == sample.length - 1
        assert sample.token_types[: sample.length].tolist() == [0] * (cuts[0] + 1) + [1] * (len(second) + 1)
        labels.append(sample.sentence)
        same = [d for d in documents if contains(d, first) and contains(d, second)]
        right += bool(same) == (sample.sentence == 0 or head == "sentence_order")
    assert 0.35 < np.mean(labels) < 0.65 and right >= 190  # a few words may stand in two documents


def contains(text: list[int], part: list[int]) -> bool:
    return any(text[i : i + len(part)] == part for i in range(len(text) - len(part) + 1))


def test_short_samples_and_truncation() -> None:
    random = np.random.default_rng(0)
    first, second = truncate_pair(np.arange(30), np.arange(100, 104), 12, random)
    assert len(first) == 8 and second.tolist() == [100, 101, 102, 103] and np.all(np.diff(first) == 1)
    assert [len(x) for x in truncate_pair(np.arange(5), np.arange(5), 2, random)] == [1, 1]


def test_short_sequence_fraction(corpus: Path, tiny: Path) -> None:
    shorter = []
    for fraction in ("0.0", "0.9"):
        data = training_set(config(corpus, tiny, "bert", f"data.short_sequence_fraction={fraction}"), tiny / "cache")
        shorter.append(np.mean([data[n].length for n in range(100)]))
    assert shorter[1] < 0.75 * shorter[0]


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_sample_is_a_function_of_seed_and_number(corpus: Path, tiny: Path, family: str) -> None:
    built = config(corpus, tiny, family, *(PAIRS if family == "bert" else ()))
    first, again = (training_batches(training_set(built, tiny / "cache"), built, 5) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True) if x is not None)
    data, other = (
        training_set(built, tiny / "cache"),
        training_set(config(corpus, tiny, family, "training.seed=7"), tiny / "cache"),
    )
    assert not np.array_equal(data[3].tokens, other[3].tokens)
    length = len(data._indices[0])
    numbers = {data._indices[0].sample(n): n for n in range(length)}
    sample = data._indices[0].sample(length)  # the next epoch sees the same text, corrupted anew
    assert not np.array_equal(data[length].labels, data[numbers[sample]].labels)
    micro = [b.tokens for b in first]
    whole = training_batches(
        data, config(corpus, tiny, family, "training.micro_batch_size=4", *(PAIRS if family == "bert" else ())), 5
    )
    assert torch.equal(torch.cat(micro), whole[0].tokens)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_validation_is_the_same_every_time_and_padding_of_a_batch_counts_nothing(
    corpus: Path, tiny: Path, family: str
) -> None:
    built = config(corpus, tiny, family, "training.micro_batch_size=4", *(PAIRS if family == "bert" else ()))
    valid = validation_set(built)
    batches = [list(validation_batches(validation_set(built), built)) for _ in range(2)]
    assert all(torch.equal(a.tokens, b.tokens) and torch.equal(a.labels, b.labels) for a, b in zip(*batches, strict=True))
    total = min(len(valid), 8)
    assert sum(b.counts()[next(iter(b.counts()))] for b in batches[0]) == sum(
        (valid[n].labels != IGNORED).sum() for n in range(total)
    )


@pytest.mark.parametrize(("length", "masked", "span"), [(512, 0.15, 3.0), (48, 0.15, 3.0), (128, 0.5, 8.0), (9, 0.3, 1.0)])
def test_T5_lengths_are_those_of_the_paper_and_fill_the_encoder(length: int, masked: float, span: float) -> None:
    raw, targets = t5_lengths(length, masked, span)
    hidden, spans = t5_spans(raw, masked, span)
    assert raw - hidden + spans + 1 <= length and targets == hidden + spans + 1
    more, others = t5_spans(raw + 1, masked, span)
    assert raw + 1 - more + others + 1 > length
    if (length, masked, span) == (512, 0.15, 3.0):
        assert (raw, targets) == (568, 114)  # as in the T5 repository's own table


def test_T5_spans_and_targets_give_the_text_back(corpus: Path, tiny: Path) -> None:
    built = config(corpus, tiny, "t5")
    data, vocabulary = training_set(built, tiny / "cache"), load_vocabulary(built)
    reader = T5Reader(built, 1234)
    sentinels, end, pad = reader.sentinels.tolist(), vocabulary.special("end"), vocabulary.special("pad")
    source, index = data._datasets[0], data._indices[0]
    from trainer.data.gpt_dataset import read_sample

    lengths = []
    for number in range(200):
        sample = data[number]
        text = read_sample(source, index, index.sample(number), reader.raw, 301)[:-1].tolist()
        targets = sample.labels[sample.labels != IGNORED].tolist()
        encoder = sample.tokens[: sample.length].tolist()
        assert encoder[-1] == end and targets[-1] == end and (sample.tokens[sample.length :] == pad).all()
        assert sample.decoder_tokens[0] == pad and sample.decoder_tokens[1 : len(targets)].tolist() == targets[:-1]
        spans: dict[int, list[int]] = {}
        for token in targets[:-1]:
            if token in sentinels:
                current = spans.setdefault(token, [])
            else:
                current.append(token)
        assert list(spans) == sentinels == [t for t in encoder if t in sentinels]
        rebuilt = [t for token in encoder[:-1] for t in spans.get(token, [token])]
        assert rebuilt == text
        lengths += [len(s) for s in spans.values()]
    assert min(lengths) >= 1 and sum(lengths) / len(text) / 200 == pytest.approx(0.15, abs=0.02)
    assert np.mean(lengths) == pytest.approx(3, abs=0.6)


def test_random_lengths_divide_evenly() -> None:
    random = np.random.default_rng(0)
    found = np.array([random_lengths(6, 3, random) for _ in range(4000)])
    assert (found.sum(1) == 6).all() and found.min() == 1
    divisions, counts = np.unique(found, axis=0, return_counts=True)
    assert len(divisions) == 10 and counts.min() > 300  # each of the ten equally often
    assert random_lengths(4, 1, random).tolist() == [4]
    encoder, targets = corrupt(np.arange(10), np.array([2, 3]), np.array([1, 4]), np.array([98, 97]), 99)
    assert encoder.tolist() == [0, 1, 98, 3, 4, 5, 97, 99] and targets.tolist() == [98, 2, 97, 6, 7, 8, 9, 99]


def test_D05_one_sentence_documents(tmp_path: Path, corpus: Path, tiny: Path) -> None:
    tokenizer = load_tokenizer(corpus / "bert.json")
    encode_documents(["Alpha beta.", "Gamma delta."], tokenizer, tmp_path / "short", append_eod=False, sentences=True)
    with pytest.raises(DataError, match=r"short.bin: no usable document \(need >= 2 sentences\)"):
        training_set(config(corpus, tiny, "bert", *PAIRS, f"data.train=[{tmp_path}/short]"), tiny / "cache")
    encode_documents(["Alpha beta. Gamma delta."], tokenizer, tmp_path / "one", append_eod=False, sentences=True)
    with pytest.raises(DataError, match="only one document with text"):
        training_set(config(corpus, tiny, "bert", *PAIRS, f"data.train=[{tmp_path}/one]"), tiny / "cache")
    order = config(corpus, tiny, "bert", "model.sentence_head=sentence_order", f"data.train=[{tmp_path}/one]")
    assert training_set(order, tiny / "cache")[0].length > 5


def test_ranges_cover_each_document(corpus: Path) -> None:
    source = IndexedDataset(corpus / "bert")
    spans = span_ranges(source, 20)
    assert spans[0, 0] == 0 and (spans[1:, 0] == spans[:-1, 1]).all() and spans[-1, 1] == source.sequence_lengths.sum()
    assert (np.diff(spans) > 0).all() and (np.diff(spans) <= 20).all()
    pairs = pair_ranges(source, 20)
    document = np.searchsorted(source.document_indices, pairs, side="right")
    assert (document[:, 0] == np.searchsorted(source.document_indices, pairs[:, 1] - 1, side="right")).all()
    assert (np.diff(pairs) >= 2).all()


@pytest.mark.parametrize(
    ("family", "other", "words"),
    [("bert", "t5", r"has no \[CLS\] or <s>, which bert needs"), ("t5", "bert", "has no </s> or|has 0 sentinels|sentinels")],
)
def test_a_tokenizer_of_another_family_is_named(corpus: Path, tiny: Path, family: str, other: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        training_set(config(corpus, tiny, family, f"data.tokenizer={corpus}/{other}.json"), tiny / "cache")


def test_a_vocabulary_larger_than_the_models_is_named(corpus: Path, tiny: Path) -> None:
    with pytest.raises(DataError, match="has 120 tokens, more than model.vocab_size 100"):
        training_set(config(corpus, tiny, "bert", "model.vocab_size=100"), tiny / "cache")


@pytest.mark.parametrize("algorithm", ["bpe", "wordpiece", "unigram"])
@pytest.mark.parametrize("family", ["gpt", "bert", "t5"])
def test_every_algorithm_has_the_special_tokens_of_every_family(family: str, algorithm: str) -> None:
    tokenizer = train_tokenizer(texts(20), 420, family, algorithm)
    names = {
        "gpt": ["<|endoftext|>"],
        "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        "t5": ["<pad>", "</s>", "<unk>"],
    }[family]
    assert [tokenizer.token_to_id(name) for name in names] == list(range(len(names)))
    if family == "t5":
        size = tokenizer.get_vocab_size()
        assert [tokenizer.token_to_id(f"<extra_id_{n}>") for n in (0, 99)] == [size - 1, size - 100]  # as in T5's vocabulary
    assert tokenizer.decode(tokenizer.encode("Alpha beta gamma.").ids).replace(" .", ".").strip() == "Alpha beta gamma."
    with pytest.raises(DataError, match="vocabulary of"):
        train_tokenizer(texts(2), 3, family, algorithm)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
        ("Version 3.11 is out. e.g. this one", ["Version 3.11 is out. e.g. this one"]),
        ("First part\n\nsecond part\n \n\nthird", ["First part", "second part", "third"]),
        ("   ", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert split_sentences(text) == expected


def test_several_processes_write_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    many = texts(1200, 3, 3)
    done: list[int] = []
    for workers in (1, 2):
        encode_in_processes(many, str(corpus / "bert.json"), tmp_path / str(workers), workers=workers, append_eod=True,
                            sentences=True, done=done.append)  # fmt: skip
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"1.{suffix}").read_bytes() == (tmp_path / f"2.{suffix}").read_bytes()
    assert sum(done) == 2 * 1200


def test_a_sentencepiece_model_is_a_tokenizer(tmp_path: Path) -> None:
    sentencepiece: Any = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text("\n".join(texts(100)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "m"), vocab_size=60, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        minloglevel=2,
    )  # fmt: skip
    tokenizer = load_tokenizer(tmp_path / "m.model")
    text = "Alpha beta. Gamma"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text and tokenizer.get_vocab_size() == 160
    assert [tokenizer.token_to_id(t) for t in ("<pad>", "</s>", "<extra_id_0>", "<extra_id_99>", "nothing")] == [
        0,
        1,
        159,
        60,
        None,
    ]
    assert [tokenizer.id_to_token(i) for i in (0, 159, 160)] == ["<pad>", "<extra_id_0>", None]
    mixed = [159, *tokenizer.encode("beta").ids, 158]
    assert (
        tokenizer.decode(mixed, skip_special_tokens=False) == "<extra_id_0> beta <extra_id_1>"
        and tokenizer.decode(mixed) == "beta"
    )
    report = encode_documents(texts(5), tokenizer, tmp_path / "data", append_eod=True)
    assert report.end_token and IndexedDataset(tmp_path / "data")[0][-1] == 1
    (tmp_path / "bad.model").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="can't be read"):
        load_tokenizer(tmp_path / "bad.model")


def test_the_scripts_make_data_of_each_family(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(20)))

    def run(*arguments: str) -> str:
        done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    source: Callable[..., list[str]] = lambda *more: ["--input", str(tmp_path / "in.jsonl"), *more]  # noqa: E731
    for family, note in (("bert", True), ("t5", False)):
        tokenizer = str(tmp_path / f"{family}.json")
        run("scripts/train_tokenizer.py", *source("--family", family, "--vocab-size", "200", "--output", tokenizer))
        out = run("scripts/preprocess_data.py", *source("--tokenizer", tokenizer, "--output-prefix", str(tmp_path / family),
                                                        "--split-sentences", "--workers", "2"))  # fmt: skip
        assert "20 documents, 240 sentences" in out and ("no end-of-document token" in out) == note


def test_reader_needs_no_more_than_its_arguments(corpus: Path, tiny: Path) -> None:
    """A sample does not depend on what was read before it."""
    built = config(corpus, tiny, "bert", *PAIRS)
    data, reader = training_set(built, tiny / "cache"), BertReader(built, built.training.seed)
    index = data._indices[0]
    sample = reader(data._datasets[0], index, index.sample(17), 17)
    assert np.array_equal(sample.tokens, data[17].tokens) and sample.sentence == data[17].sentence
