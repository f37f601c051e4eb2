"""The target network: a sequence of universal observations in, a sequence of targets out, with one set of parameters
for any number of agents.

Owns encoder, decoder, attention and pointer.  Knows neither how it is trained nor where observations come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Attention = Literal["additive", "dot"]


class Score(nn.Module):
    """How well each key answers a query.

    Additive: `v . tanh(K key + Q query)` (Bahdanau, Cho and Bengio, 2015); dot: `(K key) . (Q query) / sqrt(hidden)`.
    """

    def __init__(self, attention: Attention, key_size: int, query_size: int, hidden: int) -> None:
        super().__init__()
        self.key = nn.Linear(key_size, hidden, bias=False)
        self.query = nn.Linear(query_size, hidden)
        self.weight = nn.Linear(hidden, 1, bias=False) if attention == "additive" else None

    def forward(self, keys: Tensor, queries: Tensor) -> Tensor:
        """Scores [B, M, N] of keys [B, N, hidden], already projected, for queries [B, M, query_size]."""
        asked: Tensor = self.query(queries)
        if self.weight is None:
            return asked @ keys.transpose(1, 2) / math.sqrt(keys.shape[-1])
        scores: Tensor = self.weight((keys.unsqueeze(1) + asked.unsqueeze(2)).tanh())
        return scores.squeeze(-1)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Positions a pointer may choose, with everything the decoder's steps share."""

    states: Tensor
    """[B, N, 2 * hidden]"""
    attention_keys: Tensor
    """[B, N, hidden]"""
    pointer_keys: Tensor
    """[B, N, hidden]"""


class PointerNetwork(nn.Module):
    """Seq2Seq network with attention whose output layer points at input positions (Vinyals et al., 2015).

    Seed, target network of the agents: encoder and decoder are RNNs (here GRUs), the parameters are delta, and both
    sequences are ordered by agent number.  Step n emits agent n's target; the decoder reads agent n's encoder state
    and that of the position chosen at step n - 1.
    """

    def __init__(self, universal_size: int, hidden: int = 64, attention: Attention = "additive") -> None:
        """Parameters start from torch's global generator.

        Raises:
            ValueError: a size below 1 or an unknown attention.
        """
        super().__init__()
        if universal_size < 1 or hidden < 1:
            raise ValueError(f"universal_size {universal_size} and hidden {hidden} must be at least 1")
        if attention not in ("additive", "dot"):
            raise ValueError(f"attention {attention!r} is unknown; choose 'additive' or 'dot'")
        self.universal_size, self.hidden = universal_size, hidden
        width = 2 * hidden
        self.encoder = nn.GRU(universal_size, hidden, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(width, hidden)
        self.decoder = nn.GRU(2 * width, hidden, batch_first=True)
        self.attention = Score(attention, width, hidden, hidden)
        self.pointer = Score(attention, width, hidden + width, hidden)
        self.start = nn.Parameter(torch.empty(width).uniform_(-1, 1) / math.sqrt(hidden))

    def logprobs(self, observations: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        """`ln p(a_n | o_0 .. o_(N-1), a_<n)` [B, N] of given targets, by teacher forcing.

        Args:
            observations: [B, N, universal_size], in agent order.
            targets: [B, N] int64.
            mask: [B, N, N] bool, True where agent n may choose position j.

        A target that the mask forbids has -inf.

        Raises:
            ValueError: shapes that do not fit, a target that is no position, or an agent without any choice.
        """
        return self.teacher_forced(observations, targets, mask).gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    def teacher_forced(self, observations: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        """Log-probabilities [B, N, N] of every position at every step, given the targets before it.

        Arguments and errors as in `logprobs`.  Additive attention holds about `2 * B * N * N * hidden` numbers for
        the gradient: the mini-batch bounds the memory.
        """
        self._check(observations, mask)
        batch, agents = observations.shape[:2]
        if targets.shape != (batch, agents):
            raise ValueError(f"targets {tuple(targets.shape)} must be [B, N] = {(batch, agents)}")
        outside = (targets < 0) | (targets >= agents)
        if bool(outside.any()):
            entry, agent = outside.nonzero()[0].tolist()
            raise ValueError(
                f"entry {entry}, agent {agent}: target {int(targets[entry, agent])} is not in 0..{agents - 1}"
            )
        encoded, hidden = self.encode(observations)
        chosen = targets[:, :-1, None].expand(-1, -1, encoded.states.shape[-1])
        previous = torch.cat(
            [self.start.expand(batch, 1, -1), encoded.states.gather(1, chosen)],
            1,
        )
        # Attention does not feed the recurrence, so that all steps run in one call.
        outputs, _ = self.decoder(torch.cat([encoded.states, previous], -1), hidden.unsqueeze(0))
        return self.pointer_logits(encoded, outputs, mask).log_softmax(-1)

    @torch.no_grad()
    def decode(
        self, observations: Tensor, mask: Tensor, *, temperature: float = 1.0, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Targets [B, N] int64 and their log-probabilities [B, N], each step following the ones before.

        Without `noise` the likeliest target of each step; with standard Gumbel noise [B, N, N] (`gumbel_noise`) a
        sample of `softmax(logits / temperature)`.  Reported log-probabilities are those of temperature 1.

        Raises:
            ValueError: shapes that do not fit, an agent without any choice, or a temperature that is not positive.
        """
        self._check(observations, mask)
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(
                f"temperature {temperature} must be positive and finite; leave out noise for greedy"
            )
        if noise is not None:
            if noise.shape != mask.shape:
                raise ValueError(f"noise {tuple(noise.shape)} must be [B, N, N] = {tuple(mask.shape)}")
            noise = noise.to(observations)
        batch, agents = observations.shape[:2]
        encoded, hidden = self.encode(observations)
        entries = torch.arange(batch, device=observations.device)
        previous = self.start.expand(batch, -1)
        targets, logprobs = [], []
        for agent in range(agents):
            hidden = torch.gru_cell(
                torch.cat([encoded.states[:, agent], previous], -1),
                hidden,
                *self.decoder.all_weights[0],
            )
            logits = self.pointer_logits(encoded, hidden.unsqueeze(1), mask[:, agent : agent + 1]).squeeze(1)
            chosen = (logits if noise is None else logits / temperature + noise[:, agent]).argmax(-1)
            targets.append(chosen)
            logprobs.append(logits.log_softmax(-1)[entries, chosen])
            previous = encoded.states[entries, chosen]
        return torch.stack(targets, 1), torch.stack(logprobs, 1)

    def encode(self, observations: Tensor) -> tuple[Encoded, Tensor]:
        """Positions of [B, N, universal_size] and the decoder's first state [B, hidden]."""
        states, last = self.encoder(observations)
        hidden: Tensor = self.bridge(torch.cat([last[0], last[1]], -1)).tanh()
        return self.positions(states), hidden

    def positions(self, states: Tensor) -> Encoded:
        """Encoder states [B, N, 2 * hidden] with their projections."""
        return Encoded(states, self.attention.key(states), self.pointer.key(states))

    def pointer_logits(self, encoded: Encoded, hidden: Tensor, mask: Tensor) -> Tensor:
        """Logits [B, M, N] of M decoder states [B, M, hidden] over N positions, -inf outside `mask` [B, M, N].

        A pure function that treats positions as a set: permuted positions permute the logits.  Attention reads every
        position, also those that may not be chosen: whom an agent must not target still matters to it.
        """
        weights = self.attention(encoded.attention_keys, hidden).softmax(-1)
        context = weights @ encoded.states
        logits: Tensor = self.pointer(encoded.pointer_keys, torch.cat([hidden, context], -1))
        return logits.masked_fill(~mask, -math.inf)

    def weights(self) -> dict[str, NDArray[np.floating]]:
        """A copy of every parameter by name."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self.named_parameters()}

    def load_weights(self, weights: Mapping[str, NDArray[np.floating]]) -> None:
        """Takes over `weights` of a network of the same sizes and attention.

        Raises:
            ValueError: names or shapes of another network; nothing is changed then.
        """
        own = dict(self.named_parameters())
        if own.keys() != weights.keys():
            odd = sorted(own.keys() ^ weights.keys())
            raise ValueError(f"weights of another target network: {', '.join(odd)} on one side only")
        for name, parameter in own.items():
            if parameter.shape != weights[name].shape:
                raise ValueError(
                    f"{name} has shape {weights[name].shape}, this target network needs {tuple(parameter.shape)}: "
                    "universal_size or hidden differ"
                )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(torch.from_numpy(np.array(weights[name])))

    def _check(self, observations: Tensor, mask: Tensor) -> None:
        if observations.ndim != 3 or observations.shape[-1] != self.universal_size:
            raise ValueError(
                f"observations {tuple(observations.shape)} must be [B, N, universal_size {self.universal_size}]"
            )
        batch, agents, _ = observations.shape
        if mask.shape != (batch, agents, agents):
            raise ValueError(f"mask {tuple(mask.shape)} must be [B, N, N] = {(batch, agents, agents)}")
        empty = ~mask.any(-1)
        if bool(empty.any()):
            entry, agent = empty.nonzero()[0].tolist()
            raise ValueError(
                f"entry {entry}, agent {agent}: the mask allows no target; every agent needs at least one"
            )


def gumbel_noise(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Standard Gumbel noise, for `PointerNetwork.decode`."""
    return rng.gumbel(size=shape).astype(np.float32)
