"""Which Ray a run is on: a cluster it is told, one that runs here, or its own; and what is said of one that is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.ray_connection import knock
from tests.services.jobs.head_node import free_port

pytestmark = pytest.mark.timeout(180)

JOIN = """
import logging, ray
logging.basicConfig(level="WARNING", format="%(name)s: %(message)s")
from services.ray_connection import connect
connect()
connect()
print("MARKED", "mark" in ray.cluster_resources(), "AT", ray.get_runtime_context().gcs_address)
"""


@pytest.fixture
def env() -> Iterator[dict[str, str]]:
    """An environment in which Ray keeps its notes in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="gr.", dir="/tmp", ignore_cleanup_errors=True) as folder:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        yield {**kept, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}


def joins(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", JOIN], env=env, capture_output=True, text=True, timeout=120)


def note_of(env: dict[str, str]) -> Path:
    """Where `ray start` writes down its cluster."""
    path = Path(env["RAY_TMPDIR"]) / "ray" / "ray_current_cluster"
    path.parent.mkdir(exist_ok=True)
    return path


@pytest.mark.ray
def test_a_running_cluster_is_joined_and_after_its_death_ray_starts_here(env: dict[str, str]) -> None:
    port = free_port()
    ray = str(Path(sys.executable).parent / "ray")
    head = subprocess.Popen(
        [
            ray, "start", "--head", "--block", "--port", str(port), "--num-cpus=1", "--resources", '{"mark": 1}',
            "--include-dashboard=false", "--object-store-memory=100000000",
        ],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert head.stdout is not None
        for line in head.stdout:
            if "Ray runtime started" in line:
                break
        assert note_of(env).read_text().endswith(f":{port}")
        joined = joins(env)
        assert f"MARKED True AT {note_of(env).read_text()}" in joined.stdout, joined.stderr
        assert "is gone" not in joined.stderr
    finally:
        os.killpg(head.pid, 9)
        head.communicate()
    assert note_of(env).exists()
    alone = joins(env)
    assert "MARKED False" in alone.stdout, alone.stderr
    assert f":{port}, is gone: starting Ray here" in alone.stderr


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_at_which_nobody_listens_is_told_at_once(env: dict[str, str], form: str) -> None:
    address = form.format(free_port())
    done = joins({**env, "RAY_ADDRESS": address})
    assert done.returncode != 0
    told = done.stderr.splitlines()[-1]
    assert f"RAY_ADDRESS={address}: [Errno 111] Connection refused. Start a cluster there" in told


def test_an_address_without_a_port_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="no host and port"):
        knock("head")
    with pytest.raises(ValueError, match="no host and port"):
        knock("ray://:10001")
