"""The settings of SMARL: hyper-parameters with the seed's defaults (its table 1), and the run around them.

Help texts stand here and nowhere else.  This module must not make an environment or open a file.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic.config import JsonDict

from services.config.base import ConfigModel
from services.config.common import CommonRun
from services.config.placement import TeamPlacementConfig

_CALLABLE: JsonDict = {"accepts": "`package.module:function`, `path/to/file.py:function` or null"}


class SMARLConfig(ConfigModel):
    """SMARL: agents with DDPG networks of their own around a central one, and a target network for all."""

    algorithm: ClassVar[str] = "smarl"

    num_episodes: int = Field(default=1000, ge=1, description="Episodes to train for (E_max).")
    max_episode_steps: int = Field(default=100, ge=1, description="Longest episode, in steps (S_max).")
    discount: float = Field(default=0.95, ge=0, le=1, description="Gamma of the TD targets.")
    learning_rate: float = Field(default=1e-3, ge=0, description="Adam learning rate of every network.")
    actor_learning_rate: float | None = Field(
        default=None, ge=0, description="That of the actors; null: `learning_rate`."
    )
    critic_learning_rate: float | None = Field(
        default=None, ge=0, description="That of the critics; null: `learning_rate`."
    )
    target_learning_rate: float | None = Field(
        default=None, ge=0, description="That of the target network; null: `learning_rate`."
    )
    batch_size: int = Field(default=256, ge=1, description="Transitions in a minibatch (B_DDPG).")
    learning_starts: int | None = Field(
        default=None,
        ge=1,
        description="Transitions in an agent's replay before its first gradient step; null: `batch_size`.",
    )
    hidden_sizes: list[int] = Field(
        default=[64, 64], min_length=1, description="Hidden layers of actors and critics."
    )
    replay: Literal["per_agent", "shared"] = Field(
        default="per_agent",
        description="What an agent samples: `per_agent` its own transitions, `shared` those of all agents.",
    )
    replay_capacity: int = Field(
        default=100_000, ge=1, description="Transitions in replay (`per_agent`: of each agent)."
    )
    central_network: bool = Field(
        default=True, description="Sync with the centre; false: independent agents."
    )
    central_init: Literal["random", "agent_0"] = Field(
        default="random", description="The central network starts at random, or as a copy of agent 0."
    )
    tau: float = Field(default=0.01, gt=0, le=1, description="Share of the new in every soft update.")
    sync_interval: int = Field(
        default=100,
        ge=1,
        description="Steps between two soft updates with the centre, from an episode's start.",
    )
    target_sync_interval: int | None = Field(
        default=None, ge=1, description="The same for the DDPG target networks; null: `sync_interval`."
    )
    sync_order: Literal["agent", "arrival"] = Field(
        default="agent",
        description="Order of the agents' soft updates with the centre; `arrival` is not deterministic.",
    )
    common_policy: Literal["learned", "random"] = Field(
        default="learned", description="Common actions: of the action networks, or random (an ablation)."
    )
    target_policy: Literal["learned", "random"] = Field(
        default="learned", description="Individual actions: of the target network, or random (an ablation)."
    )
    target_interval: int = Field(
        default=25, ge=1, description="Episodes between two trainings of the target network."
    )
    target_epochs: int = Field(
        default=10, ge=1, description="Passes over the set M in one training of the target network."
    )
    target_batch_size: int = Field(default=256, ge=1, description="Observations in a minibatch of it.")
    target_hidden_size: int = Field(default=64, ge=1, description="Width of the target network.")
    target_attention: Literal["additive", "dot"] = Field(
        default="additive", description="How the target network's decoder scores what the encoder read."
    )
    target_temperature: float = Field(
        default=1.0, gt=0, description="Temperature at which individual actions are sampled while training."
    )
    memory_capacity: int = Field(
        default=100_000, ge=1, description="Steps in the target network's memory, for each number of agents."
    )
    memory_resolution: float | None = Field(
        default=None,
        gt=0,
        description="Observations closer than this count as equal; null: exactly equal ones.",
    )
    exploration_noise: float = Field(
        default=0.2, ge=0, description="Gaussian noise on continuous actions, in halves of their range."
    )
    exploration_noise_end: float = Field(default=0.05, ge=0, description="The same after the decay.")
    exploration_epsilon: float = Field(
        default=0.2, ge=0, le=1, description="Probability of a random discrete action."
    )
    exploration_epsilon_end: float = Field(default=0.02, ge=0, le=1, description="The same after the decay.")
    exploration_temperature: float = Field(
        default=1.0, gt=0, description="Temperature of the softmax that discrete actions are sampled from."
    )
    exploration_decay_episodes: int | None = Field(
        default=None, ge=1, description="Episodes of linear decay; null: half of `num_episodes`."
    )
    relaxation_temperature: float = Field(
        default=1.0,
        gt=0,
        description="Temperature of the straight-through Gumbel-softmax of discrete actions.",
    )
    eval_interval: int = Field(default=100, ge=0, description="Episodes between two evaluations; 0: none.")
    eval_episodes: int = Field(
        default=10, ge=1, description="Episodes of one evaluation, without exploration."
    )

    @field_validator("hidden_sizes")
    @classmethod
    def _positive(cls, sizes: list[int]) -> list[int]:
        if any(size < 1 for size in sizes):
            raise ValueError(f"{sizes}: every hidden layer needs at least one unit")
        return sizes

    def inconsistencies(self) -> list[tuple[str, str]]:
        found = []
        if self.batch_size > self.replay_capacity:
            found.append(
                (
                    "batch_size",
                    f"{self.batch_size} exceeds replay_capacity={self.replay_capacity}; lower it",
                )
            )
        if self.learning_starts is not None and self.learning_starts > self.replay_capacity:
            found.append(
                (
                    "learning_starts",
                    f"{self.learning_starts} exceeds replay_capacity={self.replay_capacity}: it would never begin",
                )
            )
        if self.exploration_noise_end > self.exploration_noise:
            found.append(("exploration_noise_end", "exceeds exploration_noise: noise decays"))
        if self.exploration_epsilon_end > self.exploration_epsilon:
            found.append(("exploration_epsilon_end", "exceeds exploration_epsilon: it decays"))
        return found


class EnvironmentConfig(ConfigModel):
    """The environment, and what of it is whose. A plain text instead of this section means its `name`."""

    name: str = Field(
        min_length=1,
        description="`ball_grid`, `simple_spread`, `gymnasium:<id>`, a name registered with RLlib, or a function that "
        "returns a PettingZoo parallel environment or an RLlib MultiAgentEnv.",
        examples=["ball_grid"],
        json_schema_extra={"accepts": "name, `package.module:function` or `path/to/file.py:function`"},
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Passed to the environment.",
        json_schema_extra={"accepts": "keys and values that the environment knows"},
    )
    individual_observation: str | None = Field(
        default=None,
        description="Hook: an agent's individual observation; null: its whole observation.",
        json_schema_extra=_CALLABLE,
    )
    universal_observation: str | None = Field(
        default=None,
        description="Hook: an agent's element of the universal observation; null: its whole observation.",
        json_schema_extra=_CALLABLE,
    )
    compose_action: str | None = Field(
        default=None,
        description="Hook: the executed action of a common and an individual one; null: the common one alone.",
        json_schema_extra=_CALLABLE,
    )
    common_space: str | None = Field(
        default=None,
        description="Hook: returns the CommonSpace; null: the agents' action space.",
        json_schema_extra=_CALLABLE,
    )
    targets_are_agents: bool = Field(
        default=True,
        description="Whether individual action j means agent j; false where it is something else, say a landmark.",
    )
    target_mask: str | None = Field(
        default=None,
        description="Hook: which individual actions may be chosen; null: every other agent.",
        json_schema_extra=_CALLABLE,
    )


class WorkersConfig(ConfigModel):
    """How a run spreads over processes; none of it changes what a given set of transitions teaches."""

    agents_per_worker: int | None = Field(
        default=None, ge=1, description="Agents in one DDPG worker; null: all of them in one."
    )
    num_env_runners: int = Field(default=1, ge=1, description="Processes that play episodes.")
    envs_per_runner: int = Field(
        default=1,
        ge=1,
        description="Episodes that one of them plays side by side; a step of them all is one gradient step.",
    )
    rollout_steps: int = Field(
        default=1,
        ge=1,
        description="Steps played between two visits to the workers, who then take as many gradient steps; 1 is the "
        "seed's loop, more is faster and acts with parameters that are up to so many steps old.",
    )
    cpus_per_actor: float = Field(default=0.1, ge=0, description="CPUs that each process reserves.")
    timeout_s: float = Field(default=300, gt=0, description="Longest wait for any of them, in seconds.")


class SMARLRunConfig(CommonRun):
    """A whole run of SMARL. Relative paths start from the folder in which the command is run."""

    algorithm: Literal["smarl"] = Field(
        description="`smarl`: DDPG agents, a central network and a target network.", examples=["smarl"]
    )
    environment: EnvironmentConfig = Field(
        description="Where the agents act.",
        json_schema_extra={"accepts": "text (the `name`) or section of settings"},
    )
    agents: int | dict[int, int] = Field(
        default=3,
        description="How many agents there are; or how many from which episode on, such as {0: 3, 200: 5, 400: 2}.",
        json_schema_extra={"accepts": "whole number, at least 1, or episodes with whole numbers"},
    )
    sequence_reward: str | None = Field(
        default=None,
        description="Makes R^seq [n] of the agents' rewards [n, N] at n steps; null: their mean.",
        json_schema_extra=_CALLABLE,
    )
    args: SMARLConfig = Field(default=SMARLConfig(), description="The algorithm's settings.")
    workers: WorkersConfig = Field(default=WorkersConfig(), description="How the run spreads over processes.")
    placement: TeamPlacementConfig = Field(
        default=TeamPlacementConfig(), description="Nodes and resources of the processes."
    )
    checkpoint_interval: int = Field(
        default=100, ge=0, description="Episodes between two checkpoints; 0: only at the end."
    )

    @field_validator("args", "workers", "placement", mode="before")
    @classmethod
    def _empty_section(cls, value: Any) -> Any:
        return {} if value is None else value

    @field_validator("environment", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("agents")
    @classmethod
    def _schedule(cls, value: int | dict[int, int]) -> int | dict[int, int]:
        counts = {0: value} if isinstance(value, int) else value
        if 0 not in counts:
            raise ValueError(f"{value}: must say how many agents there are at episode 0")
        for episode, count in counts.items():
            if episode < 0:
                raise ValueError(f"episode {episode} does not exist; episodes are counted from 0")
            if count < 1:
                raise ValueError(f"{count} agents from episode {episode} on: there must be at least 1")
        return value

    @property
    def schedule(self) -> dict[int, int]:
        """From which episode on -> how many agents, in order."""
        counts = {0: self.agents} if isinstance(self.agents, int) else self.agents
        return dict(sorted(counts.items()))

    def inconsistencies(self) -> list[tuple[str, str]]:
        if self.placement.strategy == "per_agent_node" and self.workers.agents_per_worker != 1:
            return [
                (
                    "placement",
                    "strategy=per_agent_node puts every agent on another node, but workers.agents_per_worker="
                    f"{self.workers.agents_per_worker} keeps several in one process: set it to 1",
                )
            ]
        return []
