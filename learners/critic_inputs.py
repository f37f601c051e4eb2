"""What a critic reads: the joint history of all agents (MAAC), or one agent's own (IAC)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from learners.samples import IntArray, Sample

CriticType = Literal["v", "q"]


@dataclass(frozen=True, slots=True)
class CriticLayout:
    """Who judges whom.

    kind "joint" (MAAC): one critic reads all agents' histories.  "own" (IAC): each agent's critic reads that agent's
    tokens.  "backbone" (IAC, shared model): a value head on the policy, no critic model.
    """

    kind: Literal["joint", "own", "backbone"]
    critic_type: CriticType
    critic_of_agent: tuple[int, ...] = ()
    """Agent -> critic; agents that were given one model object share one critic."""


@dataclass(frozen=True, slots=True)
class CriticReader:
    """Turns samples into what the critics of a layout read.

    Args:
        tokenizer: the first agent's; used by kind "joint" only.
        context_lengths: tokens that each critic can read; None where its model names no limit.
        truncate: cut texts that are too long from the left instead of refusing them.
    """

    layout: CriticLayout
    tokenizer: Any
    context_lengths: Sequence[int | None]
    truncate: bool

    def read(self, samples: Sequence[Sequence[Sample]]) -> list[list[IntArray]]:
        """Token ids per critic input list: one list for all agents ("joint"), one each ("own"), none ("backbone").

        Raises:
            ValueError: a text does not fit into its critic's context; names the item.
        """
        layout = self.layout
        if layout.kind == "backbone":
            return []
        if layout.kind == "own":
            texts = [own_tokens(own, layout.critic_type) for own in samples]
        else:
            joint = joint_texts(samples, layout.critic_type)
            # In mode v, all generations of a turn read the same text: it is encoded, and travels, once.
            distinct = list(dict.fromkeys(joint))
            encoded = self.tokenizer(distinct)["input_ids"] if distinct else []
            ids_of = {text: np.asarray(ids, np.int32) for text, ids in zip(distinct, encoded, strict=True)}
            texts = [[ids_of[text] for text in joint]]
        return [self._fit(ids, samples[agent], agent) for agent, ids in enumerate(texts)]

    def _fit(self, texts: list[IntArray], samples: Sequence[Sample], agent: int) -> list[IntArray]:
        limit = self.context_lengths[self.layout.critic_of_agent[agent]]
        if limit is None:
            return texts
        for ids, sample in zip(texts, samples, strict=True):
            if len(ids) > limit and not self.truncate:
                raise ValueError(
                    f"item {sample.item_idx}, turn {sample.turn_idx + 1}: the critic's text has {len(ids)} tokens, "
                    f"but its model reads at most {limit}. Shorten the prompts, use a critic with a longer context, "
                    "or set engine.truncate_prompts=true to cut from the left."
                )
        return [ids if len(ids) <= limit else ids[-limit:] for ids in texts]


def own_tokens(samples: Sequence[Sample], critic_type: CriticType) -> list[IntArray]:
    """IAC: each sample's prompt tokens (mode v), followed by its completion tokens (mode q)."""
    if critic_type == "v":
        return [sample.completion.prompt_ids for sample in samples]
    return [np.concatenate([s.completion.prompt_ids, s.completion.token_ids]) for s in samples]


def joint_texts(samples: Sequence[Sequence[Sample]], critic_type: CriticType) -> list[str]:
    """MAAC: one text per joint answer, from the agents' samples of the same item, turn and generation.

    Args:
        samples: `samples[agent][k]`, the k-th joint answer's part of each agent.

    Returns:
        The prompts in agent order, each headed by its agent's number; mode q adds the completions after them in the
        same form.  The form is fixed: a trained critic has learned it.
    """
    texts = []
    for parts in zip(*samples, strict=True):
        blocks = [f"[agent {part.agent_idx} prompt]\n{part.prompt}" for part in parts]
        if critic_type == "q":
            blocks += [f"[agent {part.agent_idx} completion]\n{part.completion.text}" for part in parts]
        texts.append("\n\n".join(blocks))
    return texts
