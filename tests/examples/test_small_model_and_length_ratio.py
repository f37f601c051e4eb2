"""The first example: its model, its data, its reward and its configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import length_ratio
from examples.prepare import write_humaneval
from examples.small_model import make_small_model
from services.config import load_config
from services.sweep.space import read_space
from services.sweep.sweep import load_sweep

EXAMPLES = Path(__file__).parents[2] / "examples"
SWEEPS = sorted(EXAMPLES.glob("sweep_*.yaml"))
CONFIGS = sorted(set(EXAMPLES.glob("*.yaml")) - set(SWEEPS))


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
def test_a_small_model_is_made_the_same_every_time(architecture: str, tmp_path: Path) -> None:
    one = make_small_model(tmp_path / "one", architecture=architecture)
    two = make_small_model(tmp_path / "two", architecture=architecture)
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert (one / "tokenizer.json").read_bytes() == (two / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(one)
    model = AutoModelForCausalLM.from_pretrained(one)
    text = "def add(a, b):\n    return a + b  # ünïcode"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert max(tokenizer.get_vocab().values()) < model.config.vocab_size
    assert model(torch.tensor([ids])).logits.shape[-1] == model.config.vocab_size


def test_making_it_again_does_nothing_but_other_settings_do(tmp_path: Path) -> None:
    folder = make_small_model(tmp_path / "m")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    make_small_model(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    make_small_model(folder, seed=1)
    assert (folder / "model.safetensors").stat().st_mtime_ns != before


def test_humaneval_has_164_rows(tmp_path: Path) -> None:
    assert write_humaneval(tmp_path / "data" / "h.jsonl") == 164
    rows = [json.loads(line) for line in (tmp_path / "data" / "h.jsonl").read_text().splitlines()]
    assert len({row["task_id"] for row in rows}) == 164
    for row in rows:
        assert length_ratio.brief(row).startswith(f"{row['entry_point']}: ")
        assert len(length_ratio.detailed(row)) < 260


def test_rewards_by_hand() -> None:
    assert length_ratio.ratio_score("abc", "a" * 9) == pytest.approx(1.0)  # (9 + 1) / (3 + 1) is the target
    assert length_ratio.ratio_score("abc", "abc") == pytest.approx(
        0.3115, abs=1e-4
    )  # exp(-0.5 (ln 2.5 / 0.6)^2)
    assert length_ratio.vocabulary_score("ab 1") == 0.75
    assert length_ratio.vocabulary_score("") == 0
    assert length_ratio.reward(["abc", "ABC"], ["a" * 9, "A" * 9]) == [pytest.approx(1.0), pytest.approx(0.5)]


def test_feedback_tells_the_ratio() -> None:
    prompts = length_ratio.feedback("p", ["abc", "a" * 39], 2, [["x"], ["y"]], [["x"], ["y"]])
    assert prompts == ["p\nratio 10.0, closer"] * 2


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_example_configuration_is_valid(path: Path) -> None:
    load_config(path)


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_example_sweep_is_valid(path: Path) -> None:
    sweep, run = load_sweep(path)
    assert read_space(sweep, run)
