"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "0" if os.path.exists("/dev/nvidiactl") else "1")  # before Triton is imported

import numpy as np
import pytest
import torch

from fusions.machine import import_problem
from trainer.data.indexed_dataset import IndexedDatasetBuilder

THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2  # with workers, each has a core
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
torch.set_num_threads(THREADS)

ROOT = Path(__file__).parent.parent
needs_triton = pytest.mark.skipif(import_problem("triton") != "", reason="no Triton")

# 3 layers, 8 heads in 4 groups, an odd vocabulary: nothing a shortcut could hide in.
TINY_YAML = """
run: {{name: tiny, directory: {folder}/run}}
model: {{vocab_size: 301, max_position_embeddings: 64, make_vocab_size_divisible_by: 8}}
transformer: {{num_layers: 3, hidden_size: 64, num_attention_heads: 8, num_query_groups: 4, activation: gelu_tanh}}
data: {{train: [{folder}/data], valid: [{folder}/data], seq_length: 32}}
optimizer: {{learning_rate: 1e-3, weight_decay: 0.1}}
training: {{train_iters: 20, micro_batch_size: 2, global_batch_size: 4, eval_iters: 2}}
logging: {{log_interval: 5}}
"""


def write_tokens(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> None:
    """A .bin/.idx pair with these documents."""
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_item(document)
            builder.end_document()
        builder.finalize()


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder with tiny.yaml and 40 documents of learnable tokens (each follows its predecessor by a fixed step)."""
    rng = np.random.default_rng(0)
    documents = []
    for _ in range(40):
        start, step, length = rng.integers(0, 300), rng.integers(1, 4), rng.integers(20, 120)
        documents.append(((start + step * np.arange(length)) % 300).tolist())
    write_tokens(tmp_path / "data", documents)
    (tmp_path / "tiny.yaml").write_text(TINY_YAML.format(folder=tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def fresh_start() -> None:
    """Each test meets generator and compiler as a new run does; compiled kernels still come from Inductor's cache on disk."""
    torch._dynamo.reset()
    torch.manual_seed(0)
