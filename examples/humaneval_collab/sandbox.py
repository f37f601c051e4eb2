"""Runs a program that nobody has read, with limits on time, memory, output, files, processes and network.

What holds it: a process and a network namespace of its own (everything in them is killed with them, there is no
network), Landlock (it writes into its own temporary folder only, and reads there and in Python's and the system's
folders), resource limits, an empty environment, no inherited files.  Where a kernel refuses namespaces or Landlock, the
outcome says so: sockets are then blocked for Python code only, and files are guarded by the user's rights alone.
This keeps generated code from doing harm by accident; it is not meant to hold a determined attacker.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_CHILD = Path(__file__).with_name("child.py")
_FIRST_UID, _UIDS = 200_000, 1_000_000
"""Users that own nothing: a program that would run as root becomes one of them, so that limits bind it."""

Status = Literal["done", "failed", "time", "output"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a program.

    status: "done": program and tests ran to their end; "failed": it stopped before (an exception, an exit, a limit on
    memory, CPU or processes); "time": the wall clock limit; "output": it printed more than it may.
    """

    status: Status
    loaded: bool
    """The program itself, before any test, ran to its end."""
    passed: int
    """Assertions that held."""
    failed: int
    output: str
    """The last of what it printed, errors included."""
    own_namespaces: bool
    files_confined: bool


def run_program(
    program: str,
    *,
    tests: str | None = None,
    context: str = "",
    entry_point: str = "",
    wall_s: float = 5.0,
    cpu_s: int = 4,
    memory_mib: int = 512,
    output_kib: int = 64,
    processes: int = 16,
) -> Outcome:
    """Run `program`, then HumanEval's `tests` (which define `check`) on its function `entry_point`.

    `context` is trusted code that the tests may rely on: the problem's own functions.

    Safe to call from several threads at once.
    """
    secret = secrets.token_hex(16)
    uid = _FIRST_UID + secrets.randbelow(_UIDS)
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder:
        if os.geteuid() == 0:
            os.chown(folder, uid, uid)
        job = {
            "program": program,
            "tests": tests,
            "context": context,
            "entry_point": entry_point,
            "secret": secret,
            "report_fd": write_fd,
            "uid": uid,
            "cpu_s": cpu_s,
            "memory_mib": memory_mib,
            "file_kib": output_kib,
            "processes": processes,
        }
        child = subprocess.Popen(
            [sys.executable, "-I", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={},
            pass_fds=[write_fd],
            start_new_session=True,
        )
        os.close(write_fd)
        try:
            status, printed, reported = _watch(
                child, json.dumps(job).encode(), read_fd, wall_s, output_kib * 1024
            )
        finally:
            os.close(read_fd)
            _kill(child)
    return _outcome(status, printed, reported, secret)


def _watch(
    child: subprocess.Popen[bytes], job: bytes, read_fd: int, wall_s: float, output_limit: int
) -> tuple[Status | None, bytes, bytes]:
    """Feed the job, read what comes until all is closed or a limit passes; memory stays bounded whatever is printed."""
    assert child.stdin is not None
    assert child.stdout is not None
    deadline = time.monotonic() + wall_s
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(job)
        child.stdin.close()
    printed, reported = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ, printed)
        selector.register(read_fd, selectors.EVENT_READ, reported)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                return "time", bytes(printed), bytes(reported)
            for key, _ in selector.select(left):
                chunk = os.read(key.fd, 65536)
                key.data.extend(chunk)
                if not chunk:
                    selector.unregister(key.fileobj)
            if len(printed) > output_limit or len(reported) > 4 * 2**20:
                return "output", bytes(printed), bytes(reported)
    return None, bytes(printed), bytes(reported)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """The child's end ends its namespace; without one, the session's processes are killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait(timeout=10)
    assert child.stdout is not None
    child.stdout.close()


def _outcome(status: Status | None, printed: bytes, reported: bytes, secret: str) -> Outcome:
    facts: list[dict[str, Any]] = []
    for line in reported.decode(errors="replace").splitlines():
        start, _, rest = line.partition(" ")
        if start == secret:
            with contextlib.suppress(ValueError):
                facts.append(json.loads(rest))
    events = [fact.get("event") for fact in facts]
    asserts = [bool(fact["passed"]) for fact in facts if fact.get("event") == "assert"]
    start_fact = next((fact for fact in facts if fact.get("event") == "start"), {})
    return Outcome(
        status=status or ("done" if "done" in events else "failed"),
        loaded="loaded" in events,
        passed=sum(asserts),
        failed=len(asserts) - sum(asserts),
        output=printed[-2000:].decode(errors="replace"),
        own_namespaces=bool(start_fact.get("own_namespaces")),
        files_confined=bool(start_fact.get("files_confined")),
    )
