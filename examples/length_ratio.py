"""A task that even a small model learns: two agents whose answers should differ in length and read like prose.

Agent 0 is to answer briefly, agent 1 at greater length, about `TARGET_RATIO` times as long; both should write in small
letters and spaces.  The reward is half how well the ratio fits, half the share of such characters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

TARGET_RATIO = 2.5
RATIO_WIDTH = 0.6
"""Standard deviation, in the logarithm of the ratio, at which the ratio's part of the reward falls off."""
VOCABULARY = frozenset("abcdefghijklmnopqrstuvwxyz ")


def ratio_score(short: str, long: str) -> float:
    """In (0, 1]; 1 where `long` is `TARGET_RATIO` times as long as `short`, in characters."""
    error = math.log((len(long) + 1) / (len(short) + 1)) - math.log(TARGET_RATIO)
    return math.exp(-0.5 * (error / RATIO_WIDTH) ** 2)


def vocabulary_score(text: str) -> float:
    """In [0, 1]: the share of small letters and spaces; 0 for an empty text."""
    return sum(character in VOCABULARY for character in text) / len(text) if text else 0.0


def reward(short_completions: Sequence[str], long_completions: Sequence[str]) -> list[float]:
    """One reward in [0, 1] per joint answer, shared by both agents."""
    return [
        0.5 * ratio_score(short, long) + 0.25 * (vocabulary_score(short) + vocabulary_score(long))
        for short, long in zip(short_completions, long_completions, strict=True)
    ]


def _problem(item: dict[str, Any]) -> str:
    """The function's name and the first sentence of its description: HumanEval's prompts without their examples."""
    prompt = item["prompt"]
    description = re.search(r'(?:"""|\'\'\')\s*(.+?)(?:\.\s|\n\s*\n|>>>|"""|\'\'\')', prompt, re.DOTALL)
    text = " ".join(description.group(1).split())[:160] if description else ""
    return f"{item.get('entry_point', 'task')}: {text}"


def brief(item: dict[str, Any], external_prompts: str | None = None) -> str:
    """Agent 0's prompt."""
    return f"{external_prompts or _problem(item)}\nIn short:"


def detailed(item: dict[str, Any], external_prompts: str | None = None) -> str:
    """Agent 1's prompt."""
    return f"{external_prompts or _problem(item)}\nIn detail:"


def feedback(
    prompt: str,
    agent_completions: Sequence[str],
    num_agents: int,
    prompt_history_per_agent: Sequence[Sequence[str]],
    response_history_per_agent: Sequence[Sequence[str]],
) -> list[str]:
    """The second turn: both agents are told the ratio that they reached."""
    short, long = agent_completions
    ratio = (len(long) + 1) / (len(short) + 1)
    advice = "closer" if ratio > TARGET_RATIO else "further apart"
    return [f"{' '.join(prompt.split())[:80]}\nratio {ratio:.1f}, {advice}"] * num_agents


def metrics(samples: Sequence[Any]) -> dict[str, float]:
    """Mean length, in characters, of each agent's answers."""
    lengths: dict[int, list[int]] = {}
    for sample in samples:
        lengths.setdefault(sample.agent_idx, []).append(len(sample.completion))
    return {f"characters_agent_{agent}": sum(own) / len(own) for agent, own in sorted(lengths.items())}
