"""The target network against a plain float64 recomputation, and what must hold for every number of agents."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from learners.smarl.pointer_network import PointerNetwork, gumbel_noise

KINDS: list[Literal["additive", "dot"]] = ["additive", "dot"]
SIZE, HIDDEN = 3, 5
Weights = dict[str, NDArray[np.floating]]


def network(
    attention: Literal["additive", "dot"] = "additive", *, hidden: int = HIDDEN, scale: float = 2.0
) -> PointerNetwork:
    """A float64 network whose parameters are `scale` times wider than usual, so that it has opinions."""
    torch.manual_seed(3)
    made = PointerNetwork(SIZE, hidden=hidden, attention=attention).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(scale)
    return made


def no_self(batch: int, agents: int) -> torch.Tensor:
    return ~torch.eye(agents, dtype=torch.bool).expand(batch, -1, -1)


def case(batch: int, agents: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random observations, targets and a mask that forbids oneself and, here and there, one more."""
    rng = np.random.default_rng(seed)
    mask = no_self(batch, agents).numpy().copy()
    if agents > 2:
        for entry in mask:
            for agent, row in enumerate(entry):
                row[(agent + 1 + rng.integers(agents - 1)) % agents] &= rng.random() < 0.5
    targets = np.where(mask, rng.random(mask.shape), -1.0).argmax(-1)
    observations = rng.normal(size=(batch, agents, SIZE))
    return torch.from_numpy(observations), torch.from_numpy(targets), torch.from_numpy(mask)


def sigmoid(x: NDArray[np.floating]) -> NDArray[np.floating]:
    return 1 / (1 + np.exp(-x))


def gru(
    w: Weights, name: str, suffix: str, x: NDArray[np.floating], h: NDArray[np.floating]
) -> NDArray[np.floating]:
    """The GRU's equations (Cho et al., 2014, in torch's arrangement), one step of one sequence."""
    into = w[f"{name}.weight_ih_{suffix}"] @ x + w[f"{name}.bias_ih_{suffix}"]
    back = w[f"{name}.weight_hh_{suffix}"] @ h + w[f"{name}.bias_hh_{suffix}"]
    (ri, zi, ni), (rh, zh, nh) = np.split(into, 3), np.split(back, 3)
    reset, update = sigmoid(ri + rh), sigmoid(zi + zh)
    return (1 - update) * np.tanh(ni + reset * nh) + update * h


def score(w: Weights, name: str, key: NDArray[np.floating], query: NDArray[np.floating]) -> float:
    k = w[f"{name}.key.weight"] @ key
    q = w[f"{name}.query.weight"] @ query + w[f"{name}.query.bias"]
    if f"{name}.weight.weight" in w:
        return float(w[f"{name}.weight.weight"][0] @ np.tanh(k + q))
    return float(k @ q / math.sqrt(len(k)))


def slow_distributions(
    w: Weights, observations: NDArray[np.floating], mask: NDArray[np.bool_], targets: NDArray[np.int64] | None
) -> tuple[list[list[float]], list[int]]:
    """Probabilities over positions at each step of one sequence, agent by agent and position by position.

    Follows `targets`, or the likeliest position where there are none.  Returns what it followed too.
    """
    agents, hidden = len(observations), len(w["bridge.bias"])
    forward, backward, h = [], [], np.zeros(hidden)
    for o in observations:
        forward.append(h := gru(w, "encoder", "l0", o, h))
    h = np.zeros(hidden)
    for o in observations[::-1]:
        backward.insert(0, h := gru(w, "encoder", "l0_reverse", o, h))
    states = [np.concatenate(pair) for pair in zip(forward, backward, strict=True)]
    d = np.tanh(w["bridge.weight"] @ np.concatenate([forward[-1], backward[0]]) + w["bridge.bias"])
    previous, steps, followed = w["start"], [], []
    for agent in range(agents):
        d = gru(w, "decoder", "l0", np.concatenate([states[agent], previous]), d)
        attention = np.exp([score(w, "attention", state, d) for state in states])
        context = sum(a * state for a, state in zip(attention / attention.sum(), states, strict=True))
        query = np.concatenate([d, context])
        odds = [
            math.exp(score(w, "pointer", states[j], query)) if mask[agent, j] else 0.0 for j in range(agents)
        ]
        steps.append([odd / sum(odds) for odd in odds])
        followed.append(int(np.argmax(steps[-1])) if targets is None else int(targets[agent]))
        previous = states[followed[-1]]
    return steps, followed


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("agents", [2, 3, 6])
def test_logprobs_are_those_of_a_plain_recomputation(
    attention: Literal["additive", "dot"], agents: int
) -> None:
    net, (observations, targets, mask) = network(attention), case(4, agents)
    ours = net.logprobs(observations, targets, mask).detach().numpy()
    whole = net.teacher_forced(observations, targets, mask).detach().exp().numpy()
    for b in range(4):
        steps, _ = slow_distributions(
            net.weights(), observations[b].numpy(), mask[b].numpy(), targets[b].numpy()
        )
        np.testing.assert_allclose(whole[b], steps, atol=1e-12)
        theirs = [math.log(step[target]) for step, target in zip(steps, targets[b].tolist(), strict=True)]
        np.testing.assert_allclose(ours[b], theirs, atol=1e-10)


@pytest.mark.parametrize("attention", KINDS)
def test_probabilities_sum_to_one_over_what_is_allowed(attention: Literal["additive", "dot"]) -> None:
    observations, targets, mask = case(5, 7)
    probabilities = network(attention).teacher_forced(observations, targets, mask).exp()
    assert (probabilities[~mask] == 0).all()
    assert (probabilities[mask] > 0).all()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(5, 7, dtype=torch.float64))


@pytest.mark.parametrize("attention", KINDS)
def test_greedy_decoding_takes_the_likeliest_position_step_by_step(
    attention: Literal["additive", "dot"],
) -> None:
    net, (observations, _, mask) = network(attention), case(6, 5)
    targets, logprobs = net.decode(observations, mask)
    assert targets.dtype == torch.int64
    for b in range(6):
        steps, followed = slow_distributions(net.weights(), observations[b].numpy(), mask[b].numpy(), None)
        assert targets[b].tolist() == followed
        np.testing.assert_allclose(logprobs[b], [math.log(max(step)) for step in steps], atol=1e-10)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_sampled_sequences_come_as_often_as_their_probability_says(temperature: float) -> None:
    net, draws = network(), 20_000
    observations, _, _ = case(1, 3)
    mask = no_self(1, 3)
    noise = torch.from_numpy(gumbel_noise(np.random.default_rng(5), (draws, 3, 3)))
    sampled, logprobs = net.decode(
        observations.expand(draws, -1, -1), mask.expand(draws, -1, -1), temperature=temperature, noise=noise
    )
    # The eight joint choices, each with its probability at that temperature from the distributions of its own steps.
    sequences = [(a, b, c) for a in (1, 2) for b in (0, 2) for c in (0, 1)]
    squares = 0.0
    for sequence in sequences:
        steps, _ = slow_distributions(
            net.weights(), observations[0].numpy(), mask[0].numpy(), np.array(sequence)
        )
        hot = np.array(steps) ** (1 / temperature)
        hot /= hot.sum(-1, keepdims=True)
        probability = math.prod(hot[n, target] for n, target in enumerate(sequence))
        came = (sampled == torch.tensor(sequence)).all(-1)
        squares += (int(came.sum()) - draws * probability) ** 2 / (draws * probability)
        reported = [math.log(step[target]) for step, target in zip(steps, sequence, strict=True)]
        np.testing.assert_allclose(logprobs[came][:1], [reported][: int(came.any())], atol=1e-10)
    assert squares < 24.3  # chi-square, 7 degrees of freedom: 0.1 % lie above


def test_the_noise_alone_decides_a_sample() -> None:
    net, (observations, _, mask) = network(scale=0.5), case(8, 6)
    drawn = [gumbel_noise(np.random.default_rng(seed), (8, 6, 6)) for seed in (1, 1, 2)]
    first, again, other = (
        net.decode(observations, mask, noise=torch.from_numpy(noise))[0] for noise in drawn
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_gumbel_noise_is_standard() -> None:
    noise = gumbel_noise(np.random.default_rng(0), (100_000,))
    assert noise.dtype == np.float32
    assert abs(noise.mean() - 0.57722) < 0.02
    assert abs(noise.var() - math.pi**2 / 6) < 0.03


ANY_NUMBER = PointerNetwork(SIZE, hidden=16)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 50), st.integers(0, 2**32 - 1), st.booleans(), st.floats(0.1, 20))
def test_one_set_of_parameters_serves_any_number_and_nobody_targets_itself(
    agents: int, seed: int, greedy: bool, temperature: float
) -> None:
    rng = np.random.default_rng(seed)
    observations = torch.from_numpy((10 * rng.normal(size=(3, agents, SIZE))).astype(np.float32))
    noise = None if greedy else torch.from_numpy(gumbel_noise(rng, (3, agents, agents)))
    mask = no_self(3, agents)
    targets, logprobs = ANY_NUMBER.decode(observations, mask, temperature=temperature, noise=noise)
    assert targets.shape == (3, agents)
    assert ((targets >= 0) & (targets < agents)).all()
    assert (targets != torch.arange(agents)).all()
    forced = ANY_NUMBER.logprobs(observations, targets, mask).detach()
    torch.testing.assert_close(logprobs, forced, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attention", KINDS)
def test_permuting_encoder_states_permutes_the_pointer(attention: Literal["additive", "dot"]) -> None:
    net = network(attention)
    states = torch.randn(2, 6, 2 * HIDDEN, dtype=torch.float64)
    hidden = torch.randn(2, 1, HIDDEN, dtype=torch.float64)
    mask = torch.ones(2, 1, 6, dtype=torch.bool)
    mask[:, :, 2] = False
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    logits = net.pointer_logits(net.positions(states), hidden, mask)
    permuted = net.pointer_logits(net.positions(states[:, order]), hidden, mask[..., order])
    torch.testing.assert_close(permuted, logits[..., order], atol=1e-12, rtol=0)
    assert logits[mask].std() > 0.05


def test_results_do_not_depend_on_the_rest_of_the_batch() -> None:
    net, (observations, targets, mask) = network(), case(7, 4)
    noise = torch.from_numpy(gumbel_noise(np.random.default_rng(0), (7, 4, 4)))
    logprobs = net.logprobs(observations, targets, mask)
    together, _ = net.decode(observations, mask, noise=noise)
    for b in range(7):
        one = slice(b, b + 1)
        alone = net.logprobs(observations[one], targets[one], mask[one])
        torch.testing.assert_close(alone, logprobs[one], atol=1e-12, rtol=0)
        assert torch.equal(net.decode(observations[one], mask[one], noise=noise[one])[0], together[one])


def test_a_target_changes_only_what_comes_after_it() -> None:
    net, (observations, _, _) = network(), case(1, 4)
    mask = no_self(1, 4)
    one, other = torch.tensor([[1, 0, 0, 0]]), torch.tensor([[1, 2, 0, 0]])
    before, after = (net.teacher_forced(observations, targets, mask)[0] for targets in (one, other))
    assert torch.equal(before[:2], after[:2])
    assert ((before[2:] - after[2:]).nan_to_num().abs().amax(-1) > 1e-4).all()


def test_agents_see_one_another_in_both_directions() -> None:
    """The first agent's distribution depends on the last one's observation, and the other way round."""
    net, (observations, targets, _) = network(), case(1, 4)
    mask = no_self(1, 4)
    plain = net.teacher_forced(observations, targets, mask)[0]
    for changed, looked_at in ((3, 0), (0, 3)):
        moved = observations.clone()
        moved[0, changed] += 1
        difference = net.teacher_forced(moved, targets, mask)[0, looked_at] - plain[looked_at]
        assert difference.nan_to_num().abs().max() > 1e-4


def test_a_forbidden_target_is_impossible() -> None:
    logprobs = network().logprobs(torch.zeros(1, 2, SIZE).double(), torch.tensor([[1, 1]]), no_self(1, 2))
    assert logprobs[0].tolist() == [0.0, -math.inf]


def test_weights_travel() -> None:
    source, (observations, targets, mask) = network(), case(2, 3)
    torch.manual_seed(99)
    other = PointerNetwork(SIZE, hidden=HIDDEN).double()
    expected = source.logprobs(observations, targets, mask)
    assert not torch.allclose(other.logprobs(observations, targets, mask), expected)
    weights = source.weights()
    other.load_weights(weights)
    assert torch.equal(other.logprobs(observations, targets, mask), expected)
    weights["start"][:] = 7
    assert not (source.start == 7).any()
    assert not (other.start == 7).any()


def test_weights_of_another_network_are_refused() -> None:
    net = network()
    with pytest.raises(
        ValueError, match=r"attention\.weight\.weight, pointer\.weight\.weight on one side only"
    ):
        net.load_weights(network("dot").weights())
    with pytest.raises(ValueError, match=r"has shape .* universal_size or hidden differ"):
        net.load_weights(network(hidden=HIDDEN + 1).weights())


def test_what_does_not_fit_is_named() -> None:
    net, (observations, targets, mask) = network(), case(2, 3)
    empty = mask.clone()
    empty[1, 2] = False
    with pytest.raises(ValueError, match="entry 1, agent 2: the mask allows no target"):
        net.decode(observations, empty)
    with pytest.raises(ValueError, match="entry 1, agent 2: the mask allows no target"):
        net.logprobs(observations, targets, empty)
    wrong = targets.clone()
    wrong[1, 0] = 3
    with pytest.raises(ValueError, match=r"entry 1, agent 0: target 3 is not in 0\.\.2"):
        net.logprobs(observations, wrong, mask)
    with pytest.raises(ValueError, match=r"observations \(2, 3, 2\) must be"):
        net.decode(observations[..., :2], mask)
    with pytest.raises(ValueError, match=r"mask \(2, 3, 2\) must be"):
        net.decode(observations, mask[..., :2])
    with pytest.raises(ValueError, match=r"noise \(1, 3, 3\) must be"):
        net.decode(observations, mask, noise=torch.zeros(1, 3, 3))
    with pytest.raises(ValueError, match="temperature 0 must be positive"):
        net.decode(observations, mask, temperature=0, noise=torch.zeros(2, 3, 3))
    with pytest.raises(ValueError, match=r"targets \(2, 2\) must be"):
        net.logprobs(observations, targets[:, :2], mask)
    with pytest.raises(ValueError, match="attention 'cosine' is unknown"):
        PointerNetwork(SIZE, attention="cosine")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hidden 0 must be at least 1"):
        PointerNetwork(SIZE, hidden=0)
