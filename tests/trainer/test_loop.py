"""A whole run in one process: resume bit for bit, losses over the global batch, what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from configs.load import load_config
from tests.conftest import write_tokens
from trainer.checkpoint import complete_checkpoints, incompleteness, load_tensors, tensors_of
from trainer.data.gpt_dataset import gpt_validation_set, make_gpt_batch
from trainer.errors import CheckpointError, DataError
from trainer.log import Log
from trainer.loop import evaluate, train, train_step
from trainer.lr_schedule import learning_rate
from trainer.records import read_metrics
from trainer.setup import Job, build_job, start

QUIET = Log(rank=1)


def job(folder: Path, *overrides: str) -> Job:
    loaded = load_config(folder / "tiny.yaml", ["run.device=cpu", *overrides])
    device, tp = start(loaded, QUIET)
    return build_job(loaded, device, tp, Log(rank=0))


def run(folder: Path, *overrides: str) -> dict[int, float]:
    """Train; loss by iteration from metrics.jsonl."""
    built = job(folder, *overrides)
    train(built)
    return {r["iteration"]: r["loss"] for r in read_metrics(Path(built.config.run.path, "metrics.jsonl")) if "loss" in r}


@pytest.mark.parametrize("extra", [(), ("training.precision=bf16",), ("transformer.bias_dropout_fusion=true",)], ids=str)
def test_C01_C06_K07_stopped_anywhere_and_resumed_the_losses_are_the_same_bits(tiny: Path, extra: tuple[str, ...]) -> None:
    whole = run(tiny, "run.directory=null", f"run.directory={tiny}/whole", "training.train_iters=10", *extra)
    parts = f"run.directory={tiny}/parts"
    fixed = "optimizer.decay_iters=10"  # the schedule of the whole run
    run(tiny, parts, fixed, "training.train_iters=3", *extra)
    run(tiny, parts, fixed, "training.train_iters=7", *extra)
    resumed = run(tiny, parts, fixed, "training.train_iters=10", *extra)
    assert resumed == whole  # bit for bit, dropout on


def test_C05_save_load_save_gives_equal_files(tiny: Path) -> None:
    built = job(tiny, "training.train_iters=3")
    train(built)
    path = complete_checkpoints(tiny / "run" / "checkpoints")[-1]
    again = job(tiny, "training.train_iters=3")
    before = {k: v.clone() for k, v in tensors_of(again.model, again.optimizer).items()}
    load_tensors(path, again.model, again.optimizer)
    for key, value in tensors_of(built.model, built.optimizer).items():
        assert torch.equal(tensors_of(again.model, again.optimizer)[key], value), key
    assert not all(torch.equal(before[k], v) for k, v in tensors_of(again.model, again.optimizer).items())
    assert all(float(v) == 3 for k, v in tensors_of(again.model, again.optimizer).items() if k.startswith("optimizer.step"))


def test_C09_a_damaged_checkpoint_is_refused_and_latest_falls_back(tiny: Path) -> None:
    train(job(tiny, "training.train_iters=4", "checkpoint.save_interval=2"))
    older, newer = complete_checkpoints(tiny / "run" / "checkpoints")
    shard = next(newer.glob("*.safetensors"))
    shard.write_bytes(b"")
    assert shard.name in incompleteness(newer) and "0 bytes" in incompleteness(newer)
    with pytest.raises(CheckpointError, match=shard.name):
        train(job(tiny, f"checkpoint.load={newer}"))
    assert complete_checkpoints(tiny / "run" / "checkpoints") == [older]
    losses = run(tiny, "training.train_iters=5")
    assert set(losses) == {1, 2, 3, 4, 5}
    assert incompleteness(complete_checkpoints(tiny / "run" / "checkpoints")[-1]) == ""


def test_C10_an_unfinished_folder_of_the_same_iteration_is_replaced(tiny: Path) -> None:
    for name in ("iter_0000002.partial", "iter_0000002"):
        folder = tiny / "run" / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "junk").write_text("left over")
    train(job(tiny, "training.train_iters=2"))
    (path,) = complete_checkpoints(tiny / "run" / "checkpoints")
    assert path.name == "iter_0000002" and not (path / "junk").exists()


def test_keep_last_removes_older_checkpoints(tiny: Path) -> None:
    train(job(tiny, "training.train_iters=5", "checkpoint.save_interval=1", "checkpoint.keep_last=2"))
    assert [p.name for p in complete_checkpoints(tiny / "run" / "checkpoints")] == ["iter_0000004", "iter_0000005"]


def test_C11_C13_files_are_safetensors_and_json_with_keys_of_the_plain_model(tiny: Path) -> None:
    from safetensors import safe_open

    train(job(tiny, "training.train_iters=1", "transformer.persist_layer_norm=true"))
    (path,) = complete_checkpoints(tiny / "run" / "checkpoints")
    assert {p.suffix for p in path.iterdir()} == {".json", ".safetensors"}
    keys = [k for p in path.glob("*.safetensors") for k in safe_open(p, "pt").keys()]  # noqa: SIM118
    assert sorted(k for k in keys if k.startswith("model.")) == sorted(
        f"model.{n}" for n, _ in job(tiny).model.named_parameters()
    )
    train(job(tiny, "training.train_iters=2", "transformer.persist_layer_norm=false"))  # fusions may change


def test_a_checkpoint_from_before_a_key_was_there_is_resumed_with_its_default(tiny: Path) -> None:
    train(job(tiny, "training.train_iters=2"))
    (path,) = complete_checkpoints(tiny / "run" / "checkpoints")
    state = json.loads((path / "state.json").read_text())
    del state["config"]["model"]["num_token_types"], state["config"]["transformer"]["attention_scale"]
    del state["config"]["data"]["max_ngram"]
    (path / "state.json").write_text(json.dumps(state))
    marker = json.loads((path / "complete.json").read_text())
    marker["files"]["state.json"] = (path / "state.json").stat().st_size
    (path / "complete.json").write_text(json.dumps(marker))
    train(job(tiny, "training.train_iters=3"))
    with pytest.raises(CheckpointError, match="transformer.attention_scale: None in the checkpoint, 1.0 now"):
        train(
            job(
                tiny,
                "training.train_iters=4",
                "transformer.attention_scale=1.0",
                f"checkpoint.load={path}",
                f"run.directory={tiny}/x",
            )
        )


@pytest.mark.parametrize("layers", [2, 4])
def test_C12_a_checkpoint_of_another_depth_names_the_keys(tiny: Path, layers: int) -> None:
    train(job(tiny, "training.train_iters=1"))
    (path,) = complete_checkpoints(tiny / "run" / "checkpoints")
    other = job(tiny, f"transformer.num_layers={layers}")
    with pytest.raises(
        CheckpointError, match=r"model.decoder.layers.\d.*is (not in the checkpoint|in the checkpoint but not)"
    ):
        load_tensors(path, other.model, other.optimizer)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.max_position_embeddings=128", "model.max_position_embeddings: 64 in the checkpoint, 128 now"),  # C18
        ("data.seq_length=16", "data.seq_length: 32 in the checkpoint, 16 now"),  # D20
        ("training.seed=5", "training.seed: 1234 in the checkpoint, 5 now"),
        ("training.global_batch_size=8", "training.global_batch_size: 4 in the checkpoint, 8 now"),
    ],
)
def test_C18_D20_L11_a_resume_that_means_something_else_is_refused(tiny: Path, override: str, key: str) -> None:
    train(job(tiny, "training.train_iters=1"))
    with pytest.raises(CheckpointError) as error:
        train(job(tiny, "training.train_iters=2", override))
    assert key in str(error.value)


def test_L11_C07_what_may_change_is_listed_and_comes_from_the_new_configuration(
    tiny: Path, capsys: pytest.CaptureFixture
) -> None:
    train(job(tiny, "training.train_iters=2"))
    capsys.readouterr()
    built = job(
        tiny,
        "training.train_iters=4",
        "optimizer.learning_rate=5e-4",
        "transformer.hidden_dropout=0.2",
        "optimizer.schedule=constant",
    )
    train(built)
    out = capsys.readouterr().out
    for line in (
        "optimizer.learning_rate: 0.001 in the checkpoint, 0.0005 now",
        "transformer.hidden_dropout: 0.1",
        "training.train_iters: 2",
    ):
        assert f"resume: {line}" in out
    rows = [json.loads(line) for line in (tiny / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["learning_rate"] for row in rows if "learning_rate" in row][-1] == 5e-4


def test_D20_with_the_override_it_goes_on(tiny: Path) -> None:
    train(job(tiny, "training.train_iters=1"))
    assert 2 in run(tiny, "training.train_iters=2", "training.seed=5", "checkpoint.allow_data_change=true")


def schedule(tiny: Path, *overrides: str) -> list[float]:
    config = load_config(tiny / "tiny.yaml", list(overrides)).config
    return [learning_rate(config, i) for i in range(config.training.train_iters + 1)]


def test_C07_C08_the_learning_rate_is_a_function_of_the_iteration(tiny: Path) -> None:
    base = [
        "optimizer.warmup_iters=0",
        "optimizer.learning_rate=6e-4",
        "optimizer.min_learning_rate=6e-5",
        "training.train_iters=20",
    ]
    assert schedule(tiny, *base)[15] == pytest.approx(1.39081e-4, rel=1e-5)
    long = [
        "optimizer.warmup_iters=0",
        "optimizer.learning_rate=1e-3",
        "optimizer.min_learning_rate=1e-5",
        "training.train_iters=100",
    ]
    assert schedule(tiny, *long)[50] == pytest.approx(5.05e-4, rel=1e-9)
    warm = schedule(tiny, "optimizer.warmup_iters=4", "optimizer.schedule=linear", "training.train_iters=12")
    assert warm[1] == pytest.approx(2.5e-4) and warm[4] == 1e-3 and warm[8] == pytest.approx(5e-4) and warm[12] == 0
    wsd = schedule(
        tiny, "optimizer.warmup_iters=2", "optimizer.schedule=wsd", "optimizer.wsd_decay_iters=4", "training.train_iters=12"
    )
    assert wsd[2:9] == [1e-3] * 7 and wsd[10] == pytest.approx(5e-4) and wsd[12] == 0
    assert schedule(tiny, "optimizer.schedule=constant", "optimizer.warmup_iters=0")[1:] == [1e-3] * 20


def test_N20_token_mean_over_the_global_batch(tiny: Path) -> None:
    """One micro-batch with 8 counted tokens and one with 64: not the mean of two means."""
    from dataclasses import replace

    built = job(tiny, "transformer.hidden_dropout=0.0", "transformer.attention_dropout=0.0")
    samples = list(torch.randint(0, 301, (4, 33)).numpy())
    batches = [make_gpt_batch(samples[i : i + 2], [i, i + 1], built.config.data) for i in (0, 2)]
    mask = torch.zeros(2, 32)
    mask[0, :8] = 1
    batches[0] = replace(batches[0], loss_mask=mask)
    losses = [built.model(b.tokens, labels=b.labels) * b.loss_mask for b in batches]
    expected = sum(v.sum() for v in losses).item() / 72
    assert train_step(built.model, built.optimizer, batches, built.config, 1).loss.item() == pytest.approx(
        expected, rel=1e-6
    )


def test_N19_a_batch_without_counted_tokens_is_skipped(tiny: Path) -> None:
    from dataclasses import replace

    built = job(tiny)
    batch = make_gpt_batch(list(torch.randint(0, 301, (2, 33)).numpy()), [0, 1], built.config.data)
    before = [p.detach().clone() for p in built.model.parameters()]
    result = train_step(built.model, built.optimizer, [replace(batch, loss_mask=torch.zeros(2, 32))], built.config, 1)
    assert result.loss.item() == 0 and result.skipped.item() == 1
    assert all(torch.equal(a, b) for a, b in zip(before, built.model.parameters(), strict=True))
    half = train_step(built.model, built.optimizer, [batch, replace(batch, loss_mask=torch.zeros(2, 32))], built.config, 1)
    assert half.skipped.item() == 0 and torch.isfinite(half.loss)


def test_G09_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trainer.loop as loop

    built = job(tiny, "training.train_iters=5", "logging.log_interval=1")
    original, weights = loop.norm_and_sums, {}

    def poisoned(parameters, sums, size):
        number = len(weights) + 1
        weights[number] = built.optimizer.parameters[0].detach().clone()
        norm, sums = original(parameters, sums, size)
        return norm * (float("nan") if number == 3 else 1.0), sums

    monkeypatch.setattr(loop, "norm_and_sums", poisoned)
    train(built)
    rows = [r for r in read_metrics(tiny / "run" / "metrics.jsonl") if "loss" in r]
    assert [r["skipped"] for r in rows] == [False, False, True, False, False]
    assert torch.equal(weights[3], weights[4]) and not torch.equal(weights[4], weights[5])
    assert rows[2]["grad_norm"] != rows[2]["grad_norm"]  # nan is written as nan


def test_G09_too_many_in_a_row_end_the_job(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainer.loop as loop

    built = job(tiny, "training.max_nonfinite_iters=3", "logging.log_interval=1")
    monkeypatch.setattr(loop, "norm_and_sums", lambda parameters, sums, size: (torch.tensor(float("inf")), sums))
    with pytest.raises(FloatingPointError, match="3 iterations in a row were skipped"):
        train(built)


def test_clipping_scales_to_the_global_norm(tiny: Path) -> None:
    """AdamW's first step hardly depends on the gradient's scale, so look at its first moment: (1 - beta1) * clipped gradient."""
    built = job(tiny, "optimizer.clip_grad=0.01")
    batch = make_gpt_batch(list(torch.randint(0, 301, (4, 33)).numpy()), [0, 1, 2, 3], built.config.data)
    result = train_step(built.model, built.optimizer, [batch], built.config, 1)
    moments = [v for k, v in built.optimizer.state().items() if ".exp_avg." in k]
    assert result.grad_norm > 0.02
    assert torch.stack([m.norm() for m in moments]).norm().item() / 0.1 == pytest.approx(0.01, rel=1e-3)


def test_D19_validation_repeats_and_is_the_token_mean(tiny: Path) -> None:
    write_tokens(tiny / "small", [list(range(97))])
    built = job(tiny, f"data.valid=[{tiny}/small]")
    valid = gpt_validation_set(built.config)
    first = evaluate(built.model, valid, built.config)
    assert first == evaluate(built.model, valid, built.config)
    batch = make_gpt_batch([valid[i] for i in range(3)], [0, 1, 2], built.config.data)
    expected = built.model.eval()(batch.tokens, labels=batch.labels).mean().item()
    assert first == pytest.approx(expected, rel=1e-6)


class _HostReads(TorchDispatchMode):
    """Counts the numbers that are read on the host, each of which waits for the device."""

    reads = 0

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # functions stay compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func.__name__.startswith("_local_scalar_dense")
        return func(*args, **(kwargs or {}))


def test_G03_steps_that_are_not_logged_do_not_wait_for_the_device(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainer.loop as loop
    import trainer.metrics as metrics_module

    at, waits, mode = [0], [], _HostReads()

    def step(model: Any, optimizer: Any, batches: Any, config: Any, iteration: int) -> Any:
        at[0] = iteration
        with mode:
            return train_step(model, optimizer, batches, config, iteration)

    monkeypatch.setattr(loop, "train_step", step)
    monkeypatch.setattr(metrics_module, "synchronise", lambda device: waits.append(at[0]))
    run(tiny, "training.train_iters=20", "logging.log_interval=10")
    assert mode.reads == 20 * 2  # the tokens of each micro-batch are counted on the host, before it goes to the device
    # Before the first; where a line is due, which the first one is too; the clock stops for the last checkpoint and validation.
    assert set(waits) == {0, 1, 10, 20} and len(waits) <= 6, waits


def test_what_a_run_leaves_behind(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    train(job(tiny, "training.train_iters=6", "logging.log_interval=2", "transformer.bias_dropout_fusion=true"))
    folder = tiny / "run"
    assert {"config.yaml", "fusions.json", "metrics.jsonl", "loss.png", "checkpoints", "cache"} <= {
        p.name for p in folder.iterdir()
    }
    rows = [r for r in read_metrics(folder / "metrics.jsonl") if "loss" in r]
    assert [r["iteration"] for r in rows] == [1, 2, 3, 4, 5, 6]
    for key in ("grad_norm", "learning_rate", "iteration_time_ms", "tokens_per_second", "mfu", "loss"):
        assert all(key in r for r in rows)
    assert rows[-1]["peak_memory_gib"] > 0
    counts = rows[-1]["fusion_counters"]["bias_dropout_fusion @ mlp_bda"]
    assert counts["fused"] > 0 and counts["reference"] == 0
    assert [r["first_after_start"] for r in rows] == [True] + [False] * 5
    plan = json.loads((folder / "fusions.json").read_text())
    assert any(d["runs"] == "compile" for d in plan["decisions"])
    out = capsys.readouterr().out
    assert "bias_dropout_fusion" in out and "validation loss" in out and "FAULT" not in out


def test_an_id_beyond_the_vocabulary_in_the_validation_data_is_found_before_training(tiny: Path) -> None:
    write_tokens(tiny / "bad", [[1] * 40 + [400] * 40])
    with pytest.raises(DataError, match="bad.bin has token id 400"):
        train(job(tiny, f"data.valid=[{tiny}/bad]"))
    assert not (tiny / "run" / "metrics.jsonl").exists()


def test_a_fresh_start_among_later_checkpoints_is_refused(tiny: Path) -> None:
    train(job(tiny, "training.train_iters=3"))
    with pytest.raises(CheckpointError, match="iter_0000003, but this job starts after iteration 0"):
        train(job(tiny, "training.train_iters=2", "checkpoint.load=null"))


def test_a_refused_resume_leaves_the_description_of_the_run(tiny: Path) -> None:
    train(job(tiny, "training.train_iters=1"))
    before = (tiny / "run" / "config.yaml").read_text()
    with pytest.raises(CheckpointError):
        train(job(tiny, "training.train_iters=2", "transformer.num_layers=2"))
    assert (tiny / "run" / "config.yaml").read_text() == before


def test_metrics_are_never_behind_a_checkpoint_and_a_torn_line_is_stepped_over(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trainer.loop as loop

    original = loop.save_checkpoint

    def killed(*args):
        original(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "save_checkpoint", killed)
    options = ("training.train_iters=8", "checkpoint.save_interval=4", "logging.log_interval=10")
    with pytest.raises(KeyboardInterrupt):
        train(job(tiny, *options))
    monkeypatch.undo()
    with open(tiny / "run" / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 5, "lo')
    assert list(run(tiny, *options)) == [1, 2, 3, 4, 5, 6, 7, 8]
