"""A group of worker processes as the conductor sees it: started by torchrun, asked over a socket, stopped while idle.

One JSON object per line and direction; nothing that comes over the socket is ever executed. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

_START_SECONDS = 300


class GroupDied(Exception):
    """The processes ended in the middle of a request; the text says why, as far as they could tell."""


class WorkerGroup:
    """Processes that can run some of a comparison's arms."""

    def __init__(self, plan_path: str, arm: str, count: int, environment: dict[str, str]):
        self.plan_path, self.arm, self.count, self.environment = plan_path, arm, count, environment
        self.process: subprocess.Popen[bytes] | None = None
        self.pids: list[int] = []
        self.facts: dict[str, Any] = {}
        self._stream: IO[str] | None = None
        self._paused = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def running(self) -> bool:
        """Whether the processes are there."""
        return self._stream is not None

    def start(self) -> None:
        """Start the processes and wait until they listen. Raises GroupDied."""
        self._folder = tempfile.TemporaryDirectory(prefix="fuseline-")
        address = os.path.join(self._folder.name, "socket")
        # torch's warnings about profiling tell a comparison's reader nothing; NCCL's monitor would end stopped processes.
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99", "TORCH_NCCL_ENABLE_MONITORING": "0"}
        environment = os.environ | quiet | self.environment
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.count)]
        if self.count == 1:
            launcher = [sys.executable]  # one process needs no launcher, and starts sooner
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen(1)
            server.settimeout(0.2)
            command = [*launcher, "-m", "trainer.compare.worker", self.plan_path, self.arm, self._folder.name]
            with open(os.path.join(self._folder.name, "stderr"), "wb") as stderr:
                self.process = subprocess.Popen(command, env=environment, stderr=stderr)
            self._stream = self._accept(server)
        self.facts = self._receive()
        self.pids = self.facts["pids"]

    def _accept(self, server: socket.socket) -> IO[str]:
        assert self.process is not None
        for _ in range(int(_START_SECONDS / 0.2)):
            try:
                connection, _ = server.accept()
            except TimeoutError:
                if self.process.poll() is not None:
                    raise GroupDied(self._reason()) from None
                continue
            connection.settimeout(None)
            return connection.makefile("rw")
        raise GroupDied(f"the processes did not start within {_START_SECONDS} s")

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have all ranks do something; rank 0's answer. Raises GroupDied, after which the group can be started again."""
        if not self.running:
            self.start()
        self.resume()
        assert self._stream is not None
        try:
            self._stream.write(json.dumps({"do": do, **arguments}) + "\n")
            self._stream.flush()
        except OSError:
            raise GroupDied(self._reason()) from None
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._stream is not None
        try:
            line = self._stream.readline()
        except OSError:
            line = ""
        if not line:
            raise GroupDied(self._reason())
        return json.loads(line)

    def pause(self) -> None:
        """Stop the processes until they are needed: their threads poll, and would take time from the others."""
        self._signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """Let them go on."""
        if self._paused:
            self._signal(signal.SIGCONT)
        self._paused = False

    def stop(self) -> None:
        """End the processes."""
        self.resume()
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()  # the workers read the end of the stream, and leave
        if self.process is not None:
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self.process.kill()
                self.process.wait()
        self._forget()

    def _reason(self) -> str:
        """What the ranks wrote down before they ended, or how the processes ended."""
        assert self.process is not None and self._folder is not None
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.kill()
            code = self.process.wait()
        folder = Path(self._folder.name)
        told = [file.read_text() for file in sorted(folder.glob("rank*.txt"))]
        last_words = "\n".join(folder.joinpath("stderr").read_text(errors="replace").strip().splitlines()[-5:])
        self._forget()
        first = [text for text in told if not text.startswith("lost")] or told
        if first:
            return first[0].strip()
        signals = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"a process ended without a word ({signals}); out of memory, perhaps\n{last_words}".strip()

    def _forget(self) -> None:
        self._stream = self.process = None
        self.pids, self._paused = [], False
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
