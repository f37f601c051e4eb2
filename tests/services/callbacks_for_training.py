"""Reward, transition and the like for training tests; named in their configurations."""

from __future__ import annotations

from typing import Any


def letters(first: list[str], second: list[str]) -> list[float]:
    """Share of small letters over both answers: learnable within a few updates."""
    return [share(a + b) for a, b in zip(first, second, strict=True)]


def letters_per_agent(first: list[str], second: list[str]) -> list[float]:
    """The same for each agent apart; for one generation."""
    return [share(first[0]), share(second[0])]


def share(text: str) -> float:
    return sum("a" <= c <= "z" for c in text) / max(len(text), 1)


def follow(prompt: str, agent_completions: list[str], num_agents: int, **history: Any) -> list[str]:
    return [f"{prompt[:20]} again"] * num_agents


def number_of_samples(samples: list[Any]) -> dict[str, float]:
    return {"samples": float(len(samples))}


def shares(answers: list[str]) -> list[float]:
    """Of a single agent."""
    return [share(answer) for answer in answers]
