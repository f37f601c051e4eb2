"""A critic that learns: a language model's backbone, a value head and their optimiser.

This module owns values of whole texts given as token ids.  It must not know Ray, agents, or how a text was
put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from learners.causal_forward import accepted_arguments, base_of
from learners.losses import critic_loss
from learners.minibatch_means import MiniBatchMeans
from learners.models import dtype_of, prepare_for_training
from learners.optimiser import Optimiser
from learners.padding import MicroBatch, Rows, TextInputs, deal_micro_batches, lengths_of, pad_texts
from learners.ranks import ALONE, Ranks
from learners.samples import IntArray, MiniBatches
from learners.value_head import ValueHead, save_head

Floats = NDArray[np.floating[Any]]
"""float64 for a float64 model, else float32."""


@dataclass(slots=True)
class CriticUpdate:
    """What one update did."""

    critic_loss: list[float] = field(default_factory=list)
    """Per mini-batch, unscaled, before its step."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`value`, the mean over the samples stepped, and `grad_norm`, the mean over the steps."""


class Critic:
    """A value of a text: the head's reading of the last hidden state of the text's last token."""

    def __init__(
        self,
        backbone: nn.Module,
        value_head: ValueHead,
        *,
        learning_rate: float,
        device: torch.device | str = "cpu",
        name: str = "critic",
        value_loss_coef: float = 0.6,
        micro_batch_tokens: int = 16384,
        gradient_checkpointing: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """Takes `backbone` over; of a causal language model only the part below the head is used and trained.

        `micro_batch_tokens` bounds the padded tokens of one forward pass; it changes memory and speed, not
        results.  `ranks` are the processes that train this critic together.
        """
        self.name = name
        self.device = torch.device(device)
        self._ranks = ranks
        base = base_of(backbone)
        self._dtype = torch.promote_types(dtype_of(base), torch.float32)
        self.backbone = ranks.place(base, self.device)
        self.updates_done = 0
        self._value_loss_coef = value_loss_coef
        self._micro_batch_tokens = micro_batch_tokens
        self.value_head = value_head.to(self._dtype)
        ranks.place(self.value_head, self.device)
        self._accepted = accepted_arguments(self.backbone)
        prepare_for_training(self.backbone, gradient_checkpointing=gradient_checkpointing)
        parameters = [*self.backbone.parameters(), *self.value_head.parameters()]
        self._optimiser = Optimiser(parameters, learning_rate, learner=name, ranks=ranks)

    def values(self, texts: Sequence[IntArray]) -> Floats:
        """Values [n] of `n` texts, without gradient; a text that occurs several times is read once."""
        distinct, which = _distinct(texts)
        values = np.zeros(len(distinct), dtype=torch.empty(0, dtype=self._dtype).numpy().dtype)
        with torch.no_grad():
            for part in self._micro_batches(distinct):
                read = self._forward(distinct, part.rows)
                if part.counts:
                    values[part.rows] = read.cpu().numpy()
        return self._ranks.sum_array(values)[which]

    def update(
        self, texts: Sequence[IntArray], td_targets: ArrayLike, minibatches: MiniBatches
    ) -> CriticUpdate:
        """One optimiser step per mini-batch, in their order, on `value_loss_coef * mean((y - V)^2)`.

        `td_targets` has shape [n] and stays as given.  Raises NonFiniteLossError before the step of the
        mini-batch at fault (before the first step, when a target is not finite).
        """
        target = torch.from_numpy(np.array(td_targets)).to(self.device, self._dtype)
        if target.shape != (len(texts),):
            raise ValueError(
                f"{self.name}: td_targets has shape {tuple(target.shape)}, for {len(texts)} texts"
            )
        self._optimiser.require_finite("td_targets", target)
        means = MiniBatchMeans(self.device)
        for number, minibatch in enumerate(minibatches):
            self._optimiser.zero_grad()
            members = np.asarray(minibatch, dtype=np.int64)
            distinct, which = _distinct([texts[i] for i in members])
            for part in self._micro_batches(distinct):
                rows = part.rows
                # Samples that share a text share its forward pass; each still has its own term in the loss.
                here = np.flatnonzero(np.isin(which, rows))
                row_of = np.empty(len(distinct), dtype=np.int64)
                row_of[rows] = np.arange(len(rows))
                value = self._forward(distinct, rows)[torch.from_numpy(row_of[which[here]]).to(self.device)]
                loss = critic_loss(value, target[torch.from_numpy(members[here]).to(self.device)])
                share = len(here) / len(members) if part.counts else 0.0
                # Sharding takes the mean of the ranks' gradients; each has its own samples.
                weight = share * self._ranks.size
                (loss * (self._value_loss_coef * weight)).backward()  # type: ignore[no-untyped-call]
                means.add(share, critic_loss=loss, value=value.mean())
            means.reduce(self._ranks.sum)
            means.add(1.0, grad_norm=self._optimiser.step(means.current("critic_loss"), number))
            means.close(len(members))
        self.updates_done += 1
        return CriticUpdate(
            critic_loss=means.per_minibatch("critic_loss"),
            metrics={
                "value": means.mean("value"),
                "grad_norm": means.mean("grad_norm", per_sample=False),
            },
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact continuation needs, for `torch.save`, on the rank that leads.  Tensors that are not
        sharded are the live ones."""
        return {
            "backbone": self._ranks.gather_all(self.backbone.state_dict()),
            "value_head": self._ranks.gather_all(self.value_head.state_dict()),
            "optimiser": self._optimiser.state_dict(),
            "updates_done": self.updates_done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`'s, whatever number of ranks wrote it."""
        self._ranks.load(self.backbone, state["backbone"])
        self._ranks.load(self.value_head, state["value_head"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.updates_done = int(state["updates_done"])

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the backbone in the Hugging Face layout and the value head beside it; one rank writes."""
        backbone: Any = self.backbone
        whole = self._ranks.gather_all(backbone.state_dict())
        head = self._ranks.gather_all(self.value_head.state_dict())
        if self._ranks.leads:
            backbone.save_pretrained(str(directory), state_dict=whole)
            save_head(head, directory)

    def _micro_batches(self, texts: Sequence[IntArray]) -> list[MicroBatch]:
        lengths = lengths_of(texts)[:, None]
        return deal_micro_batches(lengths, self._micro_batch_tokens, self._ranks.rank, self._ranks.size)

    def _forward(self, texts: Sequence[IntArray], rows: Rows) -> Tensor:
        """Values of the texts at `rows`, in their order."""
        inputs: TextInputs = pad_texts([texts[i] for i in rows]).to(self.device)
        arguments: dict[str, Any] = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
        if "position_ids" in self._accepted:
            arguments["position_ids"] = inputs.position_ids
        if "use_cache" in self._accepted:
            arguments["use_cache"] = False
        output = self.backbone(**arguments)
        row = torch.arange(len(rows), device=self.device)
        values: Tensor = self.value_head(output.last_hidden_state[row, inputs.last_column])
        return values


def _distinct(texts: Sequence[IntArray]) -> tuple[list[IntArray], Rows]:
    """The different texts in order of first occurrence, and for each text which of them it is."""
    numbers: dict[bytes, int] = {}
    distinct: list[IntArray] = []
    which = np.empty(len(texts), dtype=np.int64)
    for index, text in enumerate(texts):
        key = np.asarray(text, dtype=np.int64).tobytes()
        if key not in numbers:
            numbers[key] = len(distinct)
            distinct.append(text)
        which[index] = numbers[key]
    return distinct, which
