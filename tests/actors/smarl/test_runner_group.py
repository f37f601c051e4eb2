"""Groups of real environment runners that die, against plain runners that live."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import ray
import torch
from countdown import HOW, POINTER, able, ball_grid, rows, runner
from teams import assert_same

from actors.smarl.runner import TeamRunner
from services.smarl.runners import Collected, RunnerGroup, RunnerLostError

pytestmark = pytest.mark.ray

SPEC = ball_grid()
"""Episodes of seven steps."""


@pytest.fixture
def group(ray_cluster: None) -> Iterator[RunnerGroup]:
    """Two runners with two copies each and three agents."""
    made = RunnerGroup(SPEC, 2, 2, 3, lambda _: {"num_cpus": 0.1}, 60, lambda: ray.put(weights(WEIGHTS[-1])))
    yield made
    made.shutdown()


WEIGHTS = [0]
"""Which weights the target network has now."""


def weights(seed: int) -> dict[str, np.ndarray]:
    torch.manual_seed(seed)
    return POINTER.build().weights()


def kill(group: RunnerGroup, index: int) -> None:
    ray.kill(group._runners[index], no_restart=True)


def assert_collected(
    collected: Collected, actors: np.ndarray, played: Sequence[TeamRunner], steps: int
) -> None:
    """What plain runners collect in as many steps."""
    assert len(collected.chunks) == len(collected.sequences) == len(played)
    env_steps = 0
    for each, own, sequences in zip(played, collected.chunks, collected.sequences, strict=True):
        chunk, expected, progress = each.collect(steps, HOW, actors)
        for ours, theirs in ((ray.get(own), chunk), (ray.get(sequences), expected)):
            names = theirs.__slots__  # type: ignore[union-attr]
            assert_same({n: getattr(ours, n) for n in names}, {n: getattr(theirs, n) for n in names})
        env_steps += progress.alive
    assert collected.env_steps == env_steps


def test_a_lost_runner_costs_the_episode_and_no_more(group: RunnerGroup) -> None:
    actors = rows(SPEC, 3)
    handed = [ray.put(actors[:2]), ray.put(actors[2:])]
    assert group.copies == 4
    group.start([0, 1, 2])
    first = group.collect(4, HOW, handed)
    assert (first.steps, first.env_steps, first.over) == (4, 12, False)
    kill(group, 0)
    with pytest.raises(
        RunnerLostError, match=r"an environment runner died while .* environments to be stepped"
    ):
        group.collect(4, HOW, handed)
    assert group.restarts == 1

    group.start([0, 1, 2])  # again
    played = [runner(SPEC, envs=2), runner(SPEC, envs=2)]
    played[0].start([0, 1])
    played[1].start([2])
    assert_collected(group.collect(4, HOW, handed), actors, played, 4)
    last = group.collect(4, HOW, handed)
    assert_collected(last, actors, played, 4)
    assert (last.steps, last.over) == (3, True)
    assert [p.lengths.tolist() for p in last.progress] == [[7, 7], [7, 0]]

    group.start([5])  # for one runner alone: the other may be dead without harm
    kill(group, 1)
    played[0].start([5])
    assert_collected(group.collect(7, HOW, handed), actors, played[:1], 7)
    assert group.restarts == 1


def test_a_runner_that_died_between_episodes_is_replaced_with_present_weights_and_seats(
    group: RunnerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.WEIGHTS", [0, 1])
    kill(group, 0)
    group.set_target()
    kill(group, 1)
    group.seat(5)
    assert group.restarts == 2
    actors = able(SPEC, 5)
    expected = runner(SPEC, agents=5, weights=1).evaluate(range(5), 5, actors)
    assert expected.any()
    kill(group, 0)  # in the middle of an evaluation, which is asked again
    np.testing.assert_array_equal(group.evaluate(range(5), 5, [ray.put(actors)]), expected)
    assert group.restarts == 3
    group.start(range(4))
    played = [runner(SPEC, agents=5, envs=2, weights=1) for _ in range(2)]
    for each, episodes in zip(played, ([0, 1], [2, 3]), strict=True):
        each.start(episodes)
    assert_collected(group.collect(7, HOW, [ray.put(actors)]), actors, played, 7)
