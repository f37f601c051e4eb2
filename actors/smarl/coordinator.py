"""The coordinator: the central parameter network, the agents' numbering, the target network and its memory.

Owns what all agents share.  The centre takes no gradient: it moves by soft updates alone, agent after agent, whatever
order their parameters arrive in.  Starts no actor and never waits for one; the driver brings everything here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from actors.smarl.chunk import SequenceChunk
from actors.smarl.runner import PointerSpec
from learners.smarl.ddpg import Networks
from learners.smarl.memory import SequenceMemory
from learners.smarl.random_streams import Purpose, stream
from learners.smarl.soft_sync import sync_with_centre
from learners.smarl.target_learner import TargetLearner

FILE = "coordinator.safetensors"
_CENTRE = 0
"""Whose initial parameters: the centre's, or 1 + an agent's identity."""


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """How the target network learns."""

    pointer: PointerSpec
    learning_rate: float
    epochs: int
    batch_size: int
    memory_capacity: int
    """Steps kept for each number of agents."""
    memory_resolution: float | None


@dataclass(frozen=True, slots=True)
class CoordinatorSpec:
    """What the coordinator is made of."""

    networks: Networks
    tau: float
    central_init: Literal["random", "agent_0"]
    ordered: bool
    """Soft updates in the order of the agents' numbers; False takes them as they come and is not deterministic."""
    seed: int
    target: TargetSpec | None
    float64: bool = False


class SMARLCoordinator:
    """Serves one run.  All its state is in `state()`, so that a successor can go on from it."""

    def __init__(self, spec: CoordinatorSpec, num_agents: int) -> None:
        torch.set_num_threads(1)
        self._spec = spec
        self._identities = list(range(num_agents))
        self._next_identity = num_agents
        self._requests: list[tuple[int, list[int]]] = []
        whose = _CENTRE if spec.central_init == "random" else 1
        self._actor, self._critic = (rows[0] for rows in self._initial([whose]))
        self._targets: TargetLearner | None = None
        self._memory: SequenceMemory | None = None
        if spec.target is not None:
            torch.manual_seed(int(stream(spec.seed, Purpose.INITIAL_PARAMETERS, _CENTRE, 2).integers(2**62)))
            pointer = spec.target.pointer
            self._targets = TargetLearner(pointer.build(), learning_rate=spec.target.learning_rate)
            self._memory = SequenceMemory(spec.target.memory_capacity, spec.target.memory_resolution)

    def ready(self) -> bool:
        return True

    # --- numbering ----------------------------------------------------------------------------------------------

    def identities(self) -> list[int]:
        """The agents' identities, in the order of their numbers."""
        return list(self._identities)

    def join(self, count: int) -> list[int]:
        """Number `count` new agents after the others; returns their identities."""
        joined = list(range(self._next_identity, self._next_identity + count))
        self._identities += joined
        self._next_identity += count
        return joined

    def leave(self, numbers: Sequence[int]) -> None:
        """Agents `numbers` leave; the remaining ones are numbered from 0 again, in their old order."""
        gone = set(numbers)
        self._identities = [identity for n, identity in enumerate(self._identities) if n not in gone]

    def request(self, add: int, remove: Sequence[int]) -> int:
        """Ask for a change of the team before the next episode; returns how many agents there will be.

        Raises:
            ValueError: no such agent, or nobody would be left.
        """
        count = len(self._identities)
        for more, fewer in self._requests:
            count += more - len(fewer)
        unknown = [number for number in remove if not 0 <= number < count]
        if unknown:
            raise ValueError(f"agents {unknown} do not exist; there are agents 0 to {count - 1}")
        after = count + add - len(set(remove))
        if after < self._least_agents():
            raise ValueError(f"{after} agents would be left; the run needs at least {self._least_agents()}")
        self._requests.append((add, sorted(set(remove))))
        return after

    def take_requests(self) -> list[tuple[int, list[int]]]:
        """The changes asked for since the last call: pairs of (how many join, which numbers leave first)."""
        taken, self._requests = self._requests, []
        return taken

    def _least_agents(self) -> int:
        return 1 if self._spec.target is None else 2

    # --- parameters ---------------------------------------------------------------------------------------------

    def initial_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Random actors [N, Pa] and critics [N, Pc] of the first agents."""
        return self._initial([1 + identity for identity in self._identities])

    def centre(self) -> tuple[np.ndarray, np.ndarray]:
        """The central actor [Pa] and critic [Pc]."""
        return self._actor.copy(), self._critic.copy()

    def set_centre(self, actor: np.ndarray, critic: np.ndarray) -> None:
        """Stand where a predecessor stood."""
        self._actor, self._critic = np.array(actor), np.array(critic)

    def sync(self, firsts: Sequence[int], *rows: np.ndarray) -> tuple[np.ndarray, ...]:
        """One round of soft updates between the centre and all agents.

        Args:
            firsts: number of the first agent of each push.
            rows: actors [K, Pa], then critics [K, Pc], of each push in turn.

        Returns:
            The centre's actor and critic; every agent's distance to the centre before [N], over both networks; then
            the agents' actors and critics of each push, in the order of `firsts`.
        """
        pushes = list(range(len(firsts)))
        numbered = sorted(pushes, key=lambda push: firsts[push])
        actors = [np.array(rows[2 * push]) for push in pushes]
        critics = [np.array(rows[2 * push + 1]) for push in pushes]
        distances = np.concatenate([self._distances(actors[push], critics[push]) for push in numbered])
        for push in numbered if self._spec.ordered else pushes:
            for centre, agents in ((self._actor, actors[push]), (self._critic, critics[push])):
                sync_with_centre(torch.from_numpy(centre), torch.from_numpy(agents), self._spec.tau)
        back = [part for push in pushes for part in (actors[push], critics[push])]
        return (*self.centre(), distances, *back)

    def _distances(self, actors: np.ndarray, critics: np.ndarray) -> np.ndarray:
        gaps = np.concatenate([actors - self._actor, critics - self._critic], 1)
        distances: np.ndarray = np.linalg.norm(gaps, axis=1)
        return distances

    def _initial(self, whose: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        dtype = np.float64 if self._spec.float64 else np.float32
        shapes = (self._spec.networks.actor, self._spec.networks.critic)
        actors, critics = (
            np.stack(
                [s.initial_row(stream(self._spec.seed, Purpose.INITIAL_PARAMETERS, w, k)) for w in whose]
            )
            for k, s in enumerate(shapes)
        )
        return actors.astype(dtype), critics.astype(dtype)

    # --- targets ------------------------------------------------------------------------------------------------

    def observe(self, *chunks: SequenceChunk) -> None:
        """Store steps in the memory."""
        assert self._memory is not None
        for chunk in chunks:
            self._memory.add(chunk.observations, chunk.targets, chunk.rewards, chunk.masks)

    def train_target(self, episode: int) -> dict[str, float]:
        """Train the target network on the best that the memory holds; `episode` names the random stream."""
        assert self._targets is not None
        assert self._memory is not None
        assert self._spec.target is not None
        best = self._memory.select()
        if not best:
            return {}
        metrics = self._targets.train(
            best,
            epochs=self._spec.target.epochs,
            batch_size=self._spec.target.batch_size,
            rng=stream(self._spec.seed, Purpose.TARGET_TRAINING, episode),
        )
        metrics["target_entries"] = metrics.pop("entries")
        return metrics | {name: float(count) for name, count in self._memory.stats().items()}

    def target_weights(self) -> dict[str, np.ndarray]:
        """The target network's parameters."""
        assert self._targets is not None
        return self._targets.weights()

    # --- state --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, np.ndarray]:
        """Everything, as arrays."""
        arrays: dict[str, np.ndarray] = {
            "identities": np.array(self._identities, np.int64),
            "next_identity": np.array(self._next_identity, np.int64),
            "actor": self._actor,
            "critic": self._critic,
        }
        for prefix, part in self._parts():
            arrays |= {f"{prefix}.{name}": array for name, array in part.state().items()}
        return {name: np.array(array, order="C") for name, array in arrays.items()}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Go on from what `state` returned."""
        self._identities = [int(identity) for identity in state["identities"]]
        self._next_identity = int(state["next_identity"])
        self.set_centre(state["actor"], state["critic"])
        for prefix, part in self._parts():
            start = f"{prefix}."
            part.load_state(
                {n.removeprefix(start): np.array(a) for n, a in state.items() if n.startswith(start)}
            )

    def save(self, folder: str) -> None:
        """Write the state into `folder`.

        Raises:
            OSError: the disk is full or not writable.
        """
        save_file(self.state(), Path(folder) / FILE)

    def load(self, folder: str) -> None:
        """Continue from what `save` wrote."""
        self.load_state(load_file(Path(folder) / FILE))

    def _parts(self) -> list[tuple[str, Any]]:
        parts = (("target", self._targets), ("memory", self._memory))
        return [(prefix, part) for prefix, part in parts if part is not None]
