"""A DDPG agent on its own learns a known task with continuous actions whose bounds are not 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from services import SMARLTrainer
from services.config import SMARLRunConfig, load_config

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

EXAMPLE = Path(__file__).parents[3] / "examples" / "smarl_pendulum.yaml"


def test_a_single_agent_swings_the_pendulum_up(tmp_path: Path) -> None:
    config = load_config(EXAMPLE, [f"output_dir={tmp_path}"])
    assert isinstance(config, SMARLRunConfig)
    with SMARLTrainer.from_config(config) as trainer:
        trainer.train()
        evaluated = trainer.evaluate(episodes=10)
    assert evaluated["num_agents"] == 1
    assert evaluated["return_mean"] > -250  # random torques earn about -1200
