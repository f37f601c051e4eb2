"""DDPG workers as plain objects, on collected steps, against a slow and obvious loop over agents and transitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from teams import CONTINUOUS, DISCRETE, SPACES, assert_same, chunk, networks, random_rows, space_name, tensors

from actors.smarl.chunk import Chunk
from actors.smarl.worker import METRICS, SHARED_REPLAY_FILE, DDPGWorker, WorkerSpec
from learners.optimiser import NonFiniteLossError
from learners.smarl.common_action import CommonSpace
from learners.smarl.ddpg import DDPGRules, DDPGStack, TransitionBatch
from learners.smarl.random_streams import Purpose, stream

TAU = 0.2
SEED = 3
spaces = pytest.mark.parametrize("space", SPACES, ids=space_name)
sharing = pytest.mark.parametrize("shared", [False, True], ids=["per agent", "shared"])


def spec(space: CommonSpace = CONTINUOUS, **changes: Any) -> WorkerSpec:
    values: dict[str, Any] = {
        "networks": networks(space),
        "rules": DDPGRules(0.9, 0.01, 0.02),
        "tau": TAU,
        "batch_size": 4,
        "learning_starts": 6,
        "target_sync_interval": 3,
        "replay_capacity": 1000,
        "shared_replay": False,
        "seed": SEED,
        "float64": True,
    }
    return WorkerSpec(**{**values, **changes})


def worker(of: WorkerSpec, identities: Sequence[int], first: int = 0) -> DDPGWorker:
    """Agents whose first parameters follow from their identities."""
    rows = random_rows(of.networks, 20)
    made = DDPGWorker(of, identities, *(part[list(identities)] for part in rows))
    made.number_from(first)
    return made


class PlainAgent:
    """One agent that keeps its transitions in a list and learns from them one minibatch at a time."""

    def __init__(self, of: WorkerSpec, identity: int, number: int) -> None:
        self.spec, self.identity, self.number = of, identity, number
        self.stack = DDPGStack(
            of.networks, of.rules, *(t[[identity]] for t in tensors(random_rows(of.networks, 20)))
        )
        self.memory: list[tuple[np.ndarray, np.ndarray, float, np.ndarray, bool]] = []
        self.losses: list[float] = []

    def learn(self, start: int, stop: int, step: int, update: int, chunks: Sequence[Chunk]) -> None:
        for offset in range(stop - start):
            if len(self.memory) >= self.spec.learning_starts:
                self.losses.append(self._gradient_step(update + offset))
                if (step + offset) % self.spec.target_sync_interval == 0:
                    self.stack.update_targets(TAU)
            for part in chunks:
                if start + offset < len(part.rewards):
                    self._store(part, start + offset)

    def _store(self, part: Chunk, t: int) -> None:
        everyone = range(part.rewards.shape[2]) if self.spec.shared_replay else [self.number]
        for agent in everyone:
            for copy in range(part.rewards.shape[1]):
                if part.alive[t, copy]:
                    self.memory.append(
                        (
                            part.observations[t, copy, agent],
                            part.actions[t, copy, agent],
                            float(part.rewards[t, copy, agent]),
                            part.observations[t + 1, copy, agent],
                            bool(part.terminated[t, copy]),
                        )
                    )

    def _gradient_step(self, update: int) -> float:
        size = self.spec.batch_size
        drawn = stream(SEED, Purpose.REPLAY, self.identity, update).integers(len(self.memory), size=size)
        columns = list(zip(*(self.memory[i] for i in drawn), strict=True))
        numbers = [torch.tensor(np.array(column)).double()[None] for column in columns[:4]]
        batch = TransitionBatch(*numbers, torch.tensor(columns[4])[None])
        noise = None
        if self.spec.networks.space.discrete:
            rng = stream(SEED, Purpose.RELAXATION, self.identity, update)
            noise = torch.from_numpy(rng.gumbel(size=(1, size, self.spec.networks.space.size)))
        return float(self.stack.update(batch, noise).critic_loss)


@spaces
@sharing
def test_learning_is_a_gradient_step_at_every_step_and_then_the_step_is_stored(
    space: CommonSpace, shared: bool
) -> None:
    """Two runners, one of whose episodes end sooner; pieces as the loop cuts them; agents 1 and 2 of three."""
    of = spec(space, shared_replay=shared)
    ours = worker(of, [7, 4], first=1)
    plain = [PlainAgent(of, 7, 1), PlainAgent(of, 4, 2)]
    learned = []
    step = update = 0
    for seed in range(3):
        chunks = [chunk(space, 6, 3, seed), chunk(space, 4, 3, seed + 10, copies=1)]
        for start, stop in ((0, 1), (1, 5), (5, 6)):
            metrics, *rows = ours.learn(start, stop, step + start, update, *chunks)
            for agent in plain:
                agent.learn(start, stop, step + start, update, chunks)
            learned.append(metrics)
            update += stop - start
        step += 6
    state = ours.state()
    for k, agent in enumerate(plain):
        for name, row in agent.stack.state().items():
            np.testing.assert_allclose(state[name][k], row[0], rtol=1e-9, atol=1e-10, err_msg=name)
        losses = np.concatenate([metrics["critic_loss"][:, k] for metrics in learned])
        np.testing.assert_allclose(losses, agent.losses, rtol=1e-9)
    assert len(plain[0].losses) > 10
    np.testing.assert_array_equal(rows[0], state["actor"])
    np.testing.assert_array_equal(rows[1], state["critic"])


def test_nothing_is_learned_before_there_is_enough() -> None:
    ours = worker(spec(learning_starts=5), [0, 1])
    before = ours.state()
    part = chunk(CONTINUOUS, 4, 2, 0, copies=1)  # one copy, alive for two of four steps
    metrics, actor, _ = ours.learn(0, 4, 0, 0, part)
    assert {name: values.shape for name, values in metrics.items()} == dict.fromkeys(METRICS, (0, 2))
    assert_same(ours.state(), before)
    np.testing.assert_array_equal(actor, before["actor"])
    whole = replace(part, alive=np.ones_like(part.alive))
    assert len(ours.learn(0, 3, 4, 4, whole)[0]["critic_loss"]) == 0  # five are there after the third
    assert len(ours.learn(3, 4, 7, 7, whole)[0]["critic_loss"]) == 1


def test_a_gradient_step_needs_at_least_one_transition() -> None:
    ours = worker(spec(learning_starts=0), [0])
    assert len(ours.learn(0, 3, 0, 0, chunk(CONTINUOUS, 9, 1, 0))[0]["q_mean"]) == 2


def test_targets_move_towards_their_networks_at_every_interval_of_the_episode_alone() -> None:
    ours, part = worker(spec(), [0, 1]), chunk(CONTINUOUS, 30, 2, 0)
    ours.learn(0, 10, 0, 0, part)
    for offset in range(10, 20):
        step = offset + 4  # the episode began before this chunk
        before = ours.state()
        ours.learn(offset, offset + 1, step, offset, part)
        after = ours.state()
        for name in ("actor", "critic"):
            target = before[f"{name}_target"]
            expected = TAU * after[name] + (1 - TAU) * target if step % 3 == 0 else target
            np.testing.assert_allclose(after[f"{name}_target"], expected, rtol=1e-12, atol=1e-14)
            assert not np.array_equal(after[name], before[name])


def test_a_given_minibatch_is_learned_from_past_the_replay() -> None:
    ours, plain = worker(spec(), [0]), PlainAgent(spec(), 0, 0)
    rng = np.random.default_rng(0)
    batch = TransitionBatch(
        *(
            torch.from_numpy(rng.standard_normal(shape))
            for shape in ((1, 5, 3), (1, 5, 2), (1, 5), (1, 5, 3))
        ),
        torch.tensor([[True, False, False, True, False]]),
    )
    stats, actor, _ = ours.learn_from(batch, update_targets=False)
    expected = plain.stack.update(batch)
    torch.testing.assert_close(stats.td_targets, expected.td_targets)
    assert_same(ours.state(), plain.stack.state())
    np.testing.assert_array_equal(actor, plain.stack.actor.numpy())
    ours.learn_from(batch, update_targets=True)
    plain.stack.update(batch)
    plain.stack.update_targets(TAU)
    assert_same(ours.state(), plain.stack.state())


@spaces
@sharing
@pytest.mark.parametrize("float64", [True, False], ids=["double", "single"])
def test_one_worker_with_three_agents_is_three_workers_with_one(
    space: CommonSpace, shared: bool, float64: bool
) -> None:
    of = spec(space, shared_replay=shared, float64=float64)
    together = worker(of, [0, 1, 2])
    alone = [worker(of, [k], first=k) for k in range(3)]
    for step in range(3):
        part = chunk(space, 6, 3, step)
        metrics, *_ = together.learn(0, 6, 6 * step, 6 * step, part)
        apart = [one.learn(0, 6, 6 * step, 6 * step, part)[0] for one in alone]
        for name in METRICS:
            np.testing.assert_array_equal(
                metrics[name], np.concatenate([a[name] for a in apart], 1), err_msg=name
            )
    state = together.state()
    states = [one.state() for one in alone]
    assert_same(state, {name: np.concatenate([s[name] for s in states]) for name in state})
    assert state["actor_adam.steps"].min() > 5


def test_what_the_centre_sends_replaces_parameters_and_nothing_else() -> None:
    ours = worker(spec(), [0, 1])
    ours.learn(0, 9, 0, 0, chunk(CONTINUOUS, 9, 2, 0))
    before = ours.state()
    actor, critic = random_rows(spec().networks, 2, seed=50)
    actor.setflags(write=False)  # as Ray hands it over
    ours.pull(actor, critic)
    after = ours.state()
    np.testing.assert_array_equal(after.pop("actor"), actor)
    np.testing.assert_array_equal(after.pop("critic"), critic)
    assert_same(after, {name: before[name] for name in after})
    np.testing.assert_array_equal(ours.actor_rows(), actor)


# --- joining and leaving ----------------------------------------------------------------------------------------------


@spaces
def test_who_has_just_joined_takes_no_step_until_it_has_seen_enough(space: CommonSpace) -> None:
    ours = worker(spec(space), [0, 1])
    ours.learn(0, 6, 0, 0, chunk(space, 6, 2, 0))
    before = ours.state()
    centre = [row[19] for row in random_rows(spec().networks if space is CONTINUOUS else networks(space), 20)]
    ours.join([5], *(row[None] for row in centre))
    joined = ours.state()
    for name, rows in before.items():
        np.testing.assert_array_equal(joined[name][:2], rows, err_msg=name)
    for name, row in zip(("actor", "critic"), centre, strict=True):
        np.testing.assert_array_equal(joined[name][2], row)
        np.testing.assert_array_equal(joined[f"{name}_target"][2], row)
    part = chunk(space, 8, 3, 1, copies=1)  # six transitions: enough for the step after the sixth
    part = replace(part, alive=np.ones_like(part.alive))
    metrics, *_ = ours.learn(0, 6, 6, 6, part)
    for values in metrics.values():
        assert values.shape == (6, 3)
        assert np.isfinite(values[:, :2]).all()
        assert np.isnan(values[:, 2]).all()
    np.testing.assert_array_equal(ours.state()["actor"][2], centre[0])
    assert ours.state()["actor_adam.steps"].tolist() == [before["actor_adam.steps"][0] + 6] * 2 + [0]
    metrics, *_ = ours.learn(6, 8, 12, 12, part)
    assert np.isfinite(metrics["critic_loss"]).all()
    assert ours.state()["actor_adam.steps"][2] == 2


@spaces
@sharing
def test_agents_who_stay_learn_as_if_nobody_had_come_and_gone(space: CommonSpace, shared: bool) -> None:
    """Agent 0 leaves, 1 becomes 0, a new one comes; the others' numbers change, their streams do not."""
    of = spec(space, shared_replay=shared)
    ours = worker(of, [0, 1, 2])
    ours.learn(0, 6, 0, 0, chunk(space, 6, 3, 0))
    before = ours.state()
    ours.leave([0])
    ours.number_from(0)
    left = ours.state()
    assert_same(left, {name: rows[1:] for name, rows in before.items()})
    centre = [row[19:] for row in random_rows(of.networks, 20)]
    ours.join([3], *centre)
    ours.number_from(0)
    part = chunk(space, 6, 3, 1)
    ours.learn(0, 6, 6, 6, part)

    plain = worker(of, [0, 1, 2])
    plain.learn(0, 6, 0, 0, chunk(space, 6, 3, 0))
    # Numbered 1 and 2 still, they see the same; what all share is the same in any case.
    plain.learn(0, 6, 6, 6, part if shared else permuted(part, [2, 0, 1]))
    state, undisturbed = ours.state(), plain.state()
    assert_same({name: rows[:2] for name, rows in state.items()}, {n: r[1:] for n, r in undisturbed.items()})
    assert not np.array_equal(state["actor"][0], left["actor"][0])


def permuted(part: Chunk, agents: list[int]) -> Chunk:
    return replace(
        part,
        observations=part.observations[:, :, agents],
        actions=part.actions[:, :, agents],
        rewards=part.rewards[:, :, agents],
    )


def test_with_a_shared_memory_a_joining_agent_learns_at_once_also_from_those_who_left() -> None:
    ours = worker(spec(shared_replay=True), [0, 1])
    ours.learn(0, 9, 0, 0, chunk(CONTINUOUS, 9, 2, 0))
    ours.leave([0])
    ours.join([2], *(row[19:] for row in random_rows(spec().networks, 20)))
    ours.number_from(0)
    metrics, *_ = ours.learn(0, 1, 9, 9, chunk(CONTINUOUS, 9, 2, 1))
    assert np.isfinite(metrics["critic_loss"]).all()


def test_a_number_that_is_not_finite_names_the_agent_by_its_number() -> None:
    ours = worker(spec(), [4, 9], first=2)
    part = chunk(CONTINUOUS, 9, 4, 0)
    part.rewards[:, :, 3] = np.inf
    with pytest.raises(NonFiniteLossError, match="critic of agent 3"):
        ours.learn(0, 9, 0, 0, part)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("float64", [True, False], ids=["double", "single"])
@spaces
@sharing
def test_agents_saved_by_two_workers_go_on_in_one_and_the_other_way_round(
    space: CommonSpace, shared: bool, float64: bool, tmp_path: Path
) -> None:
    of = spec(space, shared_replay=shared, float64=float64, replay_capacity=11)  # the ring has gone round

    def learn(workers: list[DDPGWorker], round_: int) -> None:
        for each in workers:
            each.learn(0, 6, 6 * round_, 6 * round_, chunk(space, 6, 3, round_))

    one, two = [worker(of, [0, 1, 2])], [worker(of, [0, 1]), worker(of, [2], first=2)]
    for round_ in range(3):
        learn(one, round_)
        learn(two, round_)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, workers in zip(folders, (one, two), strict=True):
        folder.mkdir()
        for each in workers:
            each.save(str(folder))
        names = {path.name for path in folder.iterdir()}
        agents = {f"agent_{k}.safetensors" for k in range(3)}
        assert names == (agents | {SHARED_REPLAY_FILE} if shared else agents)
    assert all(
        (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
        for name in (path.name for path in folders[0].iterdir())
    )
    # Other parameters than the first ones: all that counts comes from the files.
    rows = [part[:3] for part in random_rows(of.networks, 20, seed=8)]
    from_two = [DDPGWorker(of, [0, 1, 2], *rows)]
    from_one = [DDPGWorker(of, [0, 1], *(part[:2] for part in rows))]
    from_one.append(DDPGWorker(of, [2], *(part[2:] for part in rows)))
    from_one[1].number_from(2)
    for folder, workers in zip(folders, (from_one, from_two), strict=True):
        for each in workers:
            each.load(str(folder))
    for workers in (one, from_one, from_two):
        learn(workers, 3)
    for workers in (from_one, from_two):
        states = [each.state() for each in workers]
        joined = {name: np.concatenate([state[name] for state in states]) for name in states[0]}
        assert_same(joined, one[0].state())


def test_agents_that_have_seen_nothing_yet_are_saved_as_well(tmp_path: Path) -> None:
    first, second = worker(spec(DISCRETE), [0, 1]), worker(spec(DISCRETE), [1, 0])
    first.save(str(tmp_path))
    second.load(str(tmp_path))
    assert_same(second.state(), first.state())


def test_a_memory_larger_than_the_capacity_is_refused(tmp_path: Path) -> None:
    first = worker(spec(), [0])
    first.learn(0, 9, 0, 0, chunk(CONTINUOUS, 9, 1, 0))
    first.save(str(tmp_path))
    with pytest.raises(ValueError, match="16 saved transitions do not fit a replay_capacity of 5"):
        worker(spec(replay_capacity=5), [0]).load(str(tmp_path))
