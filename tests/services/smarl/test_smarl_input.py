"""Bad input of a SMARL run: each is refused before anything starts, with the field, the value and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services import SMARLTrainer
from services.config import ConfigError, SMARLConfig, parse_config
from services.smarl.blueprint import exploration_at

HERE = Path(__file__)


def nan_reward(num_agents: int) -> Any:
    """An environment whose second step pays NaN to agent 1."""
    return _Broken(num_agents)


def one_number(rewards: np.ndarray) -> float:
    return 1.0


class _Broken:
    """A PettingZoo parallel environment, as far as it is looked at."""

    def __init__(self, num_agents: int) -> None:
        from gymnasium.spaces import Box, Discrete

        self.possible_agents = [f"agent_{k}" for k in range(num_agents)]
        self.agents = list(self.possible_agents)
        self._observation, self._action = Box(-1, 1, (2,)), Discrete(2)

    def observation_space(self, agent: str) -> Any:
        return self._observation

    def action_space(self, agent: str) -> Any:
        return self._action

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self._step = 0
        self.agents = list(self.possible_agents)
        return {a: np.zeros(2, np.float32) for a in self.agents}, {a: {} for a in self.agents}

    def step(self, actions: Any) -> Any:
        self._step += 1
        rewards = {a: np.nan if self._step == 2 and a == "agent_1" else 0.0 for a in self.agents}
        flags = dict.fromkeys(self.agents, False)
        seen = {a: np.zeros(2, np.float32) for a in self.agents}
        return seen, rewards, flags, flags, {a: {} for a in self.agents}

    def close(self) -> None:
        pass


def make(**changes: Any) -> SMARLTrainer:
    return SMARLTrainer(**{"environment": "ball_grid", "agents": 3, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"environment": "simple_spread", "agents": 1},
            "agents: 1 agent has nobody to aim at; .* at least 2",
        ),
        ({"agents": 0}, "0 agents from episode 0 on: there must be at least 1"),
        ({"agents": {0: 3, 50: 0}}, "0 agents from episode 50 on"),
        ({"agents": {5: 3}}, "must say how many agents there are at episode 0"),
        ({"agents": {0: 3, 9: 40}}, "environment with 40 agents: .*cells"),
        ({"environment": "ball_gird"}, "did you mean 'ball_grid'"),
        (
            {"environment": {"name": "ball_grid", "options": {"sise": 4}}},
            "no option 'sise'; did you mean 'size'",
        ),
        ({"environment": "gymnasium:Pendulum-v1"}, "has a single agent, but num_agents is 3"),
        ({"environment": f"{HERE}:missing"}, "environment.name: .* has no 'missing'"),
        ({"environment": "mpe2.simple_tag_v3:parallel_env", "agents": 4}, "'adversary_0'.*'agent_0'"),
        ({"sequence_reward": "no_such_module:f"}, "sequence_reward: .*no module 'no_such_module'"),
        (
            {"args": {"batch_size": 300, "replay_capacity": 200}},
            "args.batch_size: 300 exceeds replay_capacity=200",
        ),
        ({"args": {"sync_interval": 0}}, "args.sync_interval: 0 is not accepted.*at least 1"),
        ({"args": {"target_interval": 0}}, "args.target_interval: 0 is not accepted"),
        ({"args": {"tau": 0}}, "args.tau: 0 is not accepted.*greater than 0, at most 1"),
        ({"args": {"tau": 1.5}}, "args.tau: 1.5 is not accepted"),
        ({"args": {"taw": 0.1}}, "args.taw: unknown key; did you mean `args.tau`"),
        ({"args": {"hidden_sizes": []}}, "args.hidden_sizes"),
        ({"args": {"memory_resolution": 0}}, "args.memory_resolution: 0 is not accepted"),
    ],
)
def test_bad_settings_are_refused_before_a_start(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changes)


def test_everything_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make(args={"tau": 0, "discount": 2, "colour": 1}, workers={"rollout_steps": 0})
    assert len(caught.value.problems) == 4


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"environment": {"name": f"{HERE}:nan_reward"}},
            "agent 1, step 2: the reward is nan; it must be finite",
        ),
        (
            {"sequence_reward": f"{HERE}:one_number"},
            "sequence_reward one_number must return .* finite numbers",
        ),
    ],
)
def test_what_shows_only_while_playing_stops_the_run_with_its_place(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    small = {"num_episodes": 2, "max_episode_steps": 5}
    with (
        make(args=small, output_dir=str(tmp_path), run_name="run", **changes) as run,
        pytest.raises(Exception, match=message) as caught,
    ):
        run.train()
    assert "--resume" in "".join(caught.value.__notes__) or "checkpoint" in "".join(caught.value.__notes__)


def test_the_defaults_are_those_of_the_seeds_table() -> None:
    args = SMARLConfig()
    assert (args.discount, args.tau, args.learning_rate, args.batch_size) == (0.95, 0.01, 0.001, 256)
    assert (args.sync_interval, args.target_interval, args.replay) == (100, 25, "per_agent")
    assert (args.central_init, args.target_sync_interval, args.sync_order) == ("random", None, "agent")


def test_a_schedule_in_a_file_has_text_keys_or_numbers() -> None:
    config = parse_config({"algorithm": "smarl", "environment": "ball_grid", "agents": {"400": 2, "0": 3}})
    assert config.schedule == {0: 3, 400: 2}  # type: ignore[attr-defined]


def test_exploration_decays_linearly_to_its_end() -> None:
    args = SMARLConfig(
        num_episodes=100, exploration_noise=0.4, exploration_noise_end=0.2, exploration_epsilon=0.1,
        exploration_epsilon_end=0.0, exploration_decay_episodes=10,
    )  # fmt: skip
    assert [exploration_at(args, e).noise for e in (0, 5, 10, 99)] == pytest.approx([0.4, 0.3, 0.2, 0.2])
    assert exploration_at(args, 5).epsilon == pytest.approx(0.05)
    default = SMARLConfig(num_episodes=100)
    assert exploration_at(default, 50).noise == pytest.approx(default.exploration_noise_end)
