"""A real head node with a job server, on free ports and with a token of its own, and what lives on it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

BIN = Path(sys.executable).parent
TOKEN = "0123456789abcdef0123456789abcdef"
RAYS_OWN = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
START_S, CALL_S, END_S = 120, 240, 30


@dataclass(frozen=True)
class Head:
    """A running head node."""

    url: str
    process: psutil.Process
    env: dict[str, str] = field(repr=False)

    def greenroom(self, *arguments: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
        """The command, as a user calls it."""
        return self.call([str(BIN / "greenroom"), *map(str, arguments)], cwd, **env)

    def call(self, command: Sequence[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=cwd,
            env={**self.env, "RAY_API_SERVER_ADDRESS": self.url, **env},
            capture_output=True,
            text=True,
            timeout=CALL_S,
        )

    def listed(self, kind: str) -> list[dict[str, Any]]:
        """Ray's own account of its `kind` of things."""
        command = [
            str(BIN / "ray"),
            "list",
            kind,
            "--address",
            self.url,
            "--format",
            "json",
            "--limit",
            "1000",
        ]
        out = self.call(command, Path("/"), RAY_AUTH_MODE="token").stdout
        entries: list[dict[str, Any]] = json.loads(out)
        return entries

    def left_over(self) -> list[str]:
        """What still lives of runs: their actors, placement groups and processes."""
        found = [f"{a['class_name']} {a['state']}" for a in self.listed("actors") if a["state"] != "DEAD"]
        found += [
            f"group {g['placement_group_id']} {g['state']}"
            for g in self.listed("placement-groups")
            if g["state"] != "REMOVED"
        ]
        for process in self.process.children(recursive=True):
            try:
                words = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if "greenroom" in words or (words.startswith("ray::") and not words.startswith(RAYS_OWN)):
                found.append(f"process {process.pid} {words}")
        return found

    def nothing_left(self, seconds: float = END_S) -> list[str]:
        """What is left over after at most `seconds`; actors and jobs end a moment before their processes do."""
        end = time.monotonic() + seconds
        while (found := self.left_over()) and time.monotonic() < end:
            time.sleep(0.3)
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_head() -> Iterator[Head]:
    """Start a head node, end it."""
    folder = Path(tempfile.mkdtemp(prefix="gr-", dir="/tmp"))  # Ray's sockets allow for no longer path
    port = free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # As a service would start it: by its full path, nothing of it on the PATH.
    env |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "RAY_AUTH_TOKEN": TOKEN}
    # The default port of the agent may be held by another Ray of this machine, and then no job can start.
    agent = f"--dashboard-agent-listen-port={free_port()}"
    ports = ("--port=0", f"--dashboard-port={port}", f"--ray-client-server-port={free_port()}", agent)
    log = folder / "head.log"
    with log.open("w") as output:
        started = subprocess.Popen(
            [
                str(BIN / "ray"), "start", "--head", "--block", *ports, "--include-dashboard=true", "--num-cpus=4",
                f"--temp-dir={folder}", "--object-store-memory=200000000", "--disable-usage-stats",
            ],
            env={**env, "RAY_AUTH_MODE": "token"}, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    process = psutil.Process(started.pid)
    try:
        _wait_for(port, started, log)
        yield Head(f"http://127.0.0.1:{port}", process, env)
    finally:
        _end(process)
        started.wait(END_S)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(port: int, started: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if started.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no head node after {START_S} s: {log.read_text()[-2000:]}") from None
            time.sleep(0.2)


def _end(head: psutil.Process) -> None:
    """End this head node alone; `ray stop` would end every Ray on the machine."""
    family = head.children(recursive=True)
    head.terminate()
    _, alive = psutil.wait_procs([head, *family], timeout=END_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=END_S)
