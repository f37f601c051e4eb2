"""Functions named in a config: what is found, how it travels, and how a wrong name is answered."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray import cloudpickle

from services.callables import reference_of, resolve
from services.config import ConfigError

REWARDS = """
import neighbour

FACTOR = 3

def scale(text):
    return FACTOR * len(text)

def reward(first, second):
    return [float(scale(a) - scale(b)) + neighbour.ZERO for a, b in zip(first, second)]

class Shaper:
    @staticmethod
    def halve(value):
        return value / 2

LIMIT = 7
"""


@pytest.fixture(autouse=True)
def _same_import_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if name.startswith("greenroom_callables_") or name in ("neighbour", "in_this_folder"):
            del sys.modules[name]


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "neighbour.py").write_text("ZERO = 0.0\n")
    (tmp_path / "rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "rewards.py"


def test_an_installed_module_s_function_is_found() -> None:
    assert resolve("math:hypot") is math.hypot
    assert resolve("os.path:join")("a", "b") == "a/b"


def test_a_function_is_returned_as_it_is() -> None:
    assert resolve(math.hypot) is math.hypot


def test_a_file_s_function_is_found_relative_and_absolute_and_only_once(rewards: Path) -> None:
    reward = resolve("rewards.py:reward")
    assert reward(["abc"], ["a"]) == [6.0]
    assert resolve(f"{rewards}:reward") is reward
    assert resolve("./rewards.py:scale").__globals__ is reward.__globals__


def test_two_files_of_the_same_name_stay_apart(rewards: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rewards.py").write_text("def reward(a, b):\n    return 9\n")
    assert resolve("rewards.py:reward") is not resolve("other/rewards.py:reward")
    assert resolve("other/rewards.py:reward")(1, 2) == 9


def test_dotted_attributes_are_followed(rewards: Path) -> None:
    assert resolve("rewards.py:Shaper.halve")(3) == 1.5


def test_modules_in_the_working_directory_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in_this_folder.py").write_text("def f():\n    return 5\n")
    monkeypatch.chdir(tmp_path)
    assert resolve("in_this_folder:f")() == 5


def test_a_file_s_function_works_in_a_process_that_cannot_import_it(rewards: Path, tmp_path: Path) -> None:
    rewards.write_text(REWARDS.replace("import neighbour", "class neighbour: ZERO = 0.0"))
    pickled = tmp_path / "reward.pkl"
    pickled.write_bytes(cloudpickle.dumps(resolve("rewards.py:reward")))
    rewards.unlink()
    script = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))(['abc'], ['a']))"
    done = subprocess.run(
        [sys.executable, "-c", script, str(pickled)], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout.strip() == "[6.0]"


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("reward", "'reward' does not name a function; write `package.module:function`"),
        ("rewards.py", "does not name a function"),
        (":reward", "does not name a function"),
        ("rewards.py:", "does not name a function"),
        ("nowhere.py:reward", "there is no file nowhere.py"),
        ("rewards.py:rewrad", "rewards.py has no 'rewrad'; did you mean 'reward'?"),
        ("rewards.py:Shaper.half", "Shaper has no 'half'; did you mean 'halve'?"),
        ("rewards.py:LIMIT", "is of type int, not a function"),
        ("no_such_package.rewards:f", "there is no module 'no_such_package'"),
        ("os.no_such_module:f", "there is no module 'os.no_such_module'"),
        ("math:hypott", "math has no 'hypott'; did you mean 'hypot'?"),
        ("some/path:f", "'some/path' is no module name"),
    ],
)
def test_a_wrong_reference_is_answered_with_the_remedy(rewards: Path, reference: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(reference)
    assert words in str(caught.value)
    assert repr(reference) in str(caught.value)


def test_what_goes_wrong_inside_the_file_is_told(rewards: Path) -> None:
    rewards.write_text("def f(:\n")
    with pytest.raises(ConfigError, match=r"rewards.py cannot be imported: SyntaxError: .*line 1"):
        resolve("rewards.py:f")
    rewards.write_text("import no_such_dependency\n")
    with pytest.raises(ConfigError, match="No module named 'no_such_dependency'"):
        resolve("rewards.py:f")
    rewards.write_text("def f():\n    return 1\n")
    assert resolve("rewards.py:f")() == 1


def test_a_dependency_missing_inside_a_module_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in_this_folder.py").write_text("import no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"in_this_folder cannot be imported: .*no_such_dependency"):
        resolve("in_this_folder:f")


def test_something_else_than_a_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 is no function"):
        resolve(3)  # type: ignore[arg-type]


def test_a_function_is_written_down_so_that_it_is_found_again(rewards: Path) -> None:
    for reference in ("math:hypot", f"{rewards}:reward", f"{rewards}:Shaper.halve"):
        assert reference_of(resolve(reference)) == reference
