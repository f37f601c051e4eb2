"""The coordinator as a plain object: soft updates in any order of arrival, numbering, the target network, its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from teams import CONTINUOUS, assert_same, chunk, networks, random_rows, sequences

from actors.smarl.coordinator import FILE, CoordinatorSpec, SMARLCoordinator, TargetSpec
from actors.smarl.runner import PointerSpec
from actors.smarl.worker import DDPGWorker, WorkerSpec
from learners.smarl.ddpg import DDPGRules

TAU = 0.3
SHAPES = networks(CONTINUOUS)
UNIVERSAL = 3
TARGET = TargetSpec(
    PointerSpec(UNIVERSAL, 6, "additive"),
    learning_rate=0.01,
    epochs=2,
    batch_size=4,
    memory_capacity=50,
    memory_resolution=None,
)


def coordinator(agents: int = 3, **changes: Any) -> SMARLCoordinator:
    values: dict[str, Any] = {
        "networks": SHAPES,
        "tau": TAU,
        "central_init": "random",
        "ordered": True,
        "seed": 5,
        "target": None,
        "float64": True,
    }
    return SMARLCoordinator(CoordinatorSpec(**{**values, **changes}), agents)


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """A number of agents, and the agents of each push in the order in which they arrive."""
    agents = draw(st.integers(1, 6))
    cuts = sorted(draw(st.sets(st.integers(1, agents - 1)))) if agents > 1 else []
    parts = [list(range(a, b)) for a, b in zip([0, *cuts], [*cuts, agents], strict=True)]
    return agents, draw(st.permutations(parts))


def push(
    to: SMARLCoordinator, pushes: list[list[int]], actors: np.ndarray, critics: np.ndarray
) -> tuple[np.ndarray, dict[int, tuple[np.ndarray, np.ndarray]]]:
    """Distances, and what came back for each agent."""
    rows = [part for agents in pushes for part in (actors[agents], critics[agents])]
    answer = to.sync([agents[0] for agents in pushes], *rows)
    np.testing.assert_array_equal(answer[0], to.centre()[0])
    np.testing.assert_array_equal(answer[1], to.centre()[1])
    back = {}
    for place, agents in enumerate(pushes):
        for k, agent in enumerate(agents):
            back[agent] = (answer[3 + 2 * place][k], answer[4 + 2 * place][k])
    return answer[2], back


def loop(centre: np.ndarray, agents: np.ndarray, order: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The seed's loop over agents."""
    centre, agents = centre.copy(), agents.copy()
    for i in order:
        centre = TAU * agents[i] + (1 - TAU) * centre
        agents[i] = TAU * centre + (1 - TAU) * agents[i]
    return centre, agents


@settings(max_examples=60)
@given(arrivals(), st.integers(0, 99))
def test_pushes_are_applied_in_agent_order_whatever_order_they_arrive_in(
    arrived: tuple[int, list[list[int]]], seed: int
) -> None:
    agents, pushes = arrived
    actors, critics = random_rows(SHAPES, agents, seed)
    ours, whole = coordinator(agents), coordinator(agents)
    before = ours.centre()
    distances, back = push(ours, pushes, actors, critics)
    one_push_distances, one_push = push(whole, [list(range(agents))], actors, critics)
    np.testing.assert_array_equal(distances, one_push_distances)
    for name, k, rows in (("actor", 0, actors), ("critic", 1, critics)):
        np.testing.assert_array_equal(ours.centre()[k], whole.centre()[k])
        centre, moved = loop(before[k], rows, list(range(agents)))
        np.testing.assert_allclose(ours.centre()[k], centre, atol=1e-12, err_msg=name)
        for agent in range(agents):
            np.testing.assert_array_equal(back[agent][k], one_push[agent][k])
            np.testing.assert_allclose(back[agent][k], moved[agent], atol=1e-12, err_msg=name)
    gaps = np.concatenate([actors - before[0], critics - before[1]], 1)
    np.testing.assert_allclose(distances, np.sqrt((gaps**2).sum(1)), atol=1e-12)


@settings(max_examples=30)
@given(arrivals())
def test_unordered_pushes_are_applied_as_they_come_and_distances_stay_in_agent_order(
    arrived: tuple[int, list[list[int]]],
) -> None:
    agents, pushes = arrived
    actors, critics = random_rows(SHAPES, agents)
    ours = coordinator(agents, ordered=False)
    before = ours.centre()
    distances, back = push(ours, pushes, actors, critics)
    centre, moved = loop(before[0], actors, [agent for part in pushes for agent in part])
    np.testing.assert_allclose(ours.centre()[0], centre, atol=1e-12)
    for agent in range(agents):
        np.testing.assert_allclose(back[agent][0], moved[agent], atol=1e-12)
    gaps = np.concatenate([actors - before[0], critics - before[1]], 1)
    np.testing.assert_allclose(distances, np.sqrt((gaps**2).sum(1)), atol=1e-12)


def test_what_was_pushed_is_left_alone() -> None:
    actors, critics = random_rows(SHAPES, 2)
    for rows in (actors, critics):
        rows.setflags(write=False)  # as Ray hands them over
    kept = actors.copy(), critics.copy()
    push(coordinator(2), [[0, 1]], actors, critics)
    np.testing.assert_array_equal(actors, kept[0])
    np.testing.assert_array_equal(critics, kept[1])


def test_the_centre_is_a_copy_and_stands_where_it_is_set() -> None:
    ours = coordinator()
    actor, critic = (rows[0] for rows in random_rows(SHAPES, 1, 9))
    ours.set_centre(actor, critic)
    kept = actor.copy()
    actor[:] = 0
    ours.centre()[0][:] = 1
    np.testing.assert_array_equal(ours.centre()[0], kept)
    np.testing.assert_array_equal(ours.centre()[1], critic)


# --- numbering --------------------------------------------------------------------------------------------------------


def test_agents_are_numbered_anew_and_identities_never_come_back() -> None:
    ours = coordinator(4)
    assert ours.identities() == [0, 1, 2, 3]
    ours.leave([0, 2])
    assert ours.identities() == [1, 3]
    assert ours.join(2) == [4, 5]
    assert ours.identities() == [1, 3, 4, 5]
    ours.leave([3])
    assert ours.join(1) == [6]
    assert ours.identities() == [1, 3, 4, 6]


def test_requests_wait_to_be_taken_and_each_counts_on_those_before_it() -> None:
    ours = coordinator(3)
    assert ours.request(2, []) == 5
    assert ours.request(0, [4, 0, 4]) == 3  # twice the same agent is once
    assert ours.request(1, [2]) == 3
    assert ours.identities() == [0, 1, 2]
    assert ours.take_requests() == [(2, []), (0, [0, 4]), (1, [2])]
    assert ours.take_requests() == []
    assert ours.request(0, [2]) == 2


@pytest.mark.parametrize(
    ("target", "add", "remove", "told"),
    [
        (None, 0, [3], r"agents \[3\] do not exist; there are agents 0 to 2"),
        (None, 1, [3], r"agents \[3\] do not exist"),  # who joins cannot leave with the same request
        (None, 0, [-1, 7], r"agents \[-1, 7\] do not exist"),
        (None, 0, [0, 1, 2], "0 agents would be left; the run needs at least 1"),
        (TARGET, 0, [0, 1], "1 agents would be left; the run needs at least 2"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused_and_forgotten(
    target: TargetSpec | None, add: int, remove: list[int], told: str
) -> None:
    ours = coordinator(3, target=target)
    with pytest.raises(ValueError, match=told):
        ours.request(add, remove)
    assert ours.take_requests() == []


# --- first parameters -------------------------------------------------------------------------------------------------


def test_the_centre_starts_at_random_or_as_agent_0() -> None:
    actors, critics = coordinator(3, central_init="agent_0").initial_rows()
    assert actors.shape == (3, SHAPES.actor.num_parameters)
    actor, critic = coordinator(3, central_init="agent_0").centre()
    np.testing.assert_array_equal(actor, actors[0])
    np.testing.assert_array_equal(critic, critics[0])
    random = coordinator(3, central_init="random")
    np.testing.assert_array_equal(random.initial_rows()[0], actors)
    everyone = [*actors, random.centre()[0]]
    for a in range(4):
        for b in range(a):
            assert not np.isclose(everyone[a], everyone[b]).any(), (a, b)


def test_first_parameters_depend_on_seed_and_agent_alone() -> None:
    few, many = coordinator(2).initial_rows(), coordinator(5).initial_rows()
    np.testing.assert_array_equal(many[0][:2], few[0])
    np.testing.assert_array_equal(many[1][:2], few[1])
    assert not np.isclose(coordinator(2, seed=6).initial_rows()[0], few[0]).any()
    single = coordinator(2, float64=False).initial_rows()
    assert single[0].dtype == np.float32
    np.testing.assert_array_equal(single[0], few[0].astype(np.float32))


# --- the target network and the state ---------------------------------------------------------------------------------


def experienced() -> SMARLCoordinator:
    """A coordinator to which something of everything has happened."""
    ours = coordinator(3, target=TARGET)
    push(ours, [[0, 1], [2]], *random_rows(SHAPES, 3))
    ours.observe(sequences(20, 3, UNIVERSAL, 1), sequences(9, 2, UNIVERSAL, 2))
    ours.train_target(0)
    ours.leave([1])
    ours.join(2)
    ours.observe(sequences(5, 4, UNIVERSAL, 3))
    return ours


def go_on(ours: SMARLCoordinator) -> dict[str, np.ndarray]:
    push(ours, [[1, 2, 3], [0]], *random_rows(SHAPES, 4, 1))
    ours.observe(sequences(7, 4, UNIVERSAL, 4))
    ours.train_target(25)
    assert ours.join(1) == [5]
    return ours.state()


def test_a_successor_with_the_state_goes_on_bit_for_bit() -> None:
    first, second = experienced(), coordinator(3, target=TARGET, central_init="agent_0")
    state = first.state()
    assert {name.partition(".")[0] for name in state} == {
        *("identities", "next_identity", "actor", "critic", "target", "memory")
    }
    second.load_state(state)
    assert_same(second.state(), state)
    kept = {name: array.copy() for name, array in state.items()}
    assert_same(go_on(second), go_on(first))
    assert_same(state, kept)  # nobody wrote into it


def test_a_saved_state_goes_on_bit_for_bit(tmp_path: Path) -> None:
    first, second = experienced(), coordinator(3, target=TARGET)
    first.save(str(tmp_path))
    assert (tmp_path / FILE).is_file()
    second.load(str(tmp_path))
    assert_same(second.state(), first.state())
    assert_same(go_on(second), go_on(first))


def test_a_state_in_single_precision_without_target_network_round_trips(tmp_path: Path) -> None:
    first, second = coordinator(float64=False), coordinator(float64=False, seed=7)
    push(first, [[0, 1, 2]], *(rows.astype(np.float32) for rows in random_rows(SHAPES, 3)))
    first.save(str(tmp_path))
    second.load(str(tmp_path))
    assert second.state()["actor"].dtype == np.float32
    assert_same(second.state(), first.state())


def test_training_targets_learns_the_best_targets_and_leaves_the_centre_bit_equal() -> None:
    ours = coordinator(3, target=TARGET)
    assert ours.train_target(0) == {}  # nothing to learn from yet
    ours.observe(sequences(40, 3, UNIVERSAL, 1))
    centre, weights = ours.centre(), ours.target_weights()
    losses = []
    for episode in range(40):
        metrics = ours.train_target(episode)
        losses.append(metrics["target_loss"])
    assert metrics["target_entries"] == metrics["memory_distinct"] == metrics["memory_size"] == 4
    assert metrics["memory_dropped"] == 0
    assert losses[-1] < 0.5 * losses[0]
    for name, array in ours.target_weights().items():
        assert not np.array_equal(array, weights[name]), name
    np.testing.assert_array_equal(ours.centre()[0], centre[0])
    np.testing.assert_array_equal(ours.centre()[1], centre[1])


def test_training_targets_is_repeatable_and_draws_anew_in_every_episode() -> None:
    def trained(episode: int) -> dict[str, np.ndarray]:
        ours = coordinator(3, target=TARGET)
        ours.observe(sequences(40, 3, UNIVERSAL, 1, distinct=20))
        ours.train_target(episode)
        return ours.state()

    assert_same(trained(3), trained(3))
    assert any(not np.array_equal(array, trained(4)[name]) for name, array in trained(3).items())


def test_while_the_action_networks_learn_the_target_network_stands_still_and_the_other_way_round() -> None:
    ours = experienced()
    spec = WorkerSpec(
        networks=SHAPES,
        rules=DDPGRules(),
        tau=TAU,
        batch_size=4,
        learning_starts=1,
        target_sync_interval=2,
        replay_capacity=50,
        shared_replay=False,
        seed=0,
        float64=True,
    )
    worker = DDPGWorker(spec, range(4), *random_rows(SHAPES, 4))

    def target_side() -> dict[str, np.ndarray]:
        return {name: array for name, array in ours.state().items() if name.startswith("target.")}

    targets, first = target_side(), worker.state()
    for update in range(3):
        _, actors, critics = worker.learn(update, update + 1, update, update, chunk(CONTINUOUS, 5, 4, 0))
        _, back = push(ours, [[0, 1, 2, 3]], actors, critics)
        worker.pull(np.stack([back[k][0] for k in range(4)]), np.stack([back[k][1] for k in range(4)]))
        ours.observe(sequences(6, 4, UNIVERSAL, update))
    assert_same(target_side(), targets)
    trained = worker.state()
    assert not np.array_equal(trained["actor"], first["actor"])
    ours.train_target(25)
    assert_same(worker.state(), trained)
    assert any(not np.array_equal(array, targets[name]) for name, array in target_side().items())
