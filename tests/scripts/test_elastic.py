"""Two hosts in small: two torchrun agents with a rendezvous between them, of which one loses its worker."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.scripts.test_launch import children_of, command, losses, run, start, wait_for_iteration
from trainer.checkpoint import complete_checkpoints
from trainer.meshes import restart_note

STEPS = 24
JOB = (
    f"training.train_iters={STEPS}",
    "training.micro_batch_size=2",
    "optimizer.schedule=constant",
    "logging.log_interval=1",
    "checkpoint.save_interval=4",
    "parallel.data_sharding=full",
)


STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def agent(config: Path, port: int, *overrides: str) -> subprocess.Popen[str]:
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "two-hosts"]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "3",
    ]
    words = [*launcher, *rendezvous, "--local-addr", "localhost", "scripts/pretrain.py", str(config), *overrides]
    return start(words, **{STORE: "1"})


def ended(process: subprocess.Popen[str], seconds: float) -> str:
    """What a process said until its end. Raises AssertionError with that where it doesn't end in time."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.terminate()
        raise AssertionError(f"still there after {seconds} s: {process.communicate(timeout=60)[0]}") from None


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def test_a_worker_killed_on_one_host_the_job_goes_on_from_the_last_checkpoint(tiny: Path) -> None:
    code, output = run(command(tiny, 1, *JOB[:-1], f"run.directory={tiny}/whole"))
    assert code == 0, output
    overrides, port = ("run.device=cpu", *JOB), free_port()
    agents = [agent(tiny / "tiny.yaml", port, *overrides) for _ in range(2)]
    try:
        wait_for_iteration(tiny / "run", 6, 120)
        os.kill(children_of(agents[1].pid)[0], signal.SIGKILL)
        outputs = [ended(process, 200) for process in agents]
    finally:
        for process in agents:
            process.kill()
    assert [process.returncode for process in agents] == [0, 0], outputs
    assert "resumed from" in "".join(outputs)
    ours, whole = losses(tiny / "run"), losses(tiny / "whole")
    assert set(ours) == set(whole) == set(range(1, STEPS + 1))
    for iteration, loss in whole.items():
        assert ours[iteration] == pytest.approx(loss, rel=1e-5), iteration


def test_scripts_for_clusters_say_what_torchrun_needs() -> None:
    script = (ROOT / "scripts/slurm.sbatch").read_text()
    assert subprocess.run(["bash", "-n", ROOT / "scripts/slurm.sbatch"], check=False).returncode == 0
    assert all(words in script for words in ("--rdzv-backend c10d", "--max-restarts", "--rdzv-id", STORE))
    job = yaml.safe_load((ROOT / "scripts/k8s/pretrain.yaml").read_text())
    claim = yaml.safe_load((ROOT / "scripts/k8s/storage.yaml").read_text())
    spec = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    container = spec["template"]["spec"]["containers"][0]
    assert (job["apiVersion"], job["kind"], container["name"]) == ("kubeflow.org/v1", "PyTorchJob", "pytorch")
    assert spec["restartPolicy"] == "OnFailure" and job["spec"]["elasticPolicy"]["rdzvBackend"] == "c10d"
    assert int(job["spec"]["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {"name": STORE, "value": "1"} in container["env"]
    claims = [
        v["persistentVolumeClaim"]["claimName"] for v in spec["template"]["spec"]["volumes"] if "persistentVolumeClaim" in v
    ]
    assert claims == [claim["metadata"]["name"]] and claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert (ROOT / container["args"][0]).is_file()


SLURM = {
    "scontrol": "echo localhost",
    # As srun: the command on each node, here both on this machine.
    "srun": 'shift; for node in 1 2; do "$@" & echo $! >> "$PIDS"; done; code=0; for p in $(cat "$PIDS"); do wait $p || code=$?; done; exit $code',
    "scancel": '[ "$*" = "--signal=TERM 77.0" ] && kill -TERM $(cat "$PIDS")',
}


@pytest.mark.skipif(not (ROOT / ".venv/bin/activate").is_file(), reason="the script needs the checkout's .venv")
def test_the_slurm_script_trains_on_two_nodes_and_saves_when_its_time_is_up(tiny: Path) -> None:
    for name, text in SLURM.items():
        (tiny / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tiny / name).chmod(0o755)
    environment = {
        "PATH": f"{tiny}:{os.environ['PATH']}", "PIDS": str(tiny / "pids"), "PET_LOCAL_ADDR": "localhost", "RDZV_PORT": str(free_port()),
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "77",
        "PROCESSES_PER_NODE": "1",
    }  # fmt: skip
    job = ["bash", "scripts/slurm.sbatch", str(tiny / "tiny.yaml"), "run.device=cpu", *JOB, "training.train_iters=100000"]
    process = start(job, **environment)
    try:
        wait_for_iteration(tiny / "run", 3, 120)
        process.terminate()
        output = ended(process, 120)
    finally:
        process.kill()
    saved = complete_checkpoints(tiny / "run" / "checkpoints")
    assert saved and "SIGTERM: stopped after iteration" in output, output


@pytest.mark.parametrize(
    ("nodes", "restarts", "shared", "expected"),
    [("2", "3", "True", True), ("1", "3", "True", False), ("2", "0", "True", False), ("2", "3", "False", False)],
)
def test_a_restart_that_may_hang_is_warned_of(
    nodes: str, restarts: str, shared: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", nodes)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in restart_note()) == expected
