"""Makes the agents' prompts out of dataset rows with the user's formatters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from actors.rewards import CallbackError, Item, describe_item

Formatter = Callable[..., Any]


class PromptBuilder:
    """Prompts of the first turn and of later ones.

    Args:
        formatters: one for all agents, one per agent, or None: the row's own `prompt`.
        passthrough: prompts of later turns go to the model as the transition made them.
    """

    def __init__(
        self, formatters: Formatter | Sequence[Formatter | None] | None, num_agents: int, *, passthrough: bool
    ) -> None:
        each = [formatters] * num_agents if formatters is None or callable(formatters) else list(formatters)
        if len(each) != num_agents:
            raise ValueError(
                f"{len(each)} formatters are given for {num_agents} agents: give one, or one per agent"
            )
        self._formatters = each
        self._takes_external = [f is not None and _takes(f, "external_prompts") for f in each]
        self._passthrough = passthrough

    def first(self, item: Item, item_idx: int = 0) -> list[str]:
        """One prompt per agent for the first turn.

        Raises:
            CallbackError: a formatter raised or did not return text; names the item and the agent.
        """
        return [self._format(agent, item, None, item_idx) for agent in range(len(self._formatters))]

    def later(self, item: Item, external_prompts: Sequence[str], item_idx: int = 0) -> list[str]:
        """One prompt per agent for a turn whose prompts a transition made.

        Unless passed through, the formatter sees a copy of the row with the transition's prompt as its `prompt` and the
        first one as `_original_prompt`.
        """
        if self._passthrough:
            return list(external_prompts)
        prompts = []
        for agent, external in enumerate(external_prompts):
            row = {**item, "prompt": external, "_original_prompt": item.get("prompt")}
            prompts.append(self._format(agent, row, external, item_idx))
        return prompts

    def _format(self, agent: int, row: Item, external: str | None, item_idx: int) -> str:
        formatter = self._formatters[agent]
        where = f"agent {agent} on item {item_idx}{describe_item(row)}"
        if formatter is None:
            if "prompt" not in row:
                raise CallbackError(
                    f"no formatter for {where}, and the row has no `prompt` (it has {', '.join(row)}): "
                    "give `formatters`, or a data set with prompts"
                )
            prompt = row["prompt"]
        else:
            name = getattr(formatter, "__qualname__", repr(formatter))
            where = f"formatter {name} of {where}"
            keywords = {"external_prompts": external} if self._takes_external[agent] else {}
            try:
                prompt = formatter(row, **keywords)
            except Exception as error:
                raise CallbackError(f"{where} raised {type(error).__name__}: {error}") from error
        if not isinstance(prompt, str) or not prompt:
            raise CallbackError(f"the prompt of {where} is {prompt!r}; it must be a non-empty string")
        return prompt


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
