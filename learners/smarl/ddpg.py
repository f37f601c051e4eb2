"""DDPG of many agents at once: critics and actors as rows of stacked networks, each agent learning from its own batch.

Owns one gradient step and the state that it moves.  Knows neither replay nor the centre.  Agents never mix inside a
step, so a stack of K gives the numbers of K stacks of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.optim.adam import adam

from learners.optimiser import NonFiniteLossError
from learners.smarl.common_action import CommonSpace
from learners.smarl.soft_sync import soft_update
from learners.smarl.stacked_mlp import MLPShape


@dataclass(frozen=True, slots=True)
class DDPGRules:
    """What shapes a gradient step."""

    discount: float = 0.95
    actor_learning_rate: float = 1e-3
    critic_learning_rate: float = 1e-3
    relaxation_temperature: float = 1.0
    """Of the straight-through Gumbel-softmax; discrete actions only."""


@dataclass(frozen=True, slots=True)
class Networks:
    """Shapes of an agent's networks and the meaning of their ends."""

    actor: MLPShape
    critic: MLPShape
    space: CommonSpace

    @classmethod
    def of(cls, individual_size: int, space: CommonSpace, hidden: tuple[int, ...]) -> Self:
        """The usual pair: observation -> action, and observation with action -> one value."""
        return cls(
            MLPShape((individual_size, *hidden, space.size)),
            MLPShape((individual_size + space.size, *hidden, 1)),
            space,
        )


@dataclass(slots=True)
class TransitionBatch:
    """A minibatch for each of K agents."""

    observations: Tensor
    """[K, B, d]"""
    actions: Tensor
    """[K, B, size]"""
    rewards: Tensor
    """[K, B]"""
    next_observations: Tensor
    """[K, B, d]"""
    terminated: Tensor
    """[K, B] bool; a time limit is no termination."""


@dataclass(slots=True)
class StepStats:
    """What a gradient step measured, one number per agent [K]."""

    td_targets: Tensor
    """[K, B]"""
    critic_loss: Tensor
    actor_loss: Tensor
    actor_gradient_norm: Tensor
    q_mean: Tensor

    def spread(self, indices: Sequence[int], count: int) -> StepStats:
        """The same among `count` agents; those not at `indices` took no step and have NaN."""

        def spread(values: Tensor) -> Tensor:
            rows = values.new_full((count, *values.shape[1:]), float("nan"))
            rows[list(indices)] = values
            return rows

        return StepStats(
            spread(self.td_targets),
            spread(self.critic_loss),
            spread(self.actor_loss),
            spread(self.actor_gradient_norm),
            spread(self.q_mean),
        )


class StackedAdam:
    """Adam (torch's defaults) over rows that may have taken different numbers of steps."""

    def __init__(self, rows: Tensor, learning_rate: float) -> None:
        self.exp_avg = torch.zeros_like(rows)
        self.exp_avg_sq = torch.zeros_like(rows)
        self.steps = torch.zeros(len(rows))
        self._learning_rate = learning_rate

    def step(self, rows: Tensor, gradients: Tensor) -> None:
        """One step of every row, in place."""
        if (self.steps == self.steps[0]).all():
            # Adam is elementwise: rows of equal age are one parameter.
            self._adam([rows], [gradients], [self.exp_avg], [self.exp_avg_sq], [self.steps[0].clone()])
            self.steps += 1
        else:
            # The views count up in place.
            self._adam(
                *(list(t.unbind(0)) for t in (rows, gradients, self.exp_avg, self.exp_avg_sq, self.steps))
            )

    def _adam(
        self,
        rows: list[Tensor],
        grads: list[Tensor],
        avg: list[Tensor],
        sq: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        adam(
            rows, grads, avg, sq, [], steps,
            foreach=None, amsgrad=False, beta1=0.9, beta2=0.999, lr=self._learning_rate, weight_decay=0.0, eps=1e-8,
            maximize=False,
        )  # fmt: skip


class DDPGStack:
    """K agents, each with an actor, a critic and a target of either.

    Raises:
        ValueError: rows that do not fit the shapes.
    """

    def __init__(
        self,
        networks: Networks,
        rules: DDPGRules,
        actor: Tensor,
        critic: Tensor,
        *,
        actor_target: Tensor | None = None,
        critic_target: Tensor | None = None,
    ) -> None:
        """`actor` [K, Pa] and `critic` [K, Pc] are copied; without target rows, targets start as copies of them."""
        for rows, shape, what in ((actor, networks.actor, "actor"), (critic, networks.critic, "critic")):
            if rows.ndim != 2 or rows.shape[1] != shape.num_parameters:
                raise ValueError(
                    f"{what} rows have shape {tuple(rows.shape)}; the network has {shape.num_parameters} parameters"
                )
        self.networks, self.rules = networks, rules
        self.names = list(range(len(actor)))
        """The agents' numbers, for error messages."""
        self.actor, self.critic = actor.clone(), critic.clone()
        self.actor_target = (actor if actor_target is None else actor_target).clone()
        self.critic_target = (critic if critic_target is None else critic_target).clone()
        self.actor_adam = StackedAdam(self.actor, rules.actor_learning_rate)
        self.critic_adam = StackedAdam(self.critic, rules.critic_learning_rate)

    def __len__(self) -> int:
        return len(self.actor)

    def update(self, batch: TransitionBatch, gumbel: Tensor | None = None) -> StepStats:
        """One gradient step: first the critics, then the actors against the critics just updated.

        The critic minimises `mean (y - Q(o, a))^2` with `y = r + discount * Q'(o', mu'(o'))`, and `y = r` where the
        episode terminated; the actor ascends `mean Q(o, mu(o))` (the seed's two update rules).

        Args:
            gumbel: standard Gumbel noise [K, B, size], where actions are discrete.

        Raises:
            NonFiniteLossError: before the weights of the network concerned are touched.
        """
        networks, rules = self.networks, self.rules
        targets = self.td_targets(batch)
        leaf = self.critic.detach().requires_grad_()
        q = self._q(leaf, batch.observations, batch.actions)
        critic_loss = (targets - q).square().mean(1)
        critic_loss.sum().backward()  # type: ignore[no-untyped-call]
        self._check("critic", critic_loss, leaf)
        assert leaf.grad is not None
        self.critic_adam.step(self.critic, leaf.grad)

        leaf = self.actor.detach().requires_grad_()
        outputs = networks.actor.forward(leaf, batch.observations)
        actions = networks.space.relaxed(outputs, gumbel, rules.relaxation_temperature)
        actor_loss = -self._q(self.critic, batch.observations, actions).mean(1)
        actor_loss.sum().backward()  # type: ignore[no-untyped-call]
        self._check("actor", actor_loss, leaf)
        assert leaf.grad is not None
        self.actor_adam.step(self.actor, leaf.grad)
        return StepStats(
            targets, critic_loss.detach(), actor_loss.detach(), leaf.grad.norm(dim=1), q.detach().mean(1)
        )

    @torch.no_grad()
    def td_targets(self, batch: TransitionBatch) -> Tensor:
        """`y` [K, B]."""
        outputs = self.networks.actor.forward(self.actor_target, batch.next_observations)
        actions = self.networks.space.action(outputs)
        following = self._q(self.critic_target, batch.next_observations, actions)
        return batch.rewards + self.rules.discount * following.masked_fill(batch.terminated, 0.0)

    def update_targets(self, tau: float) -> None:
        """Move every target towards its network."""
        soft_update(self.actor, self.actor_target, tau)
        soft_update(self.critic, self.critic_target, tau)

    def select(self, indices: Sequence[int]) -> DDPGStack:
        """A stack of copies of the agents at `indices`."""
        part = self._like(self.actor[list(indices)], self.critic[list(indices)])
        part.names = [self.names[k] for k in indices]
        part.load_state({name: rows[list(indices)] for name, rows in self.state().items()})
        return part

    def put(self, indices: Sequence[int], part: DDPGStack) -> None:
        """Take the state of `part`'s agents for the agents at `indices`."""
        theirs = part._tensors()
        for name, rows in self._tensors().items():
            rows[list(indices)] = theirs[name]

    def joined_by(self, actor: Tensor, critic: Tensor) -> DDPGStack:
        """This stack with new agents at its end, whose targets are copies and whose moments are zero."""
        old = range(len(self))
        grown = self._like(torch.cat([self.actor, actor]), torch.cat([self.critic, critic]))
        grown.put(old, self)
        return grown

    def _like(self, actor: Tensor, critic: Tensor) -> DDPGStack:
        return DDPGStack(self.networks, self.rules, actor, critic)

    def state(self) -> dict[str, np.ndarray]:
        """Everything that learning moves, one row per agent, as arrays."""
        return {name: tensor.numpy().copy() for name, tensor in self._tensors().items()}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue from what `state` returned for as many agents."""
        for name, tensor in self._tensors().items():
            tensor.copy_(torch.from_numpy(state[name]))

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "actor": self.actor,
            "critic": self.critic,
            "actor_target": self.actor_target,
            "critic_target": self.critic_target,
            **{
                f"{name}_adam.{part}": getattr(adam_state, part)
                for name, adam_state in (("actor", self.actor_adam), ("critic", self.critic_adam))
                for part in ("exp_avg", "exp_avg_sq", "steps")
            },
        }

    def _q(self, critic: Tensor, observations: Tensor, actions: Tensor) -> Tensor:
        return self.networks.critic.forward(critic, torch.cat([observations, actions], -1)).squeeze(-1)

    def _check(self, network: str, losses: Tensor, leaf: Tensor) -> None:
        assert leaf.grad is not None
        finite = losses.detach().isfinite() & leaf.grad.sum(1).isfinite()
        if not finite.all():
            agent = int((~finite).nonzero()[0, 0])
            raise NonFiniteLossError(
                f"{network} of agent {self.names[agent]}",
                0,
                float(losses[agent].detach()),
                "loss or gradient is not finite",
            )
