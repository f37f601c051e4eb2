"""Trains the target network to translate remembered observations into the best targets known for them.

Owns the network's optimiser, mini-batches and metrics.  Knows neither how the set M was collected nor who decodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learners.optimiser import NonFiniteLossError
from learners.smarl.memory import MemorySet
from learners.smarl.pointer_network import PointerNetwork


class TargetLearner:
    """A target network with Adam (torch's defaults)."""

    def __init__(self, network: PointerNetwork, *, learning_rate: float = 1e-3) -> None:
        """Trains `network` where it is; its device and precision are the learner's.

        Raises:
            ValueError: a learning rate that is not positive.
        """
        if not (learning_rate > 0 and math.isfinite(learning_rate)):
            raise ValueError(f"learning_rate {learning_rate} must be positive and finite")
        self.network = network
        self._adam = torch.optim.Adam(network.parameters(), lr=learning_rate)
        for (
            parameter
        ) in network.parameters():  # made here, so that a state can be saved before the first step
            self._adam.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def train(
        self, memory_set: Mapping[int, MemorySet], *, epochs: int, batch_size: int, rng: np.random.Generator
    ) -> dict[str, float]:
        """Ascends `1/N sum_n ln p(a_n | o_0 .. o_(N-1), a_<n)`, the mean over mini-batches of M (seed, L_seq).

        Mini-batches hold rows of one N each; rows and mini-batches of all N are shuffled anew in every epoch by `rng`.

        Returns `target_loss`, the mean negative objective per entry during the last epoch; after it, over all
        steps of all entries, `target_likelihood`, the mean probability of the stored target given those before it,
        and `target_accuracy`, the share of steps where that target is the likeliest; and `entries`.

        Raises:
            ValueError: no epoch, no row in a mini-batch, or an empty set.
            NonFiniteLossError: a loss or gradient is not finite; the weights are as before that mini-batch.
        """
        entries = sum(len(rows) for rows in memory_set.values())
        if epochs < 1 or batch_size < 1 or not entries:
            raise ValueError(
                f"epochs {epochs}, batch_size {batch_size} and entries in the set {entries} must be at least 1"
            )
        step, loss_sum = 0, 0.0
        for _ in range(epochs):
            loss_sum = 0.0
            for agents, which in _minibatches(memory_set, batch_size, rng):
                rows = memory_set[agents].rows(which)
                loss_sum += self._step(rows, step) * len(rows)
                step += 1
        return {"target_loss": loss_sum / entries, **self.evaluate(memory_set, batch_size=batch_size)}

    @torch.no_grad()
    def evaluate(self, memory_set: Mapping[int, MemorySet], *, batch_size: int) -> dict[str, float]:
        """`target_likelihood`, `target_accuracy` and `entries` of `train`, without training."""
        likelihood, correct, steps = 0.0, 0, 0
        for agents, rows in memory_set.items():
            for start in range(0, len(rows), batch_size):
                observations, targets, masks = self._tensors(rows.rows(slice(start, start + batch_size)))
                logprobs = self.network.teacher_forced(observations, targets, masks)
                chosen = logprobs.gather(-1, targets.unsqueeze(-1))
                likelihood += float(chosen.double().exp().sum())
                correct += int((logprobs.argmax(-1) == targets).sum())
            steps += len(rows) * agents
        return {
            "target_likelihood": likelihood / max(steps, 1),
            "target_accuracy": correct / max(steps, 1),
            "entries": float(sum(len(rows) for rows in memory_set.values())),
        }

    def weights(self) -> dict[str, NDArray[np.floating]]:
        """A copy of delta, for `PointerNetwork.load_weights` elsewhere."""
        return self.network.weights()

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Parameters, Adam's moments and step count, for a checkpoint: a copy, by flat names."""
        state: dict[str, NDArray[np.generic]] = {}
        for name, parameter in self.network.named_parameters():
            adam = self._adam.state[parameter]
            state[f"parameter.{name}"] = parameter.detach().cpu().numpy().copy()
            state[f"mean.{name}"] = adam["exp_avg"].cpu().numpy().copy()
            state[f"square.{name}"] = adam["exp_avg_sq"].cpu().numpy().copy()
            state["steps"] = np.array(int(adam["step"]), np.int64)
        return state

    def load_state(self, state: Mapping[str, NDArray[np.generic]]) -> None:
        """Takes over a state saved by a learner of the same network; the learning rate stays this learner's.

        Raises:
            ValueError: a state of another network; nothing is changed then.
        """
        own = self.state()
        if own.keys() != state.keys():
            odd = sorted(own.keys() ^ state.keys())
            raise ValueError(f"state of another target network: {', '.join(odd)} on one side only")
        for name, values in own.items():
            if values.shape != state[name].shape:
                raise ValueError(
                    f"{name} has shape {state[name].shape}, this target network needs {values.shape}"
                )
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                adam = self._adam.state[parameter]
                parameter.copy_(torch.from_numpy(np.array(state[f"parameter.{name}"])))
                adam["exp_avg"].copy_(torch.from_numpy(np.array(state[f"mean.{name}"])))
                adam["exp_avg_sq"].copy_(torch.from_numpy(np.array(state[f"square.{name}"])))
                adam["step"].fill_(float(state["steps"]))

    def _step(self, rows: MemorySet, minibatch: int) -> float:
        """One gradient step; returns the loss before it."""
        loss = -self.network.logprobs(*self._tensors(rows)).mean()
        self._adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad for parameter in self.network.parameters() if parameter.grad is not None]
        )
        value, gradient = torch.stack([loss.detach(), norm]).tolist()
        if not (math.isfinite(value) and math.isfinite(gradient)):
            self._adam.zero_grad()
            cause = "the gradient is not finite" if math.isfinite(value) else "the loss is not finite"
            raise NonFiniteLossError("target network", minibatch, value, cause)
        self._adam.step()
        self._adam.zero_grad()
        return float(value)

    def _tensors(self, rows: MemorySet) -> tuple[Tensor, Tensor, Tensor]:
        like = self.network.start
        return (
            torch.from_numpy(rows.observations).to(like),
            torch.from_numpy(rows.targets).to(like.device),
            torch.from_numpy(rows.masks).to(like.device),
        )


def _minibatches(
    memory_set: Mapping[int, MemorySet], batch_size: int, rng: np.random.Generator
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """One epoch: number of agents and row indices of every mini-batch, in random order.

    Rows are drawn in ascending N, whatever the order of the mapping, so that `rng` alone decides.
    """
    batches = []
    for agents in sorted(memory_set):
        rows = rng.permutation(len(memory_set[agents]))
        batches += [(agents, rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]
    for index in rng.permutation(len(batches)):
        yield batches[index]
