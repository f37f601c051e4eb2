"""A policy that learns: a causal language model, its optimiser, and optionally a value head and a frozen
reference.

This module owns scoring and updating one agent's policy.  It must not know Ray, prompts as text, rewards, or
where advantages come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from learners.causal_forward import CompletionOutputs, completion_outputs
from learners.lora import LoraAdapter
from learners.losses import actor_loss, clipped_value_loss, reference_kl, truncated_importance
from learners.minibatch_means import MiniBatchMeans
from learners.models import buffers_of, dtype_of, freeze, prepare_for_training
from learners.optimiser import Optimiser
from learners.padding import MicroBatch, PolicyInputs, Rows, deal_micro_batches, lengths_of, pad_policy
from learners.ranks import ALONE, Ranks, whole
from learners.samples import IntArray, MiniBatches, TokenBatch
from learners.value_head import ValueHead, save_head

Floats = NDArray[np.floating[Any]]
"""float64 for a float64 model, else float32."""

ADAPTER_FOLDER = "adapter"
"""Below the folder of a model that has one."""
VALUE_HEAD_FOLDER = "value_head"

TaggedArray = tuple[str, NDArray[Any]]
"""A weight as numpy can hold it: the name of its torch dtype and the array, bfloat16 as its bits in
uint16."""


@dataclass(frozen=True, slots=True)
class PolicyScores:
    """What the policy, as it is now, says of `n` samples."""

    logprob: Floats
    """[n]: sum of the completion's token log-probabilities under the untempered policy; 0 for an empty
    one."""
    entropy: Floats
    """[n]: mean entropy, in nats, of the distributions its tokens were drawn from; 0 for an empty one."""
    reference_kl: Floats | None
    """[n]: estimated KL against the reference, where there is one."""
    values: Floats | None
    """[n]: the value head's, where there is one."""


@dataclass(slots=True)
class PolicyUpdate:
    """What one update did."""

    actor_loss: list[float] = field(default_factory=list)
    """Per mini-batch, before its step."""
    critic_loss: list[float] = field(default_factory=list)
    """Per mini-batch, unscaled, before its step; empty without a value head."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Means over the samples stepped (`entropy`, `logprob`, `value`) or over the steps (`grad_norm`)."""
    token_logprobs: dict[int, Floats] = field(default_factory=dict)
    """Per-token log-probabilities of the first mini-batch's samples, by their index in the batch.  These
    alone come from the weights that are also being sampled from: later mini-batches see weights already
    stepped."""


class Policy:
    """One agent's policy and everything that trains it, on one device."""

    def __init__(
        self,
        model: nn.Module,
        *,
        learning_rate: float,
        device: torch.device | str = "cpu",
        name: str = "policy",
        adapter: LoraAdapter | None = None,
        value_head: ValueHead | None = None,
        value_mode: Literal["v", "q"] = "v",
        value_loss_coef: float = 0.6,
        value_clip_range: float | None = None,
        reference: nn.Module | None = None,
        reference_device: torch.device | str | None = None,
        micro_batch_tokens: int = 16384,
        gradient_checkpointing: bool = False,
        importance_sampling_cap: float | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Takes `model` over: it is moved to `device`, and its dropout is off for good.

        `value_head` makes this the shared backbone of IAC: the head reads the last hidden state of the last
        prompt token (`value_mode` "v") or of the last completion token ("q"; of the last prompt token where
        the completion is empty), and one optimiser minimises `actor + value_loss_coef * critic`.  `reference`
        is frozen. `micro_batch_tokens` bounds the padded tokens of one forward pass; it changes memory and
        speed, not results.  `importance_sampling_cap` weighs every token of the actor's loss by
        `truncated_importance`, for which batches must hold the sampler's log-probabilities.  `adapter` is what
        trains of `model`, which then serves as `reference` too: it is asked without its adapter.
        `ranks` are the processes that train this policy together: each steps its share of every mini-batch, and all
        report the same.
        """
        self.name = name
        self.device = torch.device(device)
        self._ranks = ranks
        self._dtype = torch.promote_types(dtype_of(model), torch.float32)
        self.model = ranks.place(model, self.device)
        self.updates_done = 0
        self._adapter = adapter
        self._value_mode = value_mode
        self._value_loss_coef = value_loss_coef
        self._value_clip_range = value_clip_range
        self._micro_batch_tokens = micro_batch_tokens
        self._importance_sampling_cap = importance_sampling_cap
        self.value_head = None if value_head is None else value_head.to(self._dtype)
        self._reference = reference
        self._reference_device = torch.device(reference_device or self.device)
        if reference is not None and reference is not model:
            ranks.place(freeze(reference), self._reference_device)
        prepare_for_training(self.model, gradient_checkpointing=gradient_checkpointing)
        trained = list(self.model.parameters())
        if self.value_head is not None:
            ranks.place(self.value_head, self.device)
            trained += self.value_head.parameters()
        self._optimiser = Optimiser(trained, learning_rate, learner=name, ranks=ranks)

    def score(self, batch: TokenBatch) -> PolicyScores:
        """Log-probabilities, entropies, reference KL and values of `batch`, without gradient, in its
        order."""
        n = len(batch)
        precision = torch.empty(0, dtype=self._dtype).numpy().dtype
        logprob, entropy, kl, values = (np.zeros(n, dtype=precision) for _ in range(4))
        with torch.no_grad():
            for part in self._micro_batches(batch, np.arange(n)):
                rows = part.rows
                inputs = _inputs(batch, rows).to(self.device)
                outputs = self._forward(inputs)
                found = [(logprob, outputs.logprobs.sum(dim=-1))]
                found.append((entropy, _token_mean(outputs.entropies, inputs)))
                if self.value_head is not None:
                    found.append((values, self._values(outputs, inputs)))
                if self._reference is not None:
                    found.append((kl, self._reference_kl(outputs, inputs)))
                for table, numbers in found if part.counts else ():
                    table[rows] = numbers.cpu().numpy()
        total = self._ranks.sum_array
        return PolicyScores(
            logprob=total(logprob),
            entropy=total(entropy),
            reference_kl=None if self._reference is None else total(kl),
            values=None if self.value_head is None else total(values),
        )

    def update(
        self,
        batch: TokenBatch,
        advantages: ArrayLike,
        minibatches: MiniBatches,
        *,
        td_targets: ArrayLike | None = None,
        old_values: ArrayLike | None = None,
    ) -> PolicyUpdate:
        """One optimiser step per mini-batch, in their order; advantages and targets stay as given.

        `advantages`, `td_targets` and `old_values` have shape [n]; the latter two are needed with a value
        head and refused without.  Raises NonFiniteLossError before the step of the mini-batch at fault
        (before the first step, when the inputs are not finite).
        """
        if (self.value_head is None) != (td_targets is None) or (td_targets is None) != (old_values is None):
            raise ValueError(
                f"{self.name}: td_targets and old_values are both needed with a value head, "
                "and refused without one"
            )
        advantage = self._input("advantages", advantages, len(batch))
        target = None if td_targets is None else self._input("td_targets", td_targets, len(batch))
        old_value = None if old_values is None else self._input("old_values", old_values, len(batch))
        update = PolicyUpdate()
        means = MiniBatchMeans(self.device)
        for number, minibatch in enumerate(minibatches):
            self._optimiser.zero_grad()
            for part in self._micro_batches(batch, np.asarray(minibatch, dtype=np.int64)):
                rows = part.rows
                inputs = _inputs(batch, rows).to(self.device)
                outputs = self._forward(inputs)
                share = len(rows) / len(minibatch) if part.counts else 0.0
                logprob = outputs.logprobs.sum(dim=-1)
                weighted = logprob
                if self._importance_sampling_cap is not None:
                    weights = self._importance(outputs, inputs, batch, rows, self._importance_sampling_cap)
                    weighted = (outputs.logprobs * weights).sum(dim=-1)
                    means.add(share, importance_weight=_token_mean(weights, inputs).mean())
                index = torch.from_numpy(rows).to(self.device)
                actor = actor_loss(weighted, advantage[index])
                loss = actor
                if target is not None and old_value is not None:
                    value = self._values(outputs, inputs)
                    critic = clipped_value_loss(
                        value, old_value[index], target[index], self._value_clip_range
                    )
                    loss = actor + self._value_loss_coef * critic
                    means.add(share, critic_loss=critic, value=value.mean())
                # Sharding takes the mean of the ranks' gradients; each has its own samples.
                (loss * (share * self._ranks.size)).backward()  # type: ignore[no-untyped-call]
                entropy = _token_mean(outputs.entropies, inputs).mean()
                means.add(share, loss=loss, actor_loss=actor, logprob=logprob.mean(), entropy=entropy)
                if number == 0:
                    update.token_logprobs |= _by_index(outputs.logprobs.detach(), rows, batch)
            means.reduce(self._ranks.sum)
            means.add(1.0, grad_norm=self._optimiser.step(means.current("loss"), number))
            means.close(len(minibatch))
        update.token_logprobs = self._ranks.union(update.token_logprobs)
        update.actor_loss = means.per_minibatch("actor_loss")
        update.critic_loss = means.per_minibatch("critic_loss")
        update.metrics = {name: means.mean(name) for name in ("entropy", "logprob")}
        update.metrics["grad_norm"] = means.mean("grad_norm", per_sample=False)
        if self.value_head is not None:
            update.metrics["value"] = means.mean("value")
        if self._importance_sampling_cap is not None:
            update.metrics["importance_weight"] = means.mean("importance_weight")
        self.updates_done += 1
        return update

    def probe_logprobs(self, token_ids: IntArray) -> NDArray[np.float32]:
        """Log-probabilities, float32 [len - 1], of tokens 1 onwards of one fixed sequence of at least two
        tokens."""
        if len(token_ids) < 2:
            raise ValueError("a probe needs at least two tokens")
        inputs = pad_policy([token_ids[:1]], [token_ids[1:]]).to(self.device)
        with torch.no_grad():
            logprobs = completion_outputs(self.model, inputs).logprobs[0]
        return logprobs.float().cpu().numpy()

    def weights(self) -> dict[str, TaggedArray]:
        """The model's parameters under their Hugging Face names, tied duplicates left out, without the value
        head; nothing on a rank that does not lead.

        An adapter is merged in.  On the CPU the other arrays are views of the live parameters: copy or send them
        before the next update.
        """
        tagged = {}
        for name, weight in self.each_weight():  # every rank takes part in putting each of them together
            if self._ranks.leads:
                tagged[name] = _tagged(weight)
        return tagged

    def each_weight(self) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters whole, one at a time, on this rank's device, an adapter merged in, tied duplicates
        left out.  Every rank has to go through all of them."""
        if self._adapter is not None:
            return self._adapter.merged()
        return ((name, whole(parameter.detach())) for name, parameter in self.model.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact continuation needs, as tensors and numbers for `torch.save`.

        The reference is not part of it: it never changes, and comes from where it first came from; so do weights
        under an adapter.  Whole on the rank that leads; tensors that are not sharded are the live ones: save them
        before the next update.
        """
        head = self.value_head
        return {
            "model": self._ranks.gather_all(self._stateful()),
            "value_head": None if head is None else self._ranks.gather_all(head.state_dict()),
            "optimiser": self._optimiser.state_dict(),
            "updates_done": self.updates_done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`'s, whatever number of ranks wrote it; ValueError where one has a value head or
        adapter that the other lacks."""
        if (state["value_head"] is None) != (self.value_head is None):
            raise ValueError(f"{self.name}: the saved state and this policy differ in having a value head")
        if state["model"].keys() != self._stateful().keys():
            raise ValueError(
                f"{self.name}: the saved state and this policy train different parameters: is `lora` as it was?"
            )
        self._ranks.load(self.model, state["model"], strict=self._adapter is None)
        if self.value_head is not None:
            self._ranks.load(self.value_head, state["value_head"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.updates_done = int(state["updates_done"])

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the model in the Hugging Face layout, an adapter merged in, and a value head and the adapter alone
        below it; one rank writes."""
        model: Any = self.model
        leads = self._ranks.leads
        weights = {name: weight.cpu() for name, weight in self.each_weight() if leads} | buffers_of(
            self.model
        )
        adapter = None if self._adapter is None else self._ranks.gather_all(self._adapter.trained())
        head = None if self.value_head is None else self._ranks.gather_all(self.value_head.state_dict())
        if not leads:
            return
        model.save_pretrained(str(directory), state_dict=weights)
        if self._adapter is not None and adapter is not None:
            self._adapter.save(adapter, Path(directory) / ADAPTER_FOLDER)
        if head is not None:
            # Beside the model's files, vLLM would take it for a part of the model.
            save_head(head, Path(directory) / VALUE_HEAD_FOLDER)

    def _stateful(self) -> dict[str, Tensor]:
        """What of the model is in a checkpoint, as it lives."""
        return dict(self.model.state_dict() if self._adapter is None else self._adapter.trained())

    def _input(self, name: str, numbers: ArrayLike, n: int) -> Tensor:
        tensor = torch.from_numpy(np.array(numbers)).to(self.device, self._dtype)
        if tensor.shape != (n,):
            raise ValueError(
                f"{self.name}: {name} has shape {tuple(tensor.shape)}, the batch has {n} samples"
            )
        self._optimiser.require_finite(name, tensor)
        return tensor

    def _micro_batches(self, batch: TokenBatch, rows: Rows) -> list[MicroBatch]:
        prompts = lengths_of([batch.prompt_ids[i] for i in rows])
        completions = lengths_of([batch.completion_ids[i] for i in rows])
        lengths, ranks = np.stack([prompts, completions], axis=1), self._ranks
        plan = deal_micro_batches(lengths, self._micro_batch_tokens, ranks.rank, ranks.size)
        return [MicroBatch(rows[part.rows], part.counts) for part in plan]

    def _forward(self, inputs: PolicyInputs) -> CompletionOutputs:
        return completion_outputs(self.model, inputs, with_hidden=self.value_head is not None)

    def _importance(
        self, outputs: CompletionOutputs, inputs: PolicyInputs, batch: TokenBatch, rows: Rows, cap: float
    ) -> Tensor:
        """Weights of a micro-batch's tokens, [n, tokens]; 1 where there is no token."""
        if batch.sampled_logprobs is None:
            raise ValueError(f"{self.name}: importance weights need the sampler's log-probabilities")
        sampled = torch.zeros_like(outputs.logprobs)
        flat = np.concatenate([batch.sampled_logprobs[i] for i in rows])
        # A boolean mask is filled row by row, which is the order of the concatenated completions.
        sampled[inputs.completion_mask] = torch.from_numpy(flat).to(sampled)
        return truncated_importance(outputs.logprobs, sampled, cap)

    def _values(self, outputs: CompletionOutputs, inputs: PolicyInputs) -> Tensor:
        assert self.value_head is not None
        assert outputs.hidden is not None
        columns = inputs.value_columns(self._value_mode)
        rows = torch.arange(len(columns), device=columns.device)
        values: Tensor = self.value_head(outputs.hidden[rows, columns])
        return values

    def _reference_kl(self, outputs: CompletionOutputs, inputs: PolicyInputs) -> Tensor:
        assert self._reference is not None
        with nullcontext() if self._adapter is None else self._adapter.disabled():
            reference = completion_outputs(self._reference, inputs.to(self._reference_device)).logprobs
        return reference_kl(outputs.logprobs, reference.to(outputs.logprobs), inputs.completion_mask)


def _inputs(batch: TokenBatch, rows: Rows) -> PolicyInputs:
    return pad_policy([batch.prompt_ids[i] for i in rows], [batch.completion_ids[i] for i in rows])


def _token_mean(numbers: Tensor, inputs: PolicyInputs) -> Tensor:
    """Mean over each completion's tokens of `numbers` [n, tokens]; 0 for an empty one."""
    mask = inputs.completion_mask
    return numbers.where(mask, 0).sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)


def _by_index(logprobs: Tensor, rows: Rows, batch: TokenBatch) -> dict[int, Floats]:
    table = logprobs.cpu().numpy()
    return {int(i): table[row, : len(batch.completion_ids[i])] for row, i in enumerate(rows)}


def _tagged(parameter: Tensor) -> TaggedArray:
    tensor = parameter.detach().contiguous().cpu()
    tag = str(tensor.dtype).removeprefix("torch.")
    return tag, (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
