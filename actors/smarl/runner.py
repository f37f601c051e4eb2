"""An environment runner: plays episodes of a team in several environment copies side by side.

Owns environment copies and acting in them.  Learns nothing: actor rows come with every call, the target network's
weights when they have changed.  Noise follows from counters (`learners.smarl.random_streams`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from actors.environments.hooks import Hooks
from actors.environments.registry import make_environment
from actors.environments.team import (
    TeamEnvironment,
    TeamObservation,
    TeamSpace,
)
from actors.smarl.chunk import Chunk, Progress, SequenceChunk, SequenceReward, mean_reward, sequence_rewards
from learners.smarl.common_action import Exploration, exploit, explore, random_actions
from learners.smarl.ddpg import Networks
from learners.smarl.pointer_network import PointerNetwork, gumbel_noise
from learners.smarl.random_streams import Purpose, stream

Policy = Literal["learned", "random"]


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Which environment, by name or as a function that makes it."""

    source: str | Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    hooks: Hooks | None = None

    def make(self, num_agents: int, num_envs: int) -> TeamEnvironment:
        return make_environment(
            self.source, dict(self.options), self.hooks, num_agents=num_agents, num_envs=num_envs
        )


@dataclass(frozen=True, slots=True)
class PointerSpec:
    """Sizes of the target network."""

    universal_size: int
    hidden: int
    attention: Literal["additive", "dot"]

    def build(self) -> PointerNetwork:
        return PointerNetwork(self.universal_size, hidden=self.hidden, attention=self.attention)


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What all runners of a run have in common."""

    environment: EnvironmentSpec
    networks: Networks
    max_steps: int
    """Steps after which an episode is cut off."""
    seed: int
    common_policy: Policy = "learned"
    target_policy: Policy = "learned"
    pointer: PointerSpec | None = None
    """None where the environment takes no individual actions."""
    target_temperature: float = 1.0
    sequence_reward: SequenceReward = mean_reward


class TeamRunner:
    """`num_envs` copies of an environment with `num_agents` agents each."""

    def __init__(self, spec: RunnerSpec, num_agents: int, num_envs: int) -> None:
        torch.set_num_threads(1)
        self._spec = spec
        self._pointer = None if spec.pointer is None else spec.pointer.build().eval()
        self._table = _Table(spec, num_agents, num_envs)

    def ready(self) -> bool:
        return True

    def set_target(self, weights: Mapping[str, np.ndarray]) -> None:
        """Choose individual actions with these weights from now on."""
        assert self._pointer is not None
        self._pointer.load_weights(weights)

    def seat(self, num_agents: int) -> None:
        """From the next episode on, there are `num_agents` agents."""
        self._table.close()
        self._table = _Table(self._spec, num_agents, self._table.env.num_envs)

    def start(self, episodes: Sequence[int]) -> None:
        """Begin `episodes` of the run, one in each copy; fewer than copies leave the rest empty."""
        self._table.start(episodes, Purpose.ENVIRONMENT)

    def collect(
        self, steps: int, how: Exploration, *actor_rows: np.ndarray
    ) -> tuple[Chunk, SequenceChunk | None, Progress]:
        """Play up to `steps` further steps; `actor_rows` [K, P] of consecutive agents, together all of them."""
        return self._table.play(steps, how, np.concatenate(actor_rows), self._pointer)

    def evaluate(
        self, episodes: Sequence[int], num_agents: int, *actor_rows: np.ndarray
    ) -> NDArray[np.float64]:
        """Returns [episodes, N] of fresh episodes without any exploration."""
        rows = np.concatenate(actor_rows)
        rows = np.repeat(rows, num_agents, 0) if len(rows) == 1 else rows
        copies = min(len(episodes), max(1, self._table.env.num_envs))
        table, returns = _Table(self._spec, num_agents, copies), []
        try:
            for start in range(0, len(episodes), copies):
                some = episodes[start : start + copies]
                table.start(some, Purpose.EVALUATION)
                progress = table.play(self._spec.max_steps, None, rows, self._pointer)[2]
                returns.append(progress.returns[: len(some)])
        finally:
            table.close()
        return np.concatenate(returns)


class _Table:
    """Environment copies with a team at each, and where their episodes stand."""

    def __init__(self, spec: RunnerSpec, num_agents: int, num_envs: int) -> None:
        self._spec = spec
        self.env = spec.environment.make(num_agents, num_envs)
        self._space: TeamSpace = self.env.space
        self._observation: TeamObservation | None = None
        self._episodes: list[int] = []
        self._step = 0

    def close(self) -> None:
        self.env.close()

    def start(self, episodes: Sequence[int], purpose: Purpose) -> None:
        empty = self.env.num_envs - len(episodes)
        # An empty copy has to be somewhere; it is over before it begins.
        self._episodes = [*episodes, *[episodes[-1]] * empty]
        seeds = [int(stream(self._spec.seed, purpose, e).integers(2**31)) for e in self._episodes]
        self._observation = self.env.reset(seeds)
        self._step = 0
        shape = (self.env.num_envs, self.env.num_agents)
        self._returns = np.zeros(shape)
        self._lengths = np.zeros(self.env.num_envs, np.int64)
        self._over = np.arange(self.env.num_envs) >= len(episodes)

    def play(
        self, steps: int, how: Exploration | None, actors: np.ndarray, pointer: PointerNetwork | None
    ) -> tuple[Chunk, SequenceChunk | None, Progress]:
        """`steps` further steps, or fewer if all episodes end; `how` None plays without exploration."""
        now = self._observation
        assert now is not None, "start() comes first"
        individual, common, targets, rewards, terminated, alive = [now.individual], [], [], [], [], []
        universal, masks = [], []
        rows = torch.from_numpy(np.array(actors))
        for _ in range(min(steps, self._spec.max_steps - self._step)):
            if self._over.all():
                break
            action = self._common_actions(now, rows, how)
            target = self._targets(now, pointer, how)
            step = self.env.step(action, target)
            common.append(action)
            targets.append(target)
            rewards.append(step.rewards)
            terminated.append(step.terminated)
            alive.append(~self._over)
            universal.append(now.universal)
            masks.append(now.target_mask)
            now = step.observation
            individual.append(now.individual)
            self._count(step.rewards, step.terminated | step.truncated)
        self._observation = now
        living = np.array(alive)
        chunk = Chunk(np.array(individual), np.array(common), np.array(rewards), np.array(terminated), living)
        sequences = None
        if pointer is not None:
            r_seq = sequence_rewards(self._spec.sequence_reward, chunk.rewards[living])
            sequences = SequenceChunk(
                np.array(universal)[living], np.array(targets)[living], r_seq, np.array(masks)[living]
            )
        progress = Progress(
            len(chunk), int(living.sum()), self._returns.copy(), self._lengths.copy(), self._over.copy()
        )
        return chunk, sequences, progress

    def _count(self, rewards: NDArray[np.float32], ended: NDArray[np.bool_]) -> None:
        living = ~self._over
        self._returns += np.where(living[:, None], rewards, 0)
        self._lengths += living
        self._step += 1
        self._over = self._over | ended | (self._step >= self._spec.max_steps)

    def _stream(self, purpose: Purpose) -> np.random.Generator:
        return stream(self._spec.seed, purpose, self._episodes[0], self._step)

    def _common_actions(
        self, now: TeamObservation, rows: torch.Tensor, how: Exploration | None
    ) -> NDArray[np.float32]:
        space, spec = self._space.common, self._spec
        if spec.common_policy == "random":
            return random_actions(space, now.individual.shape[:2], self._stream(Purpose.EXPLORATION))
        inputs = torch.from_numpy(now.individual).transpose(0, 1).to(rows.dtype)
        outputs = spec.networks.actor.forward(rows, inputs).transpose(0, 1).numpy()
        if how is None:
            return exploit(space, outputs)
        return explore(space, outputs, how, self._stream(Purpose.EXPLORATION))

    def _targets(
        self, now: TeamObservation, pointer: PointerNetwork | None, how: Exploration | None
    ) -> NDArray[np.int64]:
        if pointer is None:
            return np.zeros(now.individual.shape[:2], np.int64)
        # A copy whose episode is over may allow no target at all; any will do there.
        mask = now.target_mask | ~now.target_mask.any(-1, keepdims=True)
        noise = gumbel_noise(self._stream(Purpose.TARGETS), mask.shape)
        if self._spec.target_policy == "random":
            anywhere: NDArray[np.int64] = np.where(mask, noise, -np.inf).argmax(-1)
            return anywhere
        with torch.no_grad():
            chosen, _ = pointer.decode(
                torch.from_numpy(now.universal),
                torch.from_numpy(mask),
                temperature=self._spec.target_temperature,
                noise=None if how is None else torch.from_numpy(noise),
            )
        targets: NDArray[np.int64] = chosen.numpy()
        return targets
