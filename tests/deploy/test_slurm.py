"""The SLURM script: linted, and run with stand-ins for SLURM's commands, once with real Ray nodes on this machine."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.deploy.command_lines import BIN, ROOT, commands, tool, understand

SCRIPT = ROOT / "deploy/slurm/greenroom.sbatch"
BASH = "#!/usr/bin/env bash\n"
SRUN = BASH + 'echo "$*" >> calls\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
HOSTS = BASH + "printf '%s\\n' node1 node2\n"
RAY = f"""{BASH}[[ $* == *--head* ]] || exec sleep 600
exec {BIN / "python"} -c '
import socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(600)
' "$(sed 's/.*--port=\\([0-9]*\\).*/\\1/' <<< "$*")"
"""
"""Its head listens, and that is all."""
TELLS = BASH + 'echo "greenroom $* at $RAY_ADDRESS, $RAY_AUTH_MODE of ${#RAY_AUTH_TOKEN}"\nexit 7\n'
COUNTS = f"""#!{BIN / "python"}
import ray
ray.init(log_to_driver=False)
print(sum(node["Alive"] for node in ray.nodes()), "real nodes")
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder in which jobs are submitted; its .venv holds stand-ins."""
    put(tmp_path, srun=SRUN, scontrol=HOSTS, ray=RAY, greenroom=TELLS)
    put(tmp_path, python=BASH + "exit 0\n")  # finds that all nodes are there
    return tmp_path


def put(site: Path, **programs: str) -> None:
    folder = site / ".venv/bin"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def submit(site: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    """Run the script as a job of two nodes."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "SLURM_"))}
    job = {
        "PATH": f"{site / '.venv/bin'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(site),
        "SLURM_JOB_ID": str(free_job()),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "1",
        "GREENROOM_HEAD_IP": "127.0.0.1",
    }
    return subprocess.Popen(
        ["bash", SCRIPT, *arguments],
        cwd=site,
        env={**kept, **job, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_job() -> int:
    """A job whose port is free."""
    while True:
        job = random.randrange(10_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 20_000 + job)):
                return job


def test_the_linter_finds_nothing() -> None:
    linted = subprocess.run(
        [tool("shellcheck"), SCRIPT, ROOT / "deploy/docker/path.sh"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (linted.stdout, linted.returncode) == ("", 0)


def test_ray_understands_the_commands_that_start_it() -> None:
    text = re.sub(r'"[^"\n]*\$[^"\n]*"|\$\(\([^)]*\)\)', "1", SCRIPT.read_text().replace("\\\n", " "))
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("srun ")]
    found = [words[words.index("ray") :] for [words] in (commands(line, "srun") for line in lines)]

    assert [words[:2] for words in found] == [["ray", "start"]] * 2
    for words in found:
        understand(words)


def test_a_run_gets_its_arguments_and_the_jobs_own_cluster_and_its_status_is_the_jobs(site: Path) -> None:
    job = submit(site, "run.yaml", "output_dir=/shared runs")
    printed, _ = job.communicate(timeout=60)

    assert job.returncode == 7, printed
    told = r"greenroom train run\.yaml output_dir=/shared runs at 127\.0\.0\.1:2\d{4}, token of 64"
    assert re.search(told, printed)
    head, workers, *_ = (site / "calls").read_text().splitlines()
    assert head.startswith("--nodes=1 --ntasks=1 --nodelist=node1 ray start --head")
    assert workers.startswith("--nodes=1 --ntasks=1 --exclude=node1 ray start --block")


def test_the_token_is_in_no_command(site: Path) -> None:
    put(site, greenroom=BASH + 'grep -c "$RAY_AUTH_TOKEN" calls\nexit 0\n')

    job = submit(site, "run.yaml")
    printed, _ = job.communicate(timeout=60)

    assert job.returncode == 0
    assert "\n0\n" in printed


def test_the_runs_time_being_up_it_is_told_and_waited_for(site: Path) -> None:
    put(
        site,
        greenroom=BASH
        + "trap 'sleep 2; echo a checkpoint; exit 130' TERM\ntouch runs\nsleep 60 > /dev/null 2>&1 & wait\n",
    )

    job = submit(site, "run.yaml")
    end = time.monotonic() + 60
    while not (site / "runs").exists() and time.monotonic() < end:
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    printed, _ = job.communicate(timeout=60)

    assert "a checkpoint" in printed
    assert job.returncode == 130


def test_a_node_whose_ray_ends_ends_the_job_at_once(site: Path) -> None:
    put(site, ray=BASH + "echo no room for me\nexit 1\n")

    job = submit(site, "run.yaml")
    printed, _ = job.communicate(timeout=60)

    assert job.returncode == 1
    assert "no room for me" in printed
    assert "Ray has ended on a node" in printed
    assert "greenroom train" not in printed


def test_nodes_that_do_not_come_together_in_time_end_the_job(site: Path) -> None:
    put(site, python=BASH + "exec sleep 60\n")

    job = submit(site, "run.yaml", GREENROOM_START_S="3")
    printed, _ = job.communicate(timeout=60)

    assert job.returncode == 1
    assert "after 3 s (GREENROOM_START_S) the nodes are not together" in printed


@pytest.mark.ray
@pytest.mark.slow
def test_real_ray_nodes_come_together_and_leave_nothing_behind(site: Path) -> None:
    for name in ("ray", "python"):
        put(site, **{name: f'{BASH}exec {BIN / name} "$@"\n'})
    put(site, greenroom=COUNTS)

    job = submit(site, "run.yaml", GREENROOM_HEAD_IP="", GREENROOM_START_S="120")
    printed, _ = job.communicate(timeout=200)

    assert job.returncode == 0, printed
    assert "2 real nodes" in printed
    temp = re.search(r"--temp-dir=(\S+)", (site / "calls").read_text())
    assert temp is not None
    assert not Path(temp[1]).exists()
