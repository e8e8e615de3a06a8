"""The job as its user starts it: torchrun, bad input, ranks that die, signals. L04 to L07, L09, C19, G07, G08, K01."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, write_tokens
from trainer.checkpoint import complete_checkpoints
from trainer.records import read_metrics


def command(tiny: Path, ranks: int, *overrides: str, script: str = "scripts/pretrain.py") -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    if ranks > 1:
        overrides = (f"parallel.tensor_parallel_size={ranks}", "parallel.sequence_parallel=true", *overrides)
    return [*(launcher if ranks > 1 else [sys.executable]), script, str(tiny / "tiny.yaml"), "run.device=cpu", *overrides]


def start(args: list[str], **environment: str) -> subprocess.Popen[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(args, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def run(args: list[str], timeout: float = 120, **environment: str) -> tuple[int, str]:
    process = start(args, **environment)
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, output


def losses(folder: Path) -> dict[int, float]:
    return {r["iteration"]: r["loss"] for r in read_metrics(folder / "metrics.jsonl") if "loss" in r}


def test_L07_without_a_launcher_it_is_one_process_and_a_checkpoint_moves_between_sizes(tiny: Path) -> None:
    code, output = run(command(tiny, 1, "training.train_iters=4", "optimizer.decay_iters=8"))
    assert code == 0, output
    code, output = run(command(tiny, 2, "training.train_iters=8"))
    assert code == 0 and "4 iterations done" in output, output
    resumed = losses(tiny / "run")
    code, output = run(command(tiny, 1, f"run.directory={tiny}/one", "training.train_iters=8"))
    assert code == 0, output
    for iteration, loss in losses(tiny / "one").items():
        assert resumed[iteration] == pytest.approx(loss, rel=1e-5)
    code, output = run(
        [sys.executable, "scripts/explain.py", str(tiny / "run" / "config.yaml")]
    )  # what was saved is a config
    assert code == 0, output


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.hiden=8"], "model.hiden: is not a known key"),
        (["transformer.num_query_groups=3"], "num_attention_heads 8 is not divisible by num_query_groups 3"),
        (["parallel.tensor_parallel_size=4"], "2 processes were started"),
        (["data.train=[nowhere]"], "nowhere.idx is missing"),
        (["transformer.bias_dropout_fusion=apex"], "'apex' was required"),
        (["model.vocab_size=64"], "model.vocab_size is 64"),
        (["training.global_batch_size=3"], "3 is not micro_batch_size 2"),
    ],
)
def test_bad_input_is_one_message_and_a_non_zero_exit(tiny: Path, overrides: list[str], words: str) -> None:
    code, output = run(command(tiny, 2, *overrides))
    assert (
        code != 0
        and output.count(words) == 1
        and "Traceback" not in output.split("ChildFailedError")[0].split("torch/distributed")[0]
    )


def test_a_truncated_data_file_names_itself(tiny: Path) -> None:
    data = (tiny / "data.bin").read_bytes()
    (tiny / "data.bin").write_bytes(data[:-10])
    code, output = run(command(tiny, 1))
    assert code == 2 and f"data.bin has {len(data) - 10} bytes" in output and "Traceback" not in output


def test_a_required_fusion_without_a_compiler_is_an_error_and_true_is_a_reference_with_its_reason(tiny: Path) -> None:
    none = {"CXX": "no-such-compiler"}
    code, output = run(command(tiny, 1, "transformer.bias_dropout_fusion=compile"), **none)
    assert code == 2 and "no-such-compiler is not on PATH" in output
    code, output = run(command(tiny, 1, "transformer.bias_dropout_fusion=true", "training.train_iters=2"), **none)
    assert code == 0 and "compiler: no C++ compiler (no-such-compiler" in output


FAULTY = """
import os, sys, signal
sys.path.insert(0, {root!r})
sys.argv[0] = "pretrain.py"
import trainer.loop as loop
original = loop.train_step
def faulty(model, optimizer, batches, config, iteration):
    if os.environ.get("RANK") == "1" and iteration == 3:
        {action}
    return original(model, optimizer, batches, config, iteration)
loop.train_step = faulty
from scripts.pretrain import main
raise SystemExit(main())
"""


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("raise RuntimeError('disk on fire')", ["rank 1 failed", "disk on fire"]),
        ("sys.exit(0)", ["rank 1: left the job before its end"]),
        ("os.kill(os.getpid(), signal.SIGKILL)", ["local_rank: 1", "SIGKILL"]),
    ],
    ids=["raises", "exits with 0", "is killed"],
)
def test_L06_a_rank_that_dies_ends_the_job_with_its_reason(tiny: Path, action: str, words: list[str]) -> None:
    script = tiny / "faulty.py"
    script.write_text(textwrap.dedent(FAULTY).format(root=str(ROOT), action=action))
    begin = time.time()
    code, output = run(command(tiny, 2, script=str(script)), timeout=100)
    assert code != 0 and time.time() - begin < 60
    assert all(word in output.replace("(local_rank", "local_rank") for word in words) or all(
        w in output for w in ["rank      : 1", "SIGKILL"]
    ), output


def test_L05_two_jobs_at_once(tiny: Path) -> None:
    jobs = [start(command(tiny, 2, f"run.directory={tiny}/{name}", "training.train_iters=3")) for name in ("a", "b")]
    outputs = [job.communicate(timeout=150)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert losses(tiny / "a") == losses(tiny / "b")


def wait_for_iteration(folder: Path, iteration: int, seconds: float = 60) -> None:
    end = time.time() + seconds
    while time.time() < end:
        if (folder / "metrics.jsonl").exists() and max([0, *losses(folder)]) >= iteration:
            return
        time.sleep(0.05)
    raise AssertionError(f"iteration {iteration} was not reached in {seconds} s")


LONG = ("training.train_iters=400", "logging.log_interval=1", "optimizer.schedule=constant")


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_C19_a_signal_to_one_worker_saves_and_the_run_goes_on_bit_for_bit(tiny: Path) -> None:
    job = start(command(tiny, 2, *LONG))
    wait_for_iteration(tiny / "run", 4)
    os.kill(children_of(job.pid)[1], signal.SIGTERM)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0 and "SIGTERM: stopped after iteration" in output, output
    (checkpoint,) = complete_checkpoints(tiny / "run" / "checkpoints")
    stopped = int(checkpoint.name[-7:])
    target = f"training.train_iters={stopped + 3}"
    assert run(command(tiny, 2, *LONG[1:], target))[0] == 0
    assert run(command(tiny, 2, *LONG[1:], target, f"run.directory={tiny}/whole"))[0] == 0
    assert losses(tiny / "run") == losses(tiny / "whole")


def test_C19_with_the_option_off_a_signal_kills_at_once(tiny: Path) -> None:
    job = start(command(tiny, 1, *LONG, "checkpoint.save_on_signal=false"))
    wait_for_iteration(tiny / "run", 2)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=5)
    assert job.returncode == -signal.SIGTERM and complete_checkpoints(tiny / "run" / "checkpoints") == []


def test_killed_without_warning_it_resumes_from_the_last_checkpoint_bit_for_bit(tiny: Path) -> None:
    job = start(command(tiny, 1, *LONG, "checkpoint.save_interval=3"))
    wait_for_iteration(tiny / "run", 8)
    job.kill()
    job.communicate()
    last = max(losses(tiny / "run"))
    target = f"training.train_iters={last + 3}"
    code, output = run(command(tiny, 1, *LONG[1:], target))
    assert code == 0 and "resumed from" in output
    assert run(command(tiny, 1, *LONG[1:], target, f"run.directory={tiny}/whole"))[0] == 0
    assert losses(tiny / "run") == losses(tiny / "whole")


def test_K01_a_cold_compile_cache_shared_by_two_ranks(tiny: Path) -> None:
    fused = ["transformer.bias_dropout_fusion=compile", "transformer.persist_layer_norm=compile", "training.train_iters=2"]
    code, output = run(command(tiny, 2, *fused), TORCHINDUCTOR_CACHE_DIR=str(tiny / "inductor"), timeout=200)
    assert code == 0, output


def test_L09_a_build_that_was_killed_does_not_stop_the_next_one(tiny: Path) -> None:
    cache = tiny / "inductor"
    places = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(tiny / "triton")}
    fused = command(tiny, 1, "transformer.bias_dropout_fusion=compile", "training.train_iters=2")
    killed = start(fused, **places)
    deadline = time.time() + 100
    while not list(cache.rglob("*.lock")) and killed.poll() is None and time.time() < deadline:
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    left = list(cache.rglob("*.lock"))
    assert left, "nothing was being built"
    for lock in left:  # and older ones, of whatever was being built
        lock.touch()
    code, output = run(fused, **places)
    assert code == 0, output


SLOW_WANDB = """
import time
def init(**kwargs):
    time.sleep(kwargs["settings"]["init_timeout"])
    raise TimeoutError("no answer")
"""


def test_G08_a_slow_start_of_wandb_ends_no_job(tiny: Path) -> None:
    (tiny / "wandb.py").write_text(SLOW_WANDB)
    options = ["logging.wandb.mode=online", "training.train_iters=2", "parallel.timeout_seconds=16"]
    code, output = run(command(tiny, 2, *options), PYTHONPATH=str(tiny))
    assert code == 0 and output.count("wandb is off: TimeoutError: no answer") == 1, output


def test_G07_one_offline_wandb_directory_or_a_warning(tiny: Path) -> None:
    code, output = run(command(tiny, 2, "logging.wandb.mode=offline", "training.train_iters=2"))
    assert code == 0
    folders = list((tiny / "run").glob("wandb/offline-run-*"))
    assert len(folders) == 1 or (not folders and output.count("wandb is off") == 1)


def test_generate_continues_a_prompt_from_a_run(tiny: Path) -> None:
    from trainer.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["abc abd"], 301)
    tokenizer.save(str(tiny / "tokenizer.json"))
    write_tokens(tiny / "data", [tokenizer.encode("abc abd " * 40).ids for _ in range(8)])
    assert (
        run(
            command(
                tiny, 2, f"data.tokenizer={tiny}/tokenizer.json", "training.train_iters=40", "optimizer.learning_rate=3e-3"
            )
        )[0]
        == 0
    )
    args = [
        sys.executable,
        "scripts/generate.py",
        str(tiny / "run"),
        "--prompt",
        "abc a",
        "--temperature",
        "0",
        "--max-new-tokens",
        "6",
    ]
    (code, first), (_, second) = run(args), run(args)
    assert code == 0 and first == second and "abc ab" in first
    code, output = run([sys.executable, "scripts/generate.py", str(tiny / "nothing")])
    assert code == 2 and "neither a checkpoint nor a run folder" in output
