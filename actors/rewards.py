"""Calls the user's reward function in the form that it was written for, and checks every number that comes back.

Owns the call forms and the spreading of results over generations and agents.  Must not know how the completions came
to be nor what the rewards are used for.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.limits import WaitLimitError, call_with_limit
from learners.samples import FloatArray

logger = logging.getLogger(__name__)

Item = dict[str, Any]


class CallbackError(RuntimeError):
    """A user's function failed or returned what cannot be used; the message names the function and the item."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a reward function wants its arguments."""

    style: str
    """"per_agent": one list per agent; "prompts_first": the agents' prompts before them; "nested": one list of the
    agents' lists."""
    passes_item: bool
    passes_prompts: bool


def call_form(function: Callable[..., Any], num_agents: int) -> CallForm:
    """Read the call form off a signature.

    `num_agents + 1` positional parameters: prompts first.  Exactly one with several agents: nested.  Otherwise, `*args`
    included: one list per agent.  `batch_items` and `prompts` are passed to functions that name them or take
    `**kwargs`.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have no signature
        return CallForm("per_agent", passes_item=False, passes_prompts=False)
    keywords = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}
    spread = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    positional = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        and p.name != "batch_items"
        and p.default is p.empty
    ]
    style = "per_agent"
    if not spread and len(positional) == num_agents + 1:
        style = "prompts_first"
    elif not spread and len(positional) == 1 and num_agents > 1:
        style = "nested"
    prompts_by_name = ("prompts" in names or keywords) and not (
        style == "prompts_first" and "prompts" in {p.name for p in positional}
    )
    return CallForm(
        style,
        passes_item="batch_items" in names or keywords,
        passes_prompts=prompts_by_name,
    )


class RewardFunction:
    """A user's `reward_func` and `reward_processor`, called once per joint answer set of an item.

    Args:
        processor: applied to every number that the function returns; None: the number itself.
        timeout_s: longest wait for one call.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        processor: Callable[[float], Any] | None,
        *,
        num_agents: int,
        timeout_s: float,
    ) -> None:
        self._function = function
        self._name = _name(function)
        self._processor = processor
        self._num_agents = num_agents
        self._timeout_s = timeout_s
        self._form = call_form(function, num_agents)
        self._warned = False

    def __call__(
        self, completions: Sequence[Sequence[str]], prompts: Sequence[str], item: Item, item_idx: int
    ) -> FloatArray:
        """Processed rewards, float32 `[num_generations, num_agents]`.

        Args:
            completions: `completions[agent][generation]`.
            prompts: one per agent.

        Raises:
            CallbackError: the function raised, took too long, or returned something other than finite numbers of a
                usable length.
        """
        lists = [list(own) for own in completions]
        forms: dict[str, list[Any]] = {
            "per_agent": lists,
            "prompts_first": [list(prompts), *lists],
            "nested": [lists],
        }
        arguments = forms[self._form.style]
        keywords: dict[str, Any] = {}
        if self._form.passes_item:
            keywords["batch_items"] = [item]
        if self._form.passes_prompts:
            keywords["prompts"] = list(prompts)
        where = f"reward function {self._name} on item {item_idx}{describe_item(item)}"
        try:
            raw = call_with_limit(
                lambda: self._function(*arguments, **keywords), self._timeout_s, f"the {where}"
            )
        except WaitLimitError as error:
            raise CallbackError(f"{error}; give it a limit of its own, or raise reward_timeout_s") from error
        except Exception as error:
            raise CallbackError(f"{where} raised {type(error).__name__}: {error}") from error
        numbers = [self._process(value, where) for value in _flat(raw, where)]
        return self._spread(numbers, len(lists[0]), where)

    def _process(self, value: Any, where: str) -> float:
        number = _number(value, where)
        if self._processor is None:
            return number
        name = _name(self._processor)
        try:
            processed = self._processor(number)
        except Exception as error:
            raise CallbackError(
                f"reward processor {name} raised {type(error).__name__} on {number}: {error}"
            ) from error
        return _number(processed, f"reward processor {name} after {where}")

    def _spread(self, numbers: list[float], num_generations: int, where: str) -> FloatArray:
        """A result as long as there are generations is one reward per joint answer; else as long as there are agents,
        one per agent; a single number is everybody's."""
        rewards = np.asarray(numbers, np.float32)
        shape = (num_generations, self._num_agents)
        if len(numbers) == num_generations == self._num_agents > 1 and not self._warned:
            self._warned = True
            logger.warning(
                "reward function %s returned %d numbers, which could be one per generation or one per agent; they are "
                "taken as one per generation",
                self._name,
                len(numbers),
            )
        if len(numbers) in (1, num_generations):
            return np.broadcast_to(rewards[:, None], shape).copy()
        if len(numbers) == self._num_agents:
            return np.broadcast_to(rewards[None, :], shape).copy()
        raise CallbackError(
            f"{where} returned {len(numbers)} numbers; expected 1 (shared by all), {self._num_agents} (one per agent) "
            f"or {num_generations} (one per generation)"
        )


def describe_item(item: Item) -> str:
    """A row's own name, where it has one, in brackets for error messages."""
    for key in ("task_id", "id", "name", "uid", "idx"):
        if key in item:
            return f" ({key}={item[key]!r})"
    return ""


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _flat(raw: Any, where: str) -> list[Any]:
    if raw is None:
        raise CallbackError(f"{where} returned None; it must return a number or a list of numbers")
    if hasattr(raw, "tolist") and not isinstance(raw, str | bytes):  # torch tensors and numpy arrays
        raw = raw.tolist()
    values = list(raw) if isinstance(raw, list | tuple) else [raw]
    return [inner for value in values for inner in (value if isinstance(value, list | tuple) else [value])]


def _number(value: Any, where: str) -> float:
    if hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, int | float):
        raise CallbackError(f"{where} returned {value!r} ({type(value).__name__}), which is not a number")
    if not math.isfinite(value):
        raise CallbackError(f"{where} returned {value}, which is not finite")
    return float(value)
