"""Rewards, formatters and transitions: every call form and every kind of answer."""

from __future__ import annotations

import functools
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.limits import WaitLimitError, call_with_limit
from actors.prompts import PromptBuilder
from actors.rewards import CallbackError, RewardFunction
from actors.transitions import Transition

ROW = {"prompt": "p", "task_id": "HumanEval/7"}


def call(
    function: Any,
    completions: list[list[str]] | None = None,
    *,
    processor: Any = None,
    timeout_s: float = 5,
) -> np.ndarray:
    completions = [["a", "b", "c"], ["d", "e", "f"]] if completions is None else completions
    reward = RewardFunction(function, processor, num_agents=len(completions), timeout_s=timeout_s)
    return reward(completions, [f"p{i}" for i in range(len(completions))], ROW, 4)


def seen_by(make: Any, completions: list[list[str]] | None = None) -> dict[str, Any]:
    """What a function of the signature built by `make(record)` is called with."""
    seen: dict[str, Any] = {}

    def record(**values: Any) -> float:
        seen.update(values)
        return 0.0

    call(make(record), completions)
    return seen


A, B = ["a", "b", "c"], ["d", "e", "f"]


def test_one_list_per_agent() -> None:
    assert seen_by(lambda r: lambda x, y: r(x=x, y=y)) == {"x": A, "y": B}


def test_prompts_come_first_with_one_parameter_more_than_agents() -> None:
    assert seen_by(lambda r: lambda p, x, y: r(p=p, x=x, y=y)) == {"p": ["p0", "p1"], "x": A, "y": B}


def test_prompts_named_as_first_parameter_are_not_passed_twice() -> None:
    assert seen_by(lambda r: lambda prompts, x, y: r(p=prompts, x=x)) == {"p": ["p0", "p1"], "x": A}


def test_a_single_parameter_takes_the_list_of_lists() -> None:
    assert seen_by(lambda r: lambda everything: r(all=everything)) == {"all": [A, B]}


def test_spread_parameters_take_one_list_per_agent() -> None:
    assert seen_by(lambda r: lambda *lists: r(lists=lists)) == {"lists": (A, B)}


def test_rows_and_prompts_are_passed_to_functions_that_name_them() -> None:
    seen = seen_by(
        lambda r: lambda x, y, batch_items=None, prompts=None: r(items=batch_items, prompts=prompts)
    )
    assert seen == {"items": [ROW], "prompts": ["p0", "p1"]}
    seen = seen_by(lambda r: lambda x, y, *, batch_items: r(items=batch_items))
    assert seen == {"items": [ROW]}


def test_keyword_catch_all_gets_rows_and_prompts() -> None:
    assert seen_by(lambda r: lambda x, y, **rest: r(rest=rest)) == {
        "rest": {"batch_items": [ROW], "prompts": ["p0", "p1"]}
    }


def test_other_parameters_with_defaults_keep_them() -> None:
    assert seen_by(lambda r: lambda x, y, scale=3: r(x=x, scale=scale)) == {"x": A, "scale": 3}


def test_partial_functions_and_methods_are_read_by_what_is_left_to_fill() -> None:
    def scored(scale: float, x: list[str], y: list[str]) -> list[float]:
        return [scale * (len(a) + len(b)) for a, b in zip(x, y, strict=True)]

    class Judge:
        def score(self, x: list[str], y: list[str]) -> float:
            return float(len(x) + len(y))

        def __call__(self, x: list[str], y: list[str]) -> float:
            return 1.5

    assert call(functools.partial(scored, 0.5)).tolist() == [[1.0, 1.0]] * 3
    assert call(Judge().score).tolist() == [[6.0, 6.0]] * 3
    assert call(Judge()).tolist() == [[1.5, 1.5]] * 3


@pytest.mark.parametrize("function", [lambda c: [len(c)], lambda prompts, c: [len(c)], lambda p, c: [len(c)]])
def test_one_agent(function: Any) -> None:
    assert call(function, [["a", "b"]]).tolist() == [[2.0], [2.0]]


@pytest.mark.parametrize(
    "result", [0.5, [0.5], (0.5,), torch.tensor(0.5), torch.tensor([0.5]), np.float64(0.5), True]
)
def test_one_number_is_shared_by_all(result: Any) -> None:
    assert call(lambda x, y: result).tolist() == [[float(result if result is True else 0.5)] * 2] * 3


def test_as_many_as_generations_is_one_per_joint_answer() -> None:
    assert call(lambda x, y: torch.tensor([1, 2, 3])).tolist() == [[1, 1], [2, 2], [3, 3]]


def test_as_many_as_agents_is_one_per_agent() -> None:
    assert call(lambda x, y: [1, 2]).tolist() == [[1, 2]] * 3


def test_ambiguous_length_is_one_per_generation_and_warned_about_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reward = RewardFunction(lambda x, y: [1, 2], None, num_agents=2, timeout_s=5)
    for _ in range(2):
        assert reward([["a", "b"], ["c", "d"]], ["", ""], ROW, 0).tolist() == [[1, 1], [2, 2]]
    assert len([r for r in caplog.records if "one per generation" in r.message]) == 1


@given(
    agents=st.integers(1, 5),
    generations=st.integers(1, 5),
    numbers=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=6),
)
def test_spreading_follows_the_length(agents: int, generations: int, numbers: list[float]) -> None:
    completions = [["x"] * generations for _ in range(agents)]
    if len(numbers) not in (1, agents, generations):
        with pytest.raises(CallbackError, match=f"returned {len(numbers)} numbers"):
            call(lambda *lists: numbers, completions)
        return
    rewards = call(lambda *lists: numbers, completions)
    assert rewards.shape == (generations, agents)
    for g in range(generations):
        for a in range(agents):
            index = 0 if len(numbers) == 1 else g if len(numbers) == generations else a
            assert rewards[g, a] == np.float32(numbers[index])


def test_the_processor_sees_every_number_first() -> None:
    assert call(lambda x, y: [1, 2, 3], processor=lambda r: 10 * r + 1).tolist() == [
        [11, 11],
        [21, 21],
        [31, 31],
    ]


def boom(x: Any, y: Any) -> Any:
    raise KeyError("missing")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (boom, r"boom on item 4 \(task_id='HumanEval/7'\) raised KeyError"),
        (lambda x, y: None, "returned None"),
        (lambda x, y: "0.5", "returned '0.5' \\(str\\), which is not a number"),
        (lambda x, y: [0.1, None, 0.2], "returned None"),
        (lambda x, y: [0.1, float("nan"), 0.2], "returned nan, which is not finite"),
        (lambda x, y: float("inf"), "returned inf"),
        (lambda x, y: [], r"returned 0 numbers; expected 1 .*2 .*3"),
        (lambda x, y: [1] * 5, r"returned 5 numbers; expected 1 .*2 .*3"),
        (lambda x, y: {"reward": 1}, "which is not a number"),
    ],
)
def test_unusable_rewards_name_the_item_and_what_came_back(function: Any, message: str) -> None:
    with pytest.raises(CallbackError, match=message) as caught:
        call(function)
    assert "item 4" in str(caught.value)


def test_a_processor_that_fails_is_named() -> None:
    with pytest.raises(CallbackError, match=r"reward processor .* raised ZeroDivisionError on 0"):
        call(lambda x, y: 0, processor=lambda r: 1 / r)
    with pytest.raises(CallbackError, match=r"reward processor .* which is not a number"):
        call(lambda x, y: 0, processor=str)


def test_a_reward_that_hangs_is_interrupted() -> None:
    started = time.monotonic()
    with pytest.raises(CallbackError, match=r"item 4 .*took longer than 0\.2 s; .*reward_timeout_s"):
        call(lambda x, y: time.sleep(60), timeout_s=0.2)
    assert time.monotonic() - started < 30, "the sleep must have been cut short"


def test_limits_hold_outside_the_main_thread() -> None:
    caught: list[BaseException] = []

    def work() -> None:
        try:
            call_with_limit(lambda: time.sleep(60), 0.2, "a nap")
        except WaitLimitError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert [str(error) for error in caught] == ["a nap took longer than 0.2 s"]


def test_limits_hand_results_and_errors_through_and_restore_handlers() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    assert call_with_limit(lambda: 3, 5, "x") == 3
    with pytest.raises(ZeroDivisionError):
        call_with_limit(lambda: 1 / 0, 5, "x")
    assert signal.getsignal(signal.SIGUSR2) == before
    result: list[int] = []
    thread = threading.Thread(target=lambda: result.append(call_with_limit(lambda: 4, 5, "x")))
    thread.start()
    thread.join()
    assert result == [4]


def test_a_function_with_an_alarm_of_its_own_still_works() -> None:
    def guarded(x: Any, y: Any) -> float:
        def handler(*_: Any) -> None:
            raise TimeoutError

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(10)
        except TimeoutError:
            return -1.0
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return 1.0

    assert call(guarded).tolist() == [[-1.0, -1.0]] * 3


def test_without_formatters_the_row_is_the_prompt() -> None:
    builder = PromptBuilder(None, 2, passthrough=False)
    assert builder.first({"prompt": "p"}) == ["p", "p"]
    assert builder.later({"prompt": "p"}, ["x", "y"]) == ["x", "y"]
    with pytest.raises(CallbackError, match=r"agent 0 on item 3.*no `prompt` \(it has question\)"):
        builder.first({"question": "?"}, 3)


def test_later_turns_format_a_copy_of_the_row() -> None:
    seen: list[tuple[dict[str, Any], Any]] = []

    def plain(item: dict[str, Any]) -> str:
        seen.append((item, None))
        return f"plain {item['prompt']}"

    def taking(item: dict[str, Any], external_prompts: str | None = None) -> str:
        seen.append((item, external_prompts))
        return f"taking {item['prompt']}"

    row = {"prompt": "first", "extra": 1}
    builder = PromptBuilder([plain, taking], 2, passthrough=False)
    assert builder.first(row) == ["plain first", "taking first"]
    assert [external for _, external in seen] == [None, None]
    seen.clear()
    assert builder.later(row, ["e0", "e1"]) == ["plain e0", "taking e1"]
    assert seen == [
        ({"prompt": "e0", "extra": 1, "_original_prompt": "first"}, None),
        ({"prompt": "e1", "extra": 1, "_original_prompt": "first"}, "e1"),
    ]
    assert row == {"prompt": "first", "extra": 1}
    assert PromptBuilder([plain, taking], 2, passthrough=True).later(row, ["e0", "e1"]) == ["e0", "e1"]


@pytest.mark.parametrize("result", [None, 3, "", ["p"]])
def test_a_formatter_must_return_text(result: Any) -> None:
    builder = PromptBuilder([None, lambda item: result], 2, passthrough=False)
    with pytest.raises(CallbackError, match=r"of agent 1 on item 9 .*must be a non-empty string"):
        builder.first(ROW, 9)


def test_a_formatter_that_raises_is_named() -> None:
    with pytest.raises(
        CallbackError, match=r"boom1 of agent 0 on item 2 \(task_id='HumanEval/7'\) raised KeyError"
    ):
        PromptBuilder(boom1, 1, passthrough=False).first(ROW, 2)


def boom1(item: Any) -> str:
    return item["nothing"]


def test_the_number_of_formatters_must_fit() -> None:
    with pytest.raises(ValueError, match="3 formatters are given for 2 agents"):
        PromptBuilder([None] * 3, 2, passthrough=False)


HISTORY = {"prompt_history": [["p0", "q0"], ["p1", "q1"]], "response_history": [["a0", "b0"], ["a1", "b1"]]}


def test_a_transition_gets_prompt_last_completions_and_histories() -> None:
    seen: dict[str, Any] = {}

    def transition(**keywords: Any) -> tuple[str, str]:
        seen.update(keywords)
        return "x", "y"

    assert Transition(transition, num_agents=2, timeout_s=5)(item=ROW, item_idx=1, **HISTORY) == ["x", "y"]
    assert seen == {
        "prompt": "p",
        "agent_completions": ["b0", "b1"],
        "num_agents": 2,
        "prompt_history_per_agent": [["p0", "q0"], ["p1", "q1"]],
        "response_history_per_agent": [["a0", "b0"], ["a1", "b1"]],
    }


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda **k: ["x"], "returned 1 prompts for 2 agents"),
        (lambda **k: ["x", 3], "must return a list of 2 strings"),
        (lambda **k: "xy", "must return a list of 2 strings"),
        (lambda **k: None, "returned None"),
        (lambda **k: k["nothing"], "raised KeyError"),
        (lambda **k: time.sleep(60), r"took longer than 0\.2 s"),
    ],
)
def test_a_transition_that_fails_is_named_with_its_item(function: Any, message: str) -> None:
    with pytest.raises(CallbackError, match=message) as caught:
        Transition(function, num_agents=2, timeout_s=0.2)(item=ROW, item_idx=6, **HISTORY)
    assert "item 6 (task_id='HumanEval/7')" in str(caught.value)
