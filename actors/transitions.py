"""Calls the user's `external_transition`: what the agents read in the next turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from actors.limits import WaitLimitError, call_with_limit
from actors.rewards import CallbackError, Item, describe_item


class Transition:
    """A user's transition, called with keywords before every turn but the first."""

    def __init__(self, function: Callable[..., Any], *, num_agents: int, timeout_s: float) -> None:
        self._function = function
        self._name = getattr(function, "__qualname__", repr(function))
        self._num_agents = num_agents
        self._timeout_s = timeout_s

    def __call__(
        self,
        *,
        item: Item,
        item_idx: int,
        prompt_history: Sequence[Sequence[str]],
        response_history: Sequence[Sequence[str]],
    ) -> list[str]:
        """The next turn's prompt of each agent.

        Args:
            prompt_history, response_history: `[agent][turn]`, all turns so far.

        Raises:
            CallbackError: it raised, took too long, or did not return one string per agent.
        """
        where = f"external_transition {self._name} on item {item_idx}{describe_item(item)}"
        try:
            prompts = call_with_limit(
                lambda: self._function(
                    prompt=item.get("prompt"),
                    agent_completions=[history[-1] for history in response_history],
                    num_agents=self._num_agents,
                    prompt_history_per_agent=[list(history) for history in prompt_history],
                    response_history_per_agent=[list(history) for history in response_history],
                ),
                self._timeout_s,
                f"the {where}",
            )
        except WaitLimitError as error:
            raise CallbackError(f"{error}; give it a limit of its own, or raise reward_timeout_s") from error
        except Exception as error:
            raise CallbackError(f"{where} raised {type(error).__name__}: {error}") from error
        if not isinstance(prompts, list | tuple) or not all(isinstance(prompt, str) for prompt in prompts):
            raise CallbackError(
                f"{where} returned {prompts!r}; it must return a list of {self._num_agents} strings"
            )
        if len(prompts) != self._num_agents:
            raise CallbackError(f"{where} returned {len(prompts)} prompts for {self._num_agents} agents")
        return list(prompts)
