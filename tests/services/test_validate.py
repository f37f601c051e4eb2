"""A run checked as a whole before anything is loaded: every problem is found, named and answered."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    T5Config,
)

from services import model_checks
from services.composition import formatters_of, models_of
from services.config import ConfigError, EngineConfig, IACConfig, MAACConfig, load_config
from services.validate import CheckedRun, check_run, validate

ONE_TURN = MAACConfig(num_turns=1, max_new_tokens=16)
ROWS = [{"prompt": "w1 w2"}]


def make_tokenizer(size: int, **special: str) -> PreTrainedTokenizerFast:
    words = {"<eos>": 0, "<unk>": 1, **{f"w{i}": i for i in range(2, size)}}
    core = Tokenizer(WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", **({"eos_token": "<eos>"} | special)
    )


def make_model(folder: Path, vocabulary: int, *, tokenizer: int | None = None, **shape: int) -> Path:
    """A folder with a tiny model of `vocabulary` ids, and a tokenizer of `tokenizer` (else as many)."""
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    config = LlamaConfig(vocab_size=vocabulary, num_hidden_layers=1, intermediate_size=8, **(sizes | shape))
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer(tokenizer or vocabulary).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `small` (40 ids), `large` (60), `narrow` (attention heads of 16) and `misfit` (tokenizer too large)."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "small", 40)
    make_model(folder / "large", 60)
    make_model(folder / "narrow", 40, num_attention_heads=2)
    make_model(folder / "misfit", 40, tokenizer=41)
    return folder


@pytest.fixture(autouse=True)
def _here(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for constants in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(models)


def reward(first: list[str], second: list[str]) -> list[float]:
    return [0.0 for _ in first]


def shout(item: dict[str, Any]) -> str:
    return str(item)


def go_on(**_: Any) -> list[str]:
    return ["a", "b"]


def check(args: Any = ONE_TURN, **changed: Any) -> CheckedRun:
    good: dict[str, Any] = {
        "agent_model": "small",
        "critic_model": "small",
        "reward_func": reward,
        "train_dataset": ROWS,
        "engine": EngineConfig(backend="transformers"),
    }
    return check_run(args, **(good | changed))


def problems_of(args: Any = ONE_TURN, **changed: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(args, **changed)
    return caught.value.problems


def test_a_sound_run_comes_back_spread_out_per_agent() -> None:
    run = check(IACConfig(num_turns=1, max_new_tokens=8), formatters=[shout, None])
    assert run.models == (["small", "small"], ["small", "small"], ["small", "small"])
    assert run.tokenizers[0] is run.tokenizers[1]
    assert run.tokenizers[0].pad_token == "<eos>"
    assert run.reward_func is reward
    assert run.formatters == [shout, None]
    assert run.train_rows is ROWS
    assert run.eval_rows is None


def test_heterogeneous_agents_with_critics_that_fit_are_accepted() -> None:
    two = ["small", "large"]
    run = check(
        IACConfig(num_turns=1, max_new_tokens=8), agent_model=None, agents=two, critic_model=None, critics=two
    )
    assert [len(tokenizer) for tokenizer in run.tokenizers] == [40, 60]
    # A critic may know more ids than its agent's tokenizer has.
    check(IACConfig(num_turns=1, max_new_tokens=8), critic_model="large")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"agent_model": None}, ["agent_model: missing"]),
        ({"agents": ["small", "small"]}, ["agent_model: given together with agents"]),
        ({"agent_model": None, "agents": ["small"]}, ["agents: 1 models given where 2 are needed"]),
        ({"agent_model": None, "agents": "small"}, ["agents: 'small' is no list"]),
        ({"critic_model": None}, ["critic_model: missing; give the model of the one critic"]),
        ({"critics": ["small"]}, ["critic_model: given together with critics"]),
        (
            {"critic_model": None, "critics": ["small", "small"]},
            ["critics: 2 models given where 1 are needed"],
        ),
        ({"critic_model": ["small"]}, ["critic_model: is a list"]),
        ({"tokenizer": ["small"]}, ["tokenizer: 1 tokenizers given where 2 are needed"]),
        ({"formatters": [shout]}, ["formatters: 1 formatters given where 2 are needed"]),
        ({"formatters": [shout, 3]}, ["formatters[1]: 3 is no function"]),
        ({"reward_func": None}, ["reward_func: missing"]),
        (
            {"reward_func": "math:hypott"},
            ["reward_func: 'math:hypott': math has no 'hypott'; did you mean 'hypot'"],
        ),
        ({"metrics_callback": "nowhere:f"}, ["metrics_callback: 'nowhere:f': there is no module 'nowhere'"]),
        ({"train_dataset": None}, ["train_dataset: missing"]),
        ({"train_dataset": []}, ["train_dataset: holds no rows"]),
        (
            {"train_dataset": [{"question": "a"}]},
            ["train_dataset: row 0 has no `prompt` (its keys: question)"],
        ),
        ({"eval_dataset": "nope.jsonl"}, ["eval_dataset: 'nope.jsonl' does not exist"]),
        ({"agent_model": "./nope"}, ["agent_model: './nope' does not exist"]),
        ({"critic_model": "a/b/c"}, ["critic_model: 'a/b/c' does not exist"]),
        ({"critic_model": "small/nope"}, ["critic_model: 'small/nope' does not exist"]),
        ({"critic_model": "owner/name"}, ["critic_model: 'owner/name' is neither a folder"]),
        ({"critic_model": "nope"}, ["critic_model: 'nope' is neither a folder"]),
        (
            {"critic_model": "small/config.json"},
            ["critic_model: 'small/config.json' is a file; give the folder"],
        ),
        ({"critic_model": 3}, ["critic_model: an object of type int is no transformers model"]),
        ({"tokenizer": 3}, ["tokenizer: an object of type int is no tokenizer"]),
        ({"tokenizer": "nope"}, ["tokenizer: 'nope' is neither a folder"]),
    ],
)
def test_each_wrong_argument_is_named_with_the_remedy(changed: dict[str, Any], expected: list[str]) -> None:
    found = problems_of(**changed)
    assert len(found) == len(expected), found
    for problem, start in zip(found, expected, strict=True):
        assert problem.startswith(start)


def test_a_formatter_makes_a_row_s_prompt_unnecessary() -> None:
    check(train_dataset=[{"question": "a"}], formatters=shout)
    assert problems_of(train_dataset=[{"question": "a"}], formatters=[shout, None])


def test_several_turns_need_a_transition() -> None:
    two_turns = MAACConfig(max_new_tokens=16)
    (problem,) = problems_of(two_turns)
    assert problem.startswith("external_transition: missing, but args.num_turns=2")
    check(two_turns, external_transition=go_on)


def test_a_shared_backbone_takes_no_critic() -> None:
    shared = IACConfig(num_turns=1, max_new_tokens=8, use_separate_critic=False)
    (problem,) = problems_of(shared)
    assert problem.startswith("critic_model: given, but args.use_separate_critic=false")
    (problem,) = problems_of(shared, critic_model=None, critics=["small", "small"])
    assert problem.startswith("critics: given, but args.use_separate_critic=false")
    assert check(shared, critic_model=None).models.critics == []


def test_separate_critics_of_iac_need_a_source_for_each() -> None:
    iac = IACConfig(num_turns=1, max_new_tokens=8)
    (problem,) = problems_of(iac, critic_model=None)
    assert "or set args.use_separate_critic=false" in problem
    (problem,) = problems_of(iac, critic_model=None, critics=["small"])
    assert problem.startswith("critics: 1 models given where 2 are needed")


def test_vocabularies_that_do_not_fit_are_found_per_critic() -> None:
    (problem,) = problems_of(agent_model="large")
    assert problem.startswith(
        "critic_model: 'small': its vocabulary has 40 ids, 0 to 39, but the tokenizer gives ids up to 59, and it reads "
        "with the tokenizer of 'large'"
    )
    # The shared critic reads with the first agent's tokenizer only; independent critics each with their agent's.
    two = ["small", "large"]
    check(agent_model=None, agents=two)
    (problem,) = problems_of(IACConfig(num_turns=1, max_new_tokens=8), agent_model=None, agents=two)
    assert problem.startswith("critic_model: 'small': its vocabulary has 40 ids")
    assert "the tokenizer of 'large'" in problem
    problem, _ = problems_of(agent_model="misfit")
    assert problem.startswith("agent_model: 'misfit': its vocabulary has 40 ids")
    assert "up to 40" in problem
    (problem,) = problems_of(tokenizer=["small", "large"])
    assert problem.startswith("agent_model: 'small': its vocabulary")


def test_narrow_attention_heads_are_refused_for_vllm_on_the_cpu_only() -> None:
    vllm = EngineConfig()
    (problem,) = problems_of(agent_model="narrow", engine=vllm)
    assert problem.startswith("agent_model: 'narrow': its attention heads are 16 wide")
    assert "engine.backend=transformers" in problem
    check(agent_model="narrow")
    check(agent_model="narrow", critic_model="narrow", engine=EngineConfig(backend="transformers"))
    check(engine=vllm, critic_model="narrow")
    on_gpu = MAACConfig(
        num_turns=1, max_new_tokens=8, parallel_training="mp", agent_devices="cuda:0", critic_devices="cuda:0"
    )
    check(on_gpu, agent_model="narrow", engine=vllm)


def test_lengths_must_leave_room_for_a_prompt() -> None:
    (problem,) = problems_of(MAACConfig(num_turns=1, max_new_tokens=64))
    assert problem.startswith(
        "args.max_new_tokens: 64 leaves no room for a prompt: agent_model ('small') takes 64"
    )
    check(MAACConfig(num_turns=1, max_new_tokens=63))
    short = EngineConfig(backend="transformers", max_model_len=20)
    (problem,) = problems_of(MAACConfig(num_turns=1, max_new_tokens=20), engine=short)
    assert "takes 20 tokens" in problem
    (problem,) = problems_of(engine=EngineConfig(backend="transformers", max_model_len=65))
    assert problem.startswith(
        "engine.max_model_len: 65 exceeds the 64 tokens that agent_model ('small') takes"
    )


def test_model_folders_must_hold_model_weights_and_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    assert "holds no config.json" in problems_of(critic_model=str(tmp_path / "bare"))[0]
    LlamaConfig().save_pretrained(tmp_path / "weightless")
    assert "holds no weights" in problems_of(critic_model=str(tmp_path / "weightless"))[0]
    make_model(tmp_path / "mute", 40)
    for file in (tmp_path / "mute").glob("*token*"):
        file.unlink()
    (problem,) = problems_of(agent_model=str(tmp_path / "mute"))
    assert "holds no tokenizer that can be loaded" in problem
    check(agent_model=str(tmp_path / "mute"), tokenizer="small")
    # Of some types of model, transformers makes an empty tokenizer out of nothing.
    Qwen2Config(vocab_size=60).save_pretrained(tmp_path / "empty")
    (problem,) = problems_of(tokenizer=str(tmp_path / "empty"))
    assert "holds no tokenizer; save one there, or set `tokenizer`" in problem
    # transformers loads any tokenizer beside a Qwen2 model as a byte-level one, which this is not.
    make_tokenizer(40).save_pretrained(tmp_path / "mute")
    Qwen2Config(vocab_size=60).save_pretrained(tmp_path / "mute")
    (problem,) = problems_of(tokenizer=str(tmp_path / "mute"))
    assert "makes no tokens of its own words when loaded as Qwen2Tokenizer" in problem
    (tmp_path / "mute" / "config.json").write_text("{}")
    assert "holds no model that can be loaded" in problems_of(critic_model=str(tmp_path / "mute"))[0]


def test_only_causal_language_models_can_act() -> None:
    assert model_checks.causal_problem(LlamaConfig()) is None
    assert model_checks.causal_problem(BertConfig()) is None
    assert "'t5' does not generate text" in str(model_checks.causal_problem(T5Config()))


def test_a_tokenizer_without_pad_token_takes_its_end_of_sequence_token() -> None:
    own = make_tokenizer(40, pad_token="w2")
    assert model_checks.read_tokenizer(own).pad_token == "w2"
    assert model_checks.read_tokenizer(make_tokenizer(40)).pad_token == "<eos>"
    neither = make_tokenizer(40)
    neither.eos_token = None
    (problem,) = problems_of(tokenizer=neither)
    assert problem.startswith("tokenizer: the tokenizer has neither a pad nor an end-of-sequence token")


def test_built_models_are_taken_where_each_agent_has_its_own() -> None:
    model = LlamaForCausalLM.from_pretrained("small")
    tokenizer = make_tokenizer(40)
    (problem,) = problems_of(agent_model=model, tokenizer=tokenizer)
    assert problem.startswith(
        "agent_model: is of type LlamaForCausalLM; several agents need a folder or hub name"
    )
    (problem,) = problems_of(agent_model=None, agents=[model, "small"])
    assert problem.startswith("tokenizer: missing; agents given as model objects need one")
    run = check(agent_model=None, agents=[model, "small"], tokenizer=tokenizer, critic_model=model)
    assert run.models.critics == [model]
    check(MAACConfig(num_agents=1, num_turns=1, max_new_tokens=8), agent_model=model, tokenizer=tokenizer)
    two = [model, "small"]
    (problem, _) = problems_of(
        agent_model=None, agents=two, tokenizer=make_tokenizer(41), critic_model="large"
    )
    assert problem.startswith("agents[0]: the given LlamaForCausalLM: its vocabulary has 40 ids")


def test_problems_of_all_kinds_are_listed_together() -> None:
    found = problems_of(
        MAACConfig(max_new_tokens=64),
        critic_model="nope",
        critics=["small", "small"],
        reward_func="nowhere:f",
        train_dataset=[],
        formatters=[],
    )
    assert [problem.split(":")[0] for problem in found] == [
        "critic_model",
        "critics",
        "args.max_new_tokens",
        "reward_func",
        "formatters",
        "external_transition",
        "train_dataset",
    ]


def test_a_config_file_is_checked_the_same_way(tmp_path: Path, models: Path) -> None:
    (tmp_path / "rewards.py").write_text("def score(*answers):\n    return [1.0]\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (tmp_path / "run.yaml").write_text(
        f"algorithm: maac\nagent_model: {models / 'small'}\ncritic_model: {models / 'small'}\n"
        f"reward_func: {tmp_path}/rewards.py:score\ntrain_dataset: {tmp_path}/rows.jsonl\n"
        "args: {num_turns: 1, max_new_tokens: 8}\nengine: {backend: transformers}\n"
    )
    run = validate(load_config(tmp_path / "run.yaml"))
    assert run.reward_func("a", "b") == [1.0]
    assert list(run.train_rows) == ROWS
    with pytest.raises(ConfigError, match=r"critic_model: .*does not exist") as caught:
        validate(
            load_config(
                tmp_path / "run.yaml", ["critic_model=./nope", f"reward_func={tmp_path}/rewards.py:scor"]
            )
        )
    assert len(caught.value.problems) == 2


def test_models_and_formatters_are_spread_without_opening_anything() -> None:
    assert models_of(MAACConfig(num_agents=3), "a", critic_model="c", tokenizer="t") == (
        ["a"] * 3,
        ["c"],
        ["t"] * 3,
    )
    assert models_of(IACConfig(), agents=["a", "b"], critics=["c", "d"]) == (
        ["a", "b"],
        ["c", "d"],
        ["a", "b"],
    )
    with pytest.raises(ConfigError, match="3 models given"):
        models_of(IACConfig(), agents=["a", "b", "c"], critic_model="c")
    assert formatters_of(3, None) == [None] * 3
    assert formatters_of(2, "builtins:str") == [str, str]
    assert formatters_of(2, ["builtins:str", None]) == [str, None]
