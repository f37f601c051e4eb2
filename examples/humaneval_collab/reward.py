"""The reward, prompts and second turn of collaborative coding on HumanEval.

Agent 0 writes a helper named `aux`, agent 1 the function that the problem asks for; their joint program runs
against the problem's tests.  The reward of one joint answer, in [0, 1], shared by both:

| part | reward |
|---|---|
| agent 0's code compiles and defines `aux` | 0.1 |
| agent 1's code compiles and defines the asked function | 0.1 |
| that function calls `aux` | 0.1 |
| share of the problem's assertions that hold | 0.5 x share |
| all of them hold, and the tests run to their end | 0.2 |
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.humaneval_collab.sandbox import Outcome, run_program

HELPER = "aux"
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is known of one joint answer; `outcome` is None where there was nothing to run."""

    defines_helper: bool
    defines_main: bool
    calls_helper: bool
    assertions: int
    outcome: Outcome | None

    @property
    def solved(self) -> bool:
        done = self.outcome is not None and self.outcome.status == "done"
        return done and self.outcome.failed == 0 and self.outcome.passed >= max(self.assertions, 1)  # type: ignore[union-attr]

    @property
    def reward(self) -> float:
        static = 0.1 * self.defines_helper + 0.1 * self.defines_main + 0.1 * self.calls_helper
        if self.outcome is None:
            return static
        tried = max(self.outcome.passed + self.outcome.failed, self.assertions, 1)
        return static + 0.5 * self.outcome.passed / tried + 0.2 * self.solved


def reward(
    helper_completions: Sequence[str], main_completions: Sequence[str], batch_items: Sequence[dict[str, Any]]
) -> list[float]:
    """One reward per joint answer of the item."""
    (item,) = batch_items
    return [judge(a, b, item).reward for a, b in zip(helper_completions, main_completions, strict=True)]


def judge(helper_completion: str, main_completion: str, item: dict[str, Any]) -> Judgement:
    """Compile, combine and run one joint answer."""
    entry_point = item["entry_point"]
    helper, main = extract_code(helper_completion), extract_code(main_completion)
    main_tree = _parse(main)
    if main_tree is None or _function(main_tree, entry_point) is None:
        # The answer may go on where the prompt, which ends in the function's description, left off.
        main = item["prompt"] + main_completion
        main_tree = _parse(main)
    helper_tree = _parse(helper)
    helper_function = None if helper_tree is None else _function(helper_tree, HELPER)
    main_function = None if main_tree is None else _function(main_tree, entry_point)
    assertions = sum(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(item["test"])))
    calls = main_function is not None and any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == HELPER
        for node in ast.walk(main_function)
    )
    outcome = None
    if main_function is not None:
        preamble = item["prompt"].split(f"def {entry_point}(")[0]  # the problem's own imports and functions
        parts = [preamble, helper if helper_tree is not None else "", main]
        outcome = run_program(
            "\n\n".join(parts), tests=item["test"], context=item["prompt"], entry_point=entry_point
        )
    return Judgement(helper_function is not None, main_function is not None, calls, assertions, outcome)


def extract_code(completion: str) -> str:
    """The first fenced block of a completion, or all of it."""
    fenced = _FENCE.search(completion)
    return fenced.group(1) if fenced else completion


def helper_prompt(item: dict[str, Any], external_prompts: str | None = None) -> str:
    """Agent 0: a helper for the problem."""
    if external_prompts is not None:
        return external_prompts
    return (
        f"Another programmer is going to solve this problem:\n\n{item['prompt']}\n\n"
        f"Write one helper function named `{HELPER}` for them. Answer with Python code alone.\n"
    )


def main_prompt(item: dict[str, Any], external_prompts: str | None = None) -> str:
    """Agent 1: the function itself."""
    if external_prompts is not None:
        return external_prompts
    return (
        f"Complete this function:\n\n{item['prompt']}\n\n"
        f"A helper function `{HELPER}` is there for you to call. Answer with the whole function as Python code alone.\n"
    )


def feedback(
    prompt: str,
    agent_completions: Sequence[str],
    num_agents: int,
    prompt_history_per_agent: Sequence[Sequence[str]],
    response_history_per_agent: Sequence[Sequence[str]],
) -> list[str]:
    """The second turn: each agent reads the problem again, what both wrote, and whether it compiles."""
    helper, main = (extract_code(text) for text in agent_completions)
    remarks = [
        f"The helper {'compiles' if _parse(helper) else 'does not compile'}.",
        f"The main function {'compiles' if _parse(main) else 'does not compile'}.",
    ]
    shown = f"The helper so far:\n{helper}\n\nThe main function so far:\n{main}\n\n{' '.join(remarks)}"
    tasks = (f"Write a better `{HELPER}`.", "Write a better main function.")
    return [f"{prompt}\n\n{shown}\n\n{task} Answer with Python code alone.\n" for task in tasks]


def _parse(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _function(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found[-1] if found else None
