"""The strict loader: L01 L02 L03 L04 L10, N12, T15, T16, and where each value came from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from configs.load import LoadedConfig, load_config, write_schema
from configs.run import RunConfig
from configs.section import ConfigError
from tests.conftest import ROOT

SHIPPED = sorted(p for p in (ROOT / "configs").rglob("*.yaml") if p.parent.name != "compare")  # those are arms
BASE = {
    "run": {"name": "x"},
    "model": {"vocab_size": 100, "max_position_embeddings": 64},
    "transformer": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
    "data": {"train": ["a"], "seq_length": 32},
    "optimizer": {"learning_rate": 1e-3},
    "training": {"train_iters": 10, "micro_batch_size": 2, "global_batch_size": 4},
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(yaml.safe_dump(BASE))
    return path


def refuse(path: Path, *overrides: str, world_size: int | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, list(overrides), world_size)
    return str(error.value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_every_shipped_yaml_loads(path: Path) -> None:
    config = load_config(path).config
    assert load_config(path, world_size=config.parallel.tensor_parallel_size)


def test_the_committed_schema_is_the_current_one(tmp_path: Path) -> None:
    write_schema(tmp_path / "schema.json")
    assert (ROOT / "configs/schema.json").read_text() == (tmp_path / "schema.json").read_text()


def test_every_field_is_documented() -> None:
    def undocumented(schema: dict) -> list[str]:
        return [
            f"{name}.{key}"
            for name, section in schema["$defs"].items()
            for key, field in section["properties"].items()
            if "description" not in field
        ]

    assert undocumented(RunConfig.model_json_schema()) == []


@pytest.mark.parametrize(
    ("override", "key", "suggestion"),
    [
        ("learning_rte=1e-4", "learning_rte", "optimizer.learning_rate"),
        ("optimizer.weigth_decay=0.1", "optimizer.weigth_decay", "weight_decay"),
        ("model.hiden=8", "model.hiden", "transformer.hidden_size"),
        ("logging.wandb.mod=offline", "logging.wandb.mod", "mode"),
        ("transformer.hidden_drpout=0.1", "transformer.hidden_drpout", "hidden_dropout"),
    ],
)
def test_L01_unknown_key_is_refused_with_the_nearest_name(base: Path, override: str, key: str, suggestion: str) -> None:
    message = refuse(base, override)
    assert (
        f"{key}: is not a known key" in message and f"did you mean {suggestion!r}" in message and "command line" in message
    )


@pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("5e-5", 5e-5), ("1E-4", 1e-4), ("1e-08", 1e-8), ('"1e-4"', 1e-4), ("1", 1.0), (".5", 0.5)])  # fmt: skip
def test_L02_numbers_are_numbers(base: Path, text: str, value: float) -> None:
    assert load_config(base, [f"optimizer.learning_rate={text}"]).config.optimizer.learning_rate == value


@pytest.mark.parametrize(
    "override",
    ["optimizer.learning_rate=abc", "training.seed=1e3", "transformer.num_layers=2.5", "transformer.num_layers=true",
     "optimizer.learning_rate=true", "optimizer.learning_rate=.inf", "transformer.num_layers=010"],
)  # fmt: skip
def test_L02_everything_else_is_refused(base: Path, override: str) -> None:
    key, _, text = override.partition("=")
    message = refuse(base, override)
    assert key in message and "expected" in message


@pytest.mark.parametrize(
    "override",
    ["training.precision=off", "transformer.normalization=no", "checkpoint.load=None", "logging.wandb=~",
     'transformer.bias_dropout_fusion="false"', "transformer.bias_dropout_fusion=on", "parallel.sequence_parallel=yes",
     "transformer.persist_layer_norm=fastest"],
)  # fmt: skip
def test_L03_words_are_not_guessed_at(base: Path, override: str) -> None:
    assert override.partition("=")[0] in refuse(base, override)


@pytest.mark.parametrize("key", ["training.recompute", "parallel.data_sharding"])
def test_L03_none_is_a_word_where_it_is_one_of_the_choices(base: Path, tmp_path: Path, key: str) -> None:
    section, name = key.split(".")
    assert load_config(base, [f"{key}=none"]).config.model_dump()[section][name] == "none"
    tree = yaml.safe_load(base.read_text())
    tree.setdefault(section, {}).pop(name, None)
    path = tmp_path / "none.yaml"
    path.write_text(
        yaml.safe_dump(tree)
        .replace(f"{section}: {{}}", f"{section}:")
        .replace(f"{section}:\n", f"{section}:\n  {name}: none\n")
    )
    assert load_config(path).config.model_dump()[section][name] == "none"
    wrong = refuse(base, f"{key}=None")
    assert "1 problem" in wrong and f"{key}: got 'None'" in wrong and "write none" in wrong


def test_L03_null_is_null(base: Path) -> None:
    assert load_config(base, ["checkpoint.load=null"]).config.checkpoint.load is None
    assert load_config(base, ["checkpoint.load=~"]).config.checkpoint.load is None


@pytest.mark.parametrize(("batch", "micro"), [(10, 4), (2, 4)])
def test_L04_batch_arithmetic_shows_the_numbers(base: Path, batch: int, micro: int) -> None:
    message = refuse(base, f"training.global_batch_size={batch}", f"training.micro_batch_size={micro}")
    assert f"{batch} is not micro_batch_size {micro} x" in message


@pytest.mark.parametrize("size", [0, -1])
def test_L04_sizes_are_positive(base: Path, size: int) -> None:
    assert "training.micro_batch_size" in refuse(base, f"training.micro_batch_size={size}")


def test_L10_required_keys_are_listed_together(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("run: {name: x}\nmodel: {}\n")
    message = refuse(path)
    for key in ("model.vocab_size", "model.max_position_embeddings", "transformer", "data", "optimizer", "training"):
        assert f"{key}: is missing" in message


@pytest.mark.parametrize("key", ["model.vocab_size", "transformer.num_layers", "data.train", "optimizer.learning_rate"])
def test_L10_each_required_key_by_its_yaml_path(tmp_path: Path, key: str) -> None:
    section, name = key.split(".")
    tree = json.loads(json.dumps(BASE))
    del tree[section][name]
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert f"{key}: is missing" in refuse(path)


def test_N12_odd_rotary_dimension(base: Path) -> None:
    message = refuse(
        base, "transformer.hidden_size=520", "transformer.num_attention_heads=8", "model.position_embedding_type=rope"
    )
    assert "65" in message and "even" in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["transformer.num_attention_heads=32", "transformer.num_query_groups=5"], ["32", "5", "num_query_groups"]),
        (["transformer.num_query_groups=2", "parallel.tensor_parallel_size=4"], ["num_query_groups 2", "tensor_parallel_size 4"]),
        (["transformer.num_attention_heads=6", "transformer.hidden_size=96", "parallel.tensor_parallel_size=4"], ["6", "4"]),
        (["transformer.ffn_hidden_size=10", "parallel.tensor_parallel_size=4"], ["ffn_hidden_size 10", "4"]),
        (["transformer.num_attention_heads=5"], ["hidden_size 64", "num_attention_heads 5"]),
        (["model.make_vocab_size_divisible_by=3", "parallel.tensor_parallel_size=4"], ["vocab_size 100", "102", "4"]),
    ],
)  # fmt: skip
def test_T15_sizes_that_do_not_divide(base: Path, overrides: list[str], words: list[str]) -> None:
    message = refuse(base, *overrides)
    assert all(word in message for word in words)


def test_T16_sequence_that_does_not_divide(base: Path) -> None:
    message = refuse(base, "data.seq_length=10", "parallel.tensor_parallel_size=4", "parallel.sequence_parallel=true")
    assert "data.seq_length" in message and "tensor_parallel_size 4" in message and "sequence_parallel" in message


@pytest.mark.parametrize(
    ("world_size", "overrides", "words"),
    [
        (3, ["parallel.tensor_parallel_size=2"], ["3 processes were started", "--nproc-per-node 2", "divisor of 3"]),
        (1, ["parallel.tensor_parallel_size=2"], ["1 process was started"]),
        (4, ["parallel.data_parallel_size=3", "training.global_batch_size=6"], ["parallel.data_parallel_size", "is 3", "4 processes were started"]),
        (3, [], ["global_batch_size", "4 is not micro_batch_size 2", "data-parallel size 3", "nearest: 6"]),
        (2, ["training.global_batch_size=10", "training.micro_batch_size=4"], ["data-parallel size 2", "nearest: 8 and 16"]),
        (4, ["parallel.data_sharding=full", "parallel.data_shard_size=3", "training.micro_batch_size=1"],
         ["parallel.data_shard_size", "3 does not divide the data-parallel size 4"]),
        (2, ["parallel.data_shard_size=2"], ["data_sharding none splits nothing"]),
    ],
)  # fmt: skip
def test_L04_T15_processes_batch_and_shards_must_multiply(
    base: Path, world_size: int, overrides: list[str], words: list[str]
) -> None:
    message = refuse(base, *overrides, world_size=world_size)
    assert all(word in message for word in words) and message.startswith("1 problem"), message


def test_the_data_parallel_size_is_filled_in_with_its_source(base: Path) -> None:
    loaded = load_config(base, ["training.global_batch_size=8", "parallel.tensor_parallel_size=2"], world_size=4)
    assert loaded.config.parallel.data_parallel_size == 2
    assert loaded.sources["parallel.data_parallel_size"] == "number of processes"
    assert load_config(base).config.parallel.data_parallel_size is None


def test_duplicate_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(yaml.safe_dump(BASE) + "run: {name: y}\n")
    assert "run: is there twice" in refuse(path)


def test_all_problems_come_together_with_their_source(base: Path) -> None:
    message = refuse(base, "training.precision=fp64", "optimizer.clip_grad=x", "transformer.hidden_dropout=1.5")
    assert "3 problems" in message and message.count("command line") == 3


def test_every_value_knows_its_source(base: Path) -> None:
    loaded = load_config(base, ["training.seed=7"])
    assert loaded.sources["training.seed"] == "command line 'training.seed=7'"
    assert loaded.sources["transformer.hidden_size"].startswith("base.yaml:")
    assert loaded.sources["optimizer.clip_grad"] == "default"


def test_the_resolved_yaml_loads_to_the_same_config(base: Path, tmp_path: Path) -> None:
    loaded: LoadedConfig = load_config(base, ["training.seed=7", "optimizer.learning_rate=3e-4"])
    path = tmp_path / "resolved.yaml"
    path.write_text(loaded.resolved_yaml())
    assert load_config(path).config == loaded.config


def test_sdpa_with_attention_dropout_is_a_problem(base: Path) -> None:
    assert "attention_dropout" in refuse(base, "transformer.attention_backend=sdpa", "transformer.attention_dropout=0.1")


@pytest.mark.parametrize(
    "train", ["[{prefix: a, weight: -1}, b]", "[{prefix: a, weight: .inf}]", "[{prefix: a, weight: 0}]", "[]"]
)
def test_D11_weights_that_mean_nothing(base: Path, train: str) -> None:
    assert "data.train" in refuse(base, f"data.train={train}")


def test_explain_is_quick_and_says_what_runs(base: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/explain.py", str(base), "transformer.bias_dropout_fusion=true", "--json"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert report["problems"] == [] and report["parameters"] > 0
    asked = {d["flag"]: d["asked"] for d in report["fusions"]["decisions"]}
    assert asked["bias_dropout_fusion"] is True and asked["persist_layer_norm"] is False


def test_explain_refuses_with_code_2(base: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/explain.py", str(base), "model.hiden=8"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "did you mean" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "foo: &x [*x]",
        "a: !!int abc",
        "a: !!bool abc",
        "a: !!timestamp abc",
        "a: \x07",
        "a: [",
        "- 1",
        "",
        "a: " + "9" * 5000,
    ],
)
def test_what_yaml_cannot_read_is_one_problem(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    refuse(path)


@pytest.mark.parametrize(
    "override", ["training.train_iters=\x07", "training.train_iters=!!int abc", "a.b.c.d=1", "=", "x", "transformer=3"]
)
def test_what_an_override_cannot_say_is_one_problem(base: Path, override: str) -> None:
    refuse(base, override)
