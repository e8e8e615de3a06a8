"""How a process of a job starts and ends: one message for a user's mistake, one exit code, no rank left waiting."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from configs.load import LoadedConfig, load_config
from configs.section import ConfigError
from fusions.registry import FusionError
from trainer.errors import UserError

USER_ERROR, FAILURE = 2, 1  # exit codes
# torchrun ends all ranks as soon as one has left, so the others give local rank 0 time to tell what all of them found.
_WAIT_SECONDS = 5
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "connection was closed", "Broken pipe")


def load_for_job(path: str, overrides: list[str]) -> LoadedConfig:
    """The configuration, checked against the number of processes started. Exits with code 2 on any problem."""
    try:
        return load_config(path, overrides, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(error, file=sys.stderr, flush=True)
        else:
            time.sleep(_WAIT_SECONDS)
        raise SystemExit(USER_ERROR) from None


def run_job(job: Callable[[], None]) -> int:
    """Run `job` and return the process's exit code; whatever happens is said once, with the rank it happened on.

    A mistake that all ranks find alike is told by local rank 0: another rank waits long enough for the launcher to end it,
    and speaks only if rank 0 did not fail too.
    """
    rank, local_rank = os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK", "0")
    try:
        job()
        _leave()
        code = 0
    except (UserError, ConfigError, FusionError, FloatingPointError, OSError) as error:  # OSError: disk full, no permission…
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher must be able to end this rank while it waits
        if local_rank != "0":
            time.sleep(_WAIT_SECONDS)
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        code = USER_ERROR
    except SystemExit as error:
        print(f"rank {rank}: left the job before its end (exit code {error.code})", file=sys.stderr, flush=True)
        code = FAILURE
    except Exception as error:  # every failure has to end this process, or the other ranks wait for it
        if any(words in str(error) for words in LOST_PEER):
            time.sleep(1)  # let the rank that failed be heard first
            print(f"rank {rank}: stopped, because another rank left the job: {error}", file=sys.stderr, flush=True)
        else:
            print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        code = FAILURE
    # Not a normal exit. After a failure, tearing the process group down would wait for ranks that wait for us. After a success, a
    # thread of gloo may still be there when the interpreter takes its objects apart, and that aborts a finished job (seen once:
    # "terminate called without an active exception").
    if code == 0 and os.environ.get("WORLD_SIZE", "1") == "1":
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave() -> None:
    from trainer.meshes import stop_processes

    stop_processes()
