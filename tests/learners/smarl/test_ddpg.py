"""DDPG steps against a plain agent of torch modules and `torch.optim.Adam`, and stacks against single agents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from teams import (
    CONTINUOUS,
    DISCRETE,
    INDIVIDUAL,
    SPACES,
    assert_same,
    gumbel,
    minibatch,
    networks,
    of_agents,
    random_rows,
    space_name,
    tensors,
)
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from learners.optimiser import NonFiniteLossError
from learners.smarl.common_action import CommonSpace
from learners.smarl.ddpg import DDPGRules, DDPGStack, StackedAdam, StepStats, TransitionBatch

RULES = DDPGRules(
    discount=0.9, actor_learning_rate=0.02, critic_learning_rate=0.05, relaxation_temperature=0.7
)
spaces = pytest.mark.parametrize("space", SPACES, ids=space_name)


def stack(space: CommonSpace, agents: int, seed: int = 0) -> DDPGStack:
    """Agents whose targets differ from their networks."""
    shapes = networks(space)
    made = DDPGStack(shapes, RULES, *tensors(random_rows(shapes, agents, seed + 100)))
    actor, critic = tensors(random_rows(shapes, agents, seed))
    made.actor.copy_(actor)
    made.critic.copy_(critic)
    return made


def mlp(*sizes: int, row: Tensor) -> nn.Sequential:
    into, hidden, out = sizes
    module = nn.Sequential(nn.Linear(into, hidden), nn.ReLU(), nn.Linear(hidden, out)).double()
    vector_to_parameters(row.clone(), module.parameters())
    return module


class PlainAgent:
    """One agent as a textbook writes it: modules, optimisers, a transition at a time for the targets."""

    def __init__(self, of: DDPGStack, agent: int) -> None:
        self.space = of.networks.space
        actor, critic = (INDIVIDUAL, 5, self.space.size), (INDIVIDUAL + self.space.size, 5, 1)
        self.actor, self.critic = mlp(*actor, row=of.actor[agent]), mlp(*critic, row=of.critic[agent])
        self.actor_target = mlp(*actor, row=of.actor_target[agent])
        self.critic_target = mlp(*critic, row=of.critic_target[agent])
        self.actor_adam = torch.optim.Adam(self.actor.parameters(), lr=RULES.actor_learning_rate)
        self.critic_adam = torch.optim.Adam(self.critic.parameters(), lr=RULES.critic_learning_rate)

    def act(self, outputs: Tensor) -> Tensor:
        if self.space.discrete:
            return torch.eye(self.space.size, dtype=torch.float64)[int(outputs.argmax())]
        low, high = torch.tensor(self.space.low), torch.tensor(self.space.high)
        return low + (outputs.tanh() + 1) / 2 * (high - low)

    def q(self, critic: nn.Sequential, observation: Tensor, action: Tensor) -> Tensor:
        return critic(torch.cat([observation, action], -1)).squeeze(-1)

    @torch.no_grad()
    def target(self, reward: Tensor, following: Tensor, terminated: bool) -> float:
        if terminated:
            return float(reward)
        action = self.act(self.actor_target(following))
        return float(reward + RULES.discount * self.q(self.critic_target, following, action))

    def update(self, batch: TransitionBatch, noise: Tensor | None, *, stale_critic: bool = False) -> Tensor:
        y = torch.tensor(
            [
                self.target(batch.rewards[b], batch.next_observations[b], bool(batch.terminated[b]))
                for b in range(len(batch.rewards))
            ],
            dtype=torch.float64,
        )
        before = parameters_to_vector(self.critic.parameters()).detach().clone()
        self.critic_adam.zero_grad()
        ((y - self.q(self.critic, batch.observations, batch.actions)) ** 2).mean().backward()
        self.critic_adam.step()

        outputs = self.actor(batch.observations)
        if noise is None:
            actions = torch.stack([self.act(row) for row in outputs])
        else:
            soft = ((outputs + noise) / RULES.relaxation_temperature).softmax(-1)
            hard = torch.stack([self.act(row) for row in soft])
            actions = soft + (hard - soft).detach()
        critic = self.critic
        if stale_critic:
            critic = mlp(INDIVIDUAL + self.space.size, 5, 1, row=before)
        self.actor_adam.zero_grad()
        (-self.q(critic, batch.observations, actions).mean()).backward()
        self.actor_adam.step()
        return y

    def rows(self) -> dict[str, Tensor]:
        names = ("actor", "critic", "actor_target", "critic_target")
        return {name: parameters_to_vector(getattr(self, name).parameters()).detach() for name in names}


@spaces
def test_a_stack_steps_as_plain_agents_do_terminal_transitions_included(space: CommonSpace) -> None:
    rng, stacked = np.random.default_rng(0), stack(space, 3)
    agents = [PlainAgent(stacked, k) for k in range(3)]
    for step in range(12):
        batch, noise = minibatch(space, 3, rng), gumbel(space, 3, rng)
        assert batch.terminated.any()
        stats = stacked.update(batch, noise)
        for k, agent in enumerate(agents):
            y = agent.update(of_agents(batch, k), None if noise is None else noise[k])
            torch.testing.assert_close(stats.td_targets[k], y, rtol=1e-9, atol=1e-9)
        if step == 5:
            stacked.update_targets(0.3)
            for agent in agents:
                for name in ("actor", "critic"):
                    pairs = zip(
                        getattr(agent, name).parameters(),
                        getattr(agent, f"{name}_target").parameters(),
                        strict=True,
                    )
                    for own, target in pairs:
                        target.data = 0.3 * own.data + 0.7 * target.data
    for k, agent in enumerate(agents):
        for name, row in agent.rows().items():
            torch.testing.assert_close(getattr(stacked, name)[k], row, rtol=1e-9, atol=1e-9)


@spaces
def test_the_actor_climbs_the_critic_just_updated(space: CommonSpace) -> None:
    rng, stacked = np.random.default_rng(1), stack(space, 1)
    fresh, stale = PlainAgent(stacked, 0), PlainAgent(stacked, 0)
    for _ in range(2):  # Adam's first step tells only signs
        batch, noise = minibatch(space, 1, rng), gumbel(space, 1, rng)
        stacked.update(batch, noise)
        own = None if noise is None else noise[0]
        fresh.update(of_agents(batch, 0), own)
        stale.update(of_agents(batch, 0), own, stale_critic=True)
    torch.testing.assert_close(stacked.actor[0], fresh.rows()["actor"], rtol=1e-9, atol=1e-9)
    assert (stacked.actor[0] - stale.rows()["actor"]).abs().max() > 1e-4


@spaces
def test_what_follows_a_terminal_transition_does_not_matter(space: CommonSpace) -> None:
    batch, stacked = minibatch(space, 2, np.random.default_rng(2)), stack(space, 2)
    before = stacked.td_targets(batch)
    ended = batch.terminated
    assert torch.equal(before[ended], batch.rewards[ended])
    assert (before[~ended] - batch.rewards[~ended]).abs().min() > 1e-6
    batch.next_observations[ended] = 1e6
    assert torch.equal(stacked.td_targets(batch), before)


def test_the_target_action_of_discrete_actions_is_the_one_hot_row_of_the_target_actor() -> None:
    stacked = stack(DISCRETE, 1)
    batch = minibatch(DISCRETE, 1, np.random.default_rng(3))
    batch.terminated[:] = False
    following = batch.next_observations
    chosen = stacked.networks.actor.forward(stacked.actor_target, following)[0].argmax(-1)
    rows = torch.zeros(1, len(chosen), 3, dtype=torch.float64)
    for b, choice in enumerate(chosen.tolist()):
        rows[0, b, choice] = 1
    value = stacked.networks.critic.forward(stacked.critic_target, torch.cat([following, rows], -1))
    torch.testing.assert_close(stacked.td_targets(batch), batch.rewards + 0.9 * value[..., 0])


@spaces
def test_statistics_are_of_each_agent(space: CommonSpace) -> None:
    rng, stacked = np.random.default_rng(4), stack(space, 2)
    batch, noise = minibatch(space, 2, rng), gumbel(space, 2, rng)
    q = stacked.networks.critic.forward(stacked.critic, torch.cat([batch.observations, batch.actions], -1))
    q = q[..., 0].clone()
    actor = stacked.actor.clone().requires_grad_()
    stats = stacked.update(batch, noise)
    torch.testing.assert_close(stats.q_mean, q.mean(1))
    torch.testing.assert_close(stats.critic_loss, (stats.td_targets - q).square().mean(1))
    outputs = stacked.networks.actor.forward(actor, batch.observations)
    acted = space.relaxed(outputs, noise, RULES.relaxation_temperature)
    value = stacked.networks.critic.forward(
        stacked.critic, torch.cat([batch.observations, acted], -1)
    )  # updated
    loss = -value[..., 0].mean(1)
    loss.sum().backward()
    torch.testing.assert_close(stats.actor_loss, loss.detach())
    torch.testing.assert_close(stats.actor_gradient_norm, actor.grad.square().sum(1).sqrt())
    assert (stats.actor_gradient_norm > 0).all()


@spaces
def test_a_stack_of_three_is_three_stacks_of_one_also_when_they_differ_in_age(space: CommonSpace) -> None:
    rng, together = np.random.default_rng(5), stack(space, 3)
    alone = [together.select([k]) for k in range(3)]
    for step in range(30):
        batch, noise = minibatch(space, 3, rng), gumbel(space, 3, rng)
        able = [0, 2] if step < 7 else [0, 1, 2]
        part = together.select(able)
        part.update(of_agents(batch, able), None if noise is None else noise[able])
        together.put(able, part)
        for k in able:
            alone[k].update(of_agents(batch, [k]), None if noise is None else noise[[k]])
        if step % 4 == 0:
            for each in (together, *alone):
                each.update_targets(0.2)
    state = together.state()
    assert state["actor_adam.steps"].tolist() == [30, 23, 30]
    for k in range(3):
        for name, rows in alone[k].state().items():
            np.testing.assert_allclose(state[name][k], rows[0], rtol=1e-10, atol=1e-12, err_msg=name)


def test_adam_over_rows_of_equal_and_of_different_ages_is_torchs_adam_of_each() -> None:
    rng = np.random.default_rng(6)
    rows = torch.from_numpy(rng.standard_normal((3, 4)))
    parameters = [nn.Parameter(row.clone()) for row in rows]
    reference = [torch.optim.Adam([parameter], lr=0.05) for parameter in parameters]

    def step(adam: StackedAdam, held: Tensor, which: list[int]) -> None:
        gradients = torch.from_numpy(rng.standard_normal((len(which), 4)))
        adam.step(held, gradients)
        for gradient, k in zip(gradients, which, strict=True):
            parameters[k].grad = gradient
            reference[k].step()

    pair, pair_rows = StackedAdam(rows[:2], 0.05), rows[:2].clone()
    for _ in range(5):  # equal ages
        step(pair, pair_rows, [0, 1])
    assert pair.steps.tolist() == [5, 5]
    whole, whole_rows = StackedAdam(rows, 0.05), torch.cat([pair_rows, rows[2:]])
    whole.exp_avg[:2], whole.exp_avg_sq[:2], whole.steps[:2] = pair.exp_avg, pair.exp_avg_sq, pair.steps
    for _ in range(5):  # different ages
        step(whole, whole_rows, [0, 1, 2])
    assert whole.steps.tolist() == [10, 10, 5]
    for row, parameter in zip(whole_rows, parameters, strict=True):
        torch.testing.assert_close(row, parameter.detach(), rtol=1e-12, atol=1e-12)


@spaces
def test_a_state_continues_bit_for_bit(space: CommonSpace) -> None:
    rng, first = np.random.default_rng(7), stack(space, 2)
    rounds: list[tuple[Any, Any]] = [(minibatch(space, 2, rng), gumbel(space, 2, rng)) for _ in range(6)]
    for batch, noise in rounds[:3]:
        first.update(batch, noise)
    second = stack(space, 2, seed=9)
    second.load_state({name: array.copy() for name, array in first.state().items()})
    for each in (first, second):
        for batch, noise in rounds[3:]:
            each.update(batch, noise)
            each.update_targets(0.1)
    assert_same(second.state(), first.state())


def test_a_state_is_a_copy() -> None:
    rng, made = np.random.default_rng(8), stack(CONTINUOUS, 2)
    state = made.state()
    kept = {name: array.copy() for name, array in state.items()}
    made.update(minibatch(CONTINUOUS, 2, rng))
    made.update_targets(0.5)
    assert_same(state, kept)


def test_selected_agents_are_copies_and_put_takes_them_back() -> None:
    rng, whole = np.random.default_rng(9), stack(CONTINUOUS, 4)
    whole.update(minibatch(CONTINUOUS, 4, rng))
    whole.names = [10, 11, 12, 13]
    before = whole.state()
    part = whole.select([3, 1])
    assert part.names == [13, 11]
    assert_same(part.state(), {name: rows[[3, 1]] for name, rows in before.items()})
    part.update(minibatch(CONTINUOUS, 2, rng))
    part.update_targets(0.5)
    assert_same(whole.state(), before)
    whole.put([3, 1], part)
    after = whole.state()
    for name, rows in part.state().items():
        np.testing.assert_array_equal(after[name][[3, 1]], rows)
        np.testing.assert_array_equal(after[name][[0, 2]], before[name][[0, 2]])
        assert not np.array_equal(after[name][1], before[name][1])


def test_agents_join_with_copies_as_targets_and_without_moments() -> None:
    rng, old = np.random.default_rng(10), stack(CONTINUOUS, 2)
    old.update(minibatch(CONTINUOUS, 2, rng))
    before = old.state()
    actor, critic = tensors(random_rows(old.networks, 2, seed=77))
    grown = old.joined_by(actor, critic)
    state = grown.state()
    for name, rows in before.items():
        np.testing.assert_array_equal(state[name][:2], rows, err_msg=name)
    for name, rows in (("actor", actor), ("critic", critic)):
        np.testing.assert_array_equal(state[name][2:], rows.numpy())
        np.testing.assert_array_equal(state[f"{name}_target"][2:], rows.numpy())
        for moment in ("exp_avg", "exp_avg_sq", "steps"):
            assert not state[f"{name}_adam.{moment}"][2:].any()
    grown.update(minibatch(CONTINUOUS, 4, rng))
    assert_same(old.state(), before)


def test_statistics_spread_over_a_team_with_nan_for_those_who_took_no_step() -> None:
    def numbers() -> Tensor:
        return torch.tensor([1.0, 2.0])

    stats = StepStats(torch.ones(2, 3), numbers(), numbers(), numbers(), numbers()).spread([2, 0], 4)
    for values in (stats.critic_loss, stats.actor_loss, stats.actor_gradient_norm, stats.q_mean):
        np.testing.assert_array_equal(values.numpy(), [2, np.nan, 1, np.nan])
    assert stats.td_targets.shape == (4, 3)
    np.testing.assert_array_equal(stats.td_targets.isnan().all(1).numpy(), [False, True, False, True])


@pytest.mark.parametrize("field", ["rewards", "observations", "next_observations", "actions"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_names_the_agent_and_changes_nothing(field: str, number: float) -> None:
    rng, made = np.random.default_rng(11), stack(CONTINUOUS, 3)
    made.update(minibatch(CONTINUOUS, 3, rng))
    made.names = [4, 5, 6]
    before = made.state()
    batch = minibatch(CONTINUOUS, 3, rng)
    batch.terminated[:] = False
    getattr(batch, field)[1, 2] = number
    if field == "next_observations" and np.isinf(number):
        batch.next_observations[1, 2] = float("nan")  # tanh swallows infinity
    with pytest.raises(NonFiniteLossError, match="critic of agent 5") as caught:
        made.update(batch)
    assert not np.isfinite(caught.value.loss)
    assert_same(made.state(), before)


def test_an_actor_that_is_not_finite_is_named_and_not_stepped() -> None:
    rng, made = np.random.default_rng(12), stack(CONTINUOUS, 2)
    made.names = [7, 8]
    made.actor[1, 0] = float("nan")
    before = made.state()
    with pytest.raises(NonFiniteLossError, match="actor of agent 8"):
        made.update(minibatch(CONTINUOUS, 2, rng))
    after = made.state()
    for name in ("actor", "actor_adam.exp_avg", "actor_adam.exp_avg_sq", "actor_adam.steps", "actor_target"):
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)


def test_rows_of_another_shape_are_refused() -> None:
    shapes = networks(CONTINUOUS)
    actor, critic = tensors(random_rows(shapes, 2))
    with pytest.raises(ValueError, match=r"actor rows have shape \(2, 31\); the network has 32 parameters"):
        DDPGStack(shapes, RULES, actor[:, 1:], critic)
    with pytest.raises(ValueError, match="critic rows have shape"):
        DDPGStack(shapes, RULES, actor, critic[0])


def test_constructing_copies_the_rows_and_starts_targets_as_copies() -> None:
    shapes = networks(CONTINUOUS)
    actor, critic = tensors(random_rows(shapes, 1))
    kept = actor.clone()
    made = DDPGStack(shapes, RULES, actor, critic)
    made.actor.zero_()
    assert torch.equal(actor, kept)
    assert torch.equal(made.actor_target, kept)
    assert torch.equal(made.critic_target, critic)
