"""Training of the target network: it learns, its metrics mean what they say, and it continues where it stopped."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
import torch

from learners.optimiser import NonFiniteLossError
from learners.smarl.memory import MemorySet
from learners.smarl.pointer_network import PointerNetwork
from learners.smarl.target_learner import TargetLearner

SIZE = 4


def random_set(counts: dict[int, int], seed: int = 0) -> dict[int, MemorySet]:
    """For each N, so many random observations with random targets, never oneself."""
    rng = np.random.default_rng(seed)
    made = {}
    for agents, rows in counts.items():
        observations = rng.normal(size=(rows, agents, SIZE)).astype(np.float32)
        targets = (np.arange(agents) + rng.integers(1, agents, size=(rows, agents))) % agents
        masks = np.broadcast_to(~np.eye(agents, dtype=bool), (rows, agents, agents)).copy()
        made[agents] = MemorySet(observations, targets, masks, np.zeros(rows))
    return made


def learner(
    learning_rate: float = 0.01, *, hidden: int = 32, attention: Literal["additive", "dot"] = "additive"
) -> TargetLearner:
    torch.manual_seed(0)
    return TargetLearner(
        PointerNetwork(SIZE, hidden=hidden, attention=attention), learning_rate=learning_rate
    )


def logprobs(trained: TargetLearner, memory_set: dict[int, MemorySet]) -> list[np.ndarray]:
    """Log-probabilities of the stored targets, one entry at a time."""
    return [
        trained.network.logprobs(*(torch.from_numpy(column[i : i + 1]) for column in columns))
        .detach()
        .numpy()[0]
        for rows in memory_set.values()
        for columns in [(rows.observations, rows.targets, rows.masks)]
        for i in range(len(rows))
    ]


@pytest.mark.parametrize("attention", ["additive", "dot"])
def test_random_targets_of_mixed_numbers_are_learned_by_heart(attention: Literal["additive", "dot"]) -> None:
    memory_set, trained = random_set({3: 20, 4: 20}), learner(hidden=48, attention=attention)
    metrics = trained.train(memory_set, epochs=150, batch_size=20, rng=np.random.default_rng(1))
    assert metrics["target_accuracy"] > 0.99
    assert metrics["target_likelihood"] > 0.9
    assert metrics["entries"] == 40
    for agents, rows in memory_set.items():
        decoded, _ = trained.network.decode(torch.from_numpy(rows.observations), torch.from_numpy(rows.masks))
        assert (decoded.numpy() == rows.targets).mean() > 0.99, agents


def test_the_likelihood_rises() -> None:
    memory_set, trained = random_set({2: 5, 5: 10}), learner(0.003)
    before = np.mean([row.mean() for row in logprobs(trained, memory_set)])
    trained.train(memory_set, epochs=10, batch_size=8, rng=np.random.default_rng(0))
    assert np.mean([row.mean() for row in logprobs(trained, memory_set)]) > before + 0.02


def test_metrics_are_those_of_each_entry_by_itself() -> None:
    memory_set, trained = random_set({3: 7, 5: 4}), learner(1e-12)  # so slow that the weights stay
    metrics = trained.train(memory_set, epochs=2, batch_size=3, rng=np.random.default_rng(0))
    rows = logprobs(trained, memory_set)
    assert metrics["target_loss"] == pytest.approx(-np.mean([row.mean() for row in rows]), abs=1e-5)
    assert metrics["target_likelihood"] == pytest.approx(np.exp(np.concatenate(rows)).mean(), abs=1e-5)
    right = []
    for part in memory_set.values():
        columns = (torch.from_numpy(c) for c in (part.observations, part.targets, part.masks))
        right.append((trained.network.teacher_forced(*columns).argmax(-1).numpy() == part.targets).ravel())
    assert metrics["target_accuracy"] == pytest.approx(np.concatenate(right).mean())
    assert 0 < metrics["target_accuracy"] < 1


def test_one_step_is_adams_step_along_the_mean_gradient() -> None:
    """The first step of Adam moves each parameter by the learning rate against its gradient's sign."""
    memory_set, trained = random_set({3: 6}), learner(1e-3)
    rows = memory_set[3]
    loss = sum(
        -trained.network.logprobs(
            *(torch.from_numpy(c[i : i + 1]) for c in (rows.observations, rows.targets, rows.masks))
        ).sum()
        / (3 * 6)
        for i in range(6)
    )
    assert isinstance(loss, torch.Tensor)
    gradients = torch.autograd.grad(loss, list(trained.network.parameters()))
    before = trained.weights()
    trained.train(memory_set, epochs=1, batch_size=6, rng=np.random.default_rng(0))
    for (name, after), gradient in zip(trained.weights().items(), gradients, strict=True):
        clear = gradient.abs().numpy() > 1e-5  # eps and rounding decide below
        expected = before[name] - 1e-3 * np.sign(gradient.numpy())
        np.testing.assert_allclose(after[clear], expected[clear], atol=1e-5, err_msg=name)


def test_every_row_is_met_once_in_an_epoch_in_batches_of_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_set, trained = random_set({3: 10, 2: 5}), learner()
    met: list[tuple[int, list[float]]] = []
    real = PointerNetwork.logprobs

    def spy(
        self: PointerNetwork, observations: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        met.append((observations.shape[1], observations[:, 0, 0].tolist()))
        return real(self, observations, targets, mask)

    monkeypatch.setattr(PointerNetwork, "logprobs", spy)
    trained.train(memory_set, epochs=2, batch_size=4, rng=np.random.default_rng(0))
    epochs = [met[:5], met[5:]]
    for epoch in epochs:
        assert sorted(len(rows) for _, rows in epoch) == [1, 2, 4, 4, 4]
        for agents, part in memory_set.items():
            seen = [row for count, rows in epoch if count == agents for row in rows]
            assert sorted(seen) == sorted(part.observations[:, 0, 0].tolist())
    numbers = [[agents for agents, _ in epoch] for epoch in epochs]
    assert numbers[0] != numbers[1]  # the order of mini-batches
    composed = [sorted(sorted(rows) for _, rows in epoch) for epoch in epochs]
    assert composed[0] != composed[1]  # which rows share one


def test_the_generator_alone_decides_the_order() -> None:
    memory_set = random_set({3: 12, 4: 12})
    runs = []
    for seed, ordered in ((1, memory_set), (1, dict(reversed(memory_set.items()))), (2, memory_set)):
        trained = learner()
        trained.train(ordered, epochs=2, batch_size=5, rng=np.random.default_rng(seed))
        runs.append(np.concatenate([w.ravel() for w in trained.weights().values()]))
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


@pytest.mark.parametrize("after", [0, 3])
def test_a_restored_learner_continues_bit_for_bit(after: int) -> None:
    memory_set, original = random_set({3: 9, 4: 6}), learner()
    if after:
        original.train(memory_set, epochs=after, batch_size=4, rng=np.random.default_rng(0))
    state = original.state()
    torch.manual_seed(123)
    restored = TargetLearner(PointerNetwork(SIZE, hidden=32), learning_rate=0.01)
    restored.load_state(state)
    metrics = [
        each.train(memory_set, epochs=3, batch_size=4, rng=np.random.default_rng(1))
        for each in (original, restored)
    ]
    assert metrics[0] == metrics[1]
    ours, theirs = original.state(), restored.state()
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert int(ours["steps"]) == 5 * (after + 3)
    assert int(state["steps"]) == 5 * after  # a copy: training on does not reach it
    assert not np.array_equal(state["parameter.start"], ours["parameter.start"])


def test_states_of_other_networks_are_refused() -> None:
    trained = learner()
    with pytest.raises(ValueError, match=r"mean\.attention\.weight\.weight.*on one side only"):
        trained.load_state(learner(attention="dot").state())
    with pytest.raises(ValueError, match=r"has shape .* this target network needs"):
        trained.load_state(learner(hidden=16).state())


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_numbers_that_are_not_finite_never_reach_the_weights(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_set, trained = random_set({3: 4}), learner()
    trained.train(memory_set, epochs=1, batch_size=4, rng=np.random.default_rng(0))
    before = trained.state()
    if fault == "loss":
        memory_set[3].targets[1, 2] = 2  # oneself: impossible, so its logarithm is -inf
    else:
        trained.network.start.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(NonFiniteLossError, match=f"target network, mini-batch 0: the {fault} is not finite"):
        trained.train(memory_set, epochs=1, batch_size=4, rng=np.random.default_rng(0))
    after = trained.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_nothing_to_train_on_is_an_error() -> None:
    for memory_set, epochs, batch_size in (
        ({}, 1, 1),
        (random_set({3: 1}), 0, 1),
        (random_set({3: 1}), 1, 0),
    ):
        with pytest.raises(ValueError, match="must be at least 1"):
            learner().train(memory_set, epochs=epochs, batch_size=batch_size, rng=np.random.default_rng(0))
    with pytest.raises(ValueError, match="learning_rate 0 must be positive"):
        learner(0)
