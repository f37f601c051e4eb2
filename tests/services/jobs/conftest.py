"""A head node of their own for these tests, and a project to submit from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.services.jobs.head_node import Head, running_head

CONFIG = {
    "algorithm": "smarl",
    "environment": {"name": "my_code.py:make", "options": {"size": 4}},
    "agents": 3,
    "args": {
        "num_episodes": 8, "max_episode_steps": 10, "batch_size": 16, "hidden_sizes": [16], "target_hidden_size": 16,
        "target_interval": 4, "sync_interval": 4, "eval_interval": 0,
    },
    "workers": {"envs_per_runner": 2, "rollout_steps": 5},
    "checkpoint_interval": 0,
}  # fmt: skip

CODE = """
import time
from pathlib import Path

from actors.environments.ball_grid import BallGrid

def make(num_agents, num_envs, **options):
    left = [str(path) for path in (Path("runs"), Path("secret.txt"), Path("notes.md")) if path.exists()]
    if left:
        raise RuntimeError(f"{left} should have stayed at home")
    return BallGrid(num_agents=num_agents, num_envs=num_envs, **options)

def broken(**_):
    raise RuntimeError("the ball has been eaten by a dog")

class Slow(BallGrid):
    def step(self, *actions):
        time.sleep(2)
        return super().step(*actions)

def slow(num_agents, num_envs, **options):
    return Slow(num_agents=num_agents, num_envs=num_envs, **options)
"""


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    with running_head() as running:
        yield running


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A working directory with a configuration and the code that it names, and with what is to stay there."""
    folder = tmp_path / "project"
    (folder / "runs" / "old").mkdir(parents=True)
    (folder / "runs" / "old" / "config.yaml").write_text("left here")
    (folder / "secret.txt").write_text("left here")
    (folder / "notes.md").write_text("left here")
    (folder / ".gitignore").write_text("secret.txt\n")
    (folder / "my_code.py").write_text(CODE)
    (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, "output_dir": str(tmp_path / "out")}))
    return folder
