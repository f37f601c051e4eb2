"""A DDPG worker: the networks, replay and gradients of some agents, in one process.

Owns its agents' state between the centre's soft updates.  Knows neither environments nor the target network, and never
talks to another worker: parameters come and go as flat rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from actors.smarl.chunk import Chunk
from learners.smarl.ddpg import DDPGRules, DDPGStack, Networks, StepStats, TransitionBatch
from learners.smarl.random_streams import Purpose, stream
from learners.smarl.replay import Replay

Rows = np.ndarray
"""Flat parameters of consecutive agents [K, P]."""

SHARED_REPLAY_FILE = "replay.safetensors"
METRICS = ("critic_loss", "actor_loss", "actor_gradient_norm", "q_mean")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What all workers of a run have in common."""

    networks: Networks
    rules: DDPGRules
    tau: float
    batch_size: int
    learning_starts: int
    """Transitions in replay before an agent takes its first gradient step."""
    target_sync_interval: int
    """Steps between two moves of the target networks, counted from the episode's start."""
    replay_capacity: int
    shared_replay: bool
    seed: int
    float64: bool = False
    """Double precision, for comparisons with recorded numbers."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.float64 else torch.float32


class DDPGWorker:
    """Agents `identities`, which are numbered `first`, `first + 1`, ... at the moment.

    An identity is an agent's for the whole run; its random streams hang on it.  Its number changes when others leave.
    """

    def __init__(self, spec: WorkerSpec, identities: Sequence[int], actor: Rows, critic: Rows) -> None:
        torch.set_num_threads(1)
        self._spec = spec
        self._identities = list(identities)
        self._first = 0
        self._stack = DDPGStack(spec.networks, spec.rules, self._tensor(actor), self._tensor(critic))
        self._replay = Replay(
            len(self._identities),
            spec.networks.actor.sizes[0],
            spec.networks.space.size,
            capacity=spec.replay_capacity,
            shared=spec.shared_replay,
            dtype=spec.dtype,
        )

    def ready(self) -> bool:
        return True

    def number_from(self, first: int) -> None:
        """The agents' numbers start at `first` now."""
        self._first = first
        self._stack.names = [first + k for k in range(len(self._identities))]

    def learn(
        self, start: int, stop: int, step: int, update: int, *chunks: Chunk
    ) -> tuple[dict[str, np.ndarray], Rows, Rows]:
        """Steps `start` to `stop` of `chunks` (one of each runner): at each, a gradient step, then the step is stored.

        Args:
            step: number of the episodes' step at `start`, from which the target networks' moves are counted.
            update: number of the run's gradient step at `start`; random streams hang on it.

        Returns:
            Metrics, each [updates, K]; the agents' actors and critics.
        """
        spec, stats = self._spec, []
        for offset in range(stop - start):
            taken = self._gradient_step(update + offset)
            if taken is not None:
                stats.append(taken)
                if (step + offset) % spec.target_sync_interval == 0:
                    self._stack.update_targets(spec.tau)
            for chunk in chunks:
                if start + offset < len(chunk):  # a runner whose episodes ended sooner has fewer steps
                    self._store(chunk, start + offset)
        metrics = {
            name: np.array([getattr(s, name).numpy() for s in stats]).reshape(-1, len(self._stack))
            for name in METRICS
        }
        return metrics, *self.parameters()

    def learn_from(self, batch: TransitionBatch, *, update_targets: bool) -> tuple[StepStats, Rows, Rows]:
        """One gradient step on a given minibatch, past the replay."""
        stats = self._stack.update(batch)
        if update_targets:
            self._stack.update_targets(self._spec.tau)
        return stats, *self.parameters()

    def pull(self, actor: Rows, critic: Rows) -> None:
        """Take what the centre made of the agents' parameters; targets, moments and replay stay."""
        self._stack.actor.copy_(self._tensor(actor))
        self._stack.critic.copy_(self._tensor(critic))

    def actor_rows(self) -> Rows:
        """What the runners act with [K, Pa]."""
        rows: Rows = self._stack.actor.numpy().copy()
        return rows

    def parameters(self) -> tuple[Rows, Rows]:
        """The agents' actors [K, Pa] and critics [K, Pc]."""
        return self.actor_rows(), self._stack.critic.numpy().copy()

    def leave(self, indices: Sequence[int]) -> None:
        """The agents at `indices` of this worker are gone."""
        kept = [k for k in range(len(self._identities)) if k not in set(indices)]
        self._identities = [self._identities[k] for k in kept]
        self._stack = self._stack.select(kept)
        self._replay.keep(kept)

    def join(self, identities: Sequence[int], actor: Rows, critic: Rows) -> None:
        """New agents at the end, who start from the rows given, the centre's."""
        self._identities += identities
        self._stack = self._stack.joined_by(self._tensor(actor), self._tensor(critic))
        self._replay.join(len(identities))

    def save(self, folder: str) -> None:
        """Write `agent_<number>.safetensors` of every agent, and the shared replay if there is one.

        Raises:
            OSError: the disk is full or not writable.
        """
        state = self._stack.state()
        for k in range(len(self._identities)):
            arrays = {name: rows[k] for name, rows in state.items()}
            if not self._spec.shared_replay:
                arrays |= {f"replay.{name}": rows for name, rows in self._replay.state(k).items()}
            save_file(_contiguous(arrays), Path(folder) / f"agent_{self._first + k}.safetensors")
        if self._spec.shared_replay and self._first == 0:
            save_file(_contiguous(self._replay.state(0)), Path(folder) / SHARED_REPLAY_FILE)

    def load(self, folder: str) -> None:
        """Continue from what the workers of a run saved, however they shared the agents."""
        saved = [
            load_file(Path(folder) / f"agent_{self._first + k}.safetensors")
            for k in range(len(self._identities))
        ]
        self._stack.load_state({name: np.stack([s[name] for s in saved]) for name in self._stack.state()})
        if self._spec.shared_replay:
            self._replay.load_state(0, load_file(Path(folder) / SHARED_REPLAY_FILE))
            return
        for k, arrays in enumerate(saved):
            prefix = "replay."
            rows = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
            self._replay.load_state(k, rows)

    def state(self) -> dict[str, np.ndarray]:
        """All parameters and moments of the agents."""
        return self._stack.state()

    def _tensor(self, rows: Rows) -> torch.Tensor:
        return torch.from_numpy(np.array(rows)).to(self._spec.dtype)

    def _gradient_step(self, update: int) -> StepStats | None:
        """One step of every agent that has enough to learn from; None while that is nobody."""
        spec, count = self._spec, len(self._identities)
        able = [k for k, size in enumerate(self._replay.sizes(count)) if size >= max(1, spec.learning_starts)]
        if len(able) == count:
            return self._stack.update(*self._minibatch(able, update))
        if not able:
            return None
        # The others have just joined; their memories hold too few steps yet.
        part = self._stack.select(able)
        stats = part.update(*self._minibatch(able, update))
        self._stack.put(able, part)
        return stats.spread(able, count)

    def _minibatch(self, agents: Sequence[int], update: int) -> tuple[TransitionBatch, torch.Tensor | None]:
        """A minibatch of each of `agents`, and the noise of the discrete actions' relaxation."""
        spec = self._spec
        identities = [self._identities[k] for k in agents]
        rngs = [stream(spec.seed, Purpose.REPLAY, identity, update) for identity in identities]
        batch = self._replay.sample(spec.batch_size, agents, rngs)
        if not spec.networks.space.discrete:
            return batch, None
        shape = (spec.batch_size, spec.networks.space.size)
        noise = [
            stream(spec.seed, Purpose.RELAXATION, identity, update).gumbel(size=shape)
            for identity in identities
        ]
        return batch, torch.from_numpy(np.stack(noise)).to(spec.dtype)

    def _store(self, chunk: Chunk, step: int) -> None:
        agents = range(self._first, self._first + len(self._identities))
        self._replay.add(chunk.transitions(step), agents)


def _contiguous(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.array(array, order="C") for name, array in arrays.items()}
