"""The settings: names and defaults of the specification, rules between fields, files and overrides, what is printed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from services.config import (
    ALGORITHMS,
    ConfigError,
    EngineConfig,
    IACConfig,
    MAACConfig,
    ModelOptions,
    commented_config,
    config_reference,
    dump_config,
    load_config,
    parse_config,
)
from services.config.fields import walk

# The table of the specification, typed out here once more so that a changed default is noticed.
SHARED_DEFAULTS: dict[str, Any] = {
    "num_agents": 2,
    "num_turns": 2,
    "num_train_epochs": 40,
    "critic_type": "v",
    "agent_learning_rate": 5e-6,
    "critic_learning_rate": 5e-6,
    "value_loss_coef": 0.6,
    "critic_value_head_hidden_dim": None,
    "advantage_normalization": True,
    "rollout_buffer_size": 8,
    "train_batch_size": None,
    "max_new_tokens": 256,
    "temperature": 0.6,
    "top_p": 0.6,
    "top_k": None,
    "num_generations": 1,
    "external_prompt_passthrough": False,
    "discount": 1.0,
    "early_termination_threshold": -0.2,
    "eval_interval": 16,
    "eval_num_samples": 4,
    "eval_batch_size": 1,
    "logging_steps": 1,
    "parallel_training": "none",
    "agent_devices": None,
    "critic_devices": None,
    "reference_kl_enabled": False,
    "reference_kl_coef": 0.1,
    "reference_devices": None,
}
IAC_DEFAULTS = {"use_separate_critic": True, "value_clip_range": 0.2, "value_head_hidden_dim": None}

MINIMAL = "algorithm: maac\nagent_model: m\nreward_func: a:b\ntrain_dataset: d.jsonl\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def problems_of(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text), list(overrides))
    return caught.value.problems


def test_maac_has_exactly_the_fields_and_defaults_of_the_specification() -> None:
    assert MAACConfig().model_dump() == SHARED_DEFAULTS


def test_iac_has_exactly_the_fields_and_defaults_of_the_specification() -> None:
    assert IACConfig().model_dump() == SHARED_DEFAULTS | IAC_DEFAULTS


def test_fields_are_given_by_keyword_and_cannot_change_later() -> None:
    config = MAACConfig(num_agents=3, num_turns=1, top_k=5)
    assert (config.num_agents, config.num_turns, config.top_k) == (3, 1, 5)
    with pytest.raises(ValidationError):
        config.num_agents = 4  # type: ignore[misc]


def test_every_setting_has_a_help_text() -> None:
    for algorithm in ALGORITHMS:
        assert [key for key, setting in walk(algorithm) if not setting.description] == []


def test_critic_learning_rate_of_iac_falls_back_to_the_agents() -> None:
    assert (
        IACConfig(agent_learning_rate=1e-3, critic_learning_rate=None).effective_critic_learning_rate == 1e-3
    )
    assert (
        IACConfig(agent_learning_rate=1e-3, critic_learning_rate=1e-2).effective_critic_learning_rate == 1e-2
    )
    shared = IACConfig(agent_learning_rate=1e-3, critic_learning_rate=1e-2, use_separate_critic=False)
    assert shared.effective_critic_learning_rate == 1e-3
    with pytest.raises(ValidationError, match="critic_learning_rate"):
        MAACConfig(critic_learning_rate=None)  # type: ignore[arg-type]


def test_train_batch_size_defaults_to_the_buffer() -> None:
    assert MAACConfig(rollout_buffer_size=6).effective_train_batch_size == 6
    assert MAACConfig(rollout_buffer_size=6, train_batch_size=4).effective_train_batch_size == 4


def test_number_of_critic_models_follows_the_algorithm() -> None:
    assert MAACConfig(num_agents=3).num_critic_models == 1
    assert IACConfig(num_agents=3).num_critic_models == 3
    assert IACConfig(num_agents=3, use_separate_critic=False).num_critic_models == 0


def test_what_null_stands_for() -> None:
    engine = EngineConfig()
    assert (engine.effective_dtype(on_gpu=False), engine.effective_dtype(on_gpu=True)) == (
        "float32",
        "bfloat16",
    )
    assert (engine.effective_kv_cache_memory_mib(False), engine.effective_kv_cache_memory_mib(True)) == (
        256,
        None,
    )
    assert engine.effective_logprob_tolerance("float32") == 1e-3
    assert engine.effective_logprob_tolerance("bfloat16") == 0.1
    options = ModelOptions(critic_value_head_hidden_dim=16)
    assert options.critic_head_hidden_dim(MAACConfig()) == 16
    assert options.critic_head_hidden_dim(MAACConfig(critic_value_head_hidden_dim=8)) == 8
    assert options.shared_head_hidden_dim(IACConfig()) is None


@pytest.mark.parametrize(
    ("model", "values", "field", "words"),
    [
        (MAACConfig, {"num_generations": 4}, "num_generations", "num_turns=2"),
        (MAACConfig, {"parallel_training": "mp", "critic_devices": "cpu"}, "agent_devices", "list of 2"),
        (MAACConfig, {"parallel_training": "mp", "agent_devices": "cuda"}, "critic_devices", "list of 1"),
        (IACConfig, {"parallel_training": "mp", "agent_devices": "cuda"}, "critic_devices", "list of 2"),
        (
            IACConfig,
            {"parallel_training": "mp", "agent_devices": ["cuda:0"], "critic_devices": "cuda:1"},
            "agent_devices",
            r"\['cuda:0'\] has 1 entries where 2",
        ),
        (
            IACConfig,
            {
                "parallel_training": "mp",
                "agent_devices": "cuda",
                "critic_devices": "cuda",
                "use_separate_critic": False,
            },
            "critic_devices",
            "leave critic_devices out",
        ),
        (MAACConfig, {"agent_devices": "cuda:0"}, "agent_devices", "parallel_training='mp'"),
        (MAACConfig, {"reference_devices": "cpu"}, "reference_devices", "reference_kl_enabled=true"),
        (IACConfig, {"value_head_hidden_dim": 8}, "value_head_hidden_dim", "use_separate_critic=false"),
        (
            IACConfig,
            {"critic_value_head_hidden_dim": 8, "use_separate_critic": False},
            "critic_value_head_hidden_dim",
            "use_separate_critic=true",
        ),
        (MAACConfig, {"value_clip_range": 0.2}, "value_clip_range", "only IAC"),
        (MAACConfig, {"discont": 0.9}, "discont", "did you mean `discount`"),
        (MAACConfig, {"agent_devices": "gpu", "parallel_training": "mp"}, "agent_devices", "gpu"),
        (MAACConfig, {"top_p": 1.5}, "top_p", "less than or equal to 1"),
        (MAACConfig, {"temperature": 0}, "temperature", "greater than 0"),
        (MAACConfig, {"discount": float("nan")}, "discount", "finite"),
    ],
)
def test_inconsistent_fields_are_refused_with_field_and_remedy(
    model: type[MAACConfig], values: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(ValidationError, match=words) as caught:
        model(**values)
    assert {error["loc"][0] for error in caught.value.errors()} == {field}


def test_complete_placements_are_accepted() -> None:
    IACConfig(
        parallel_training="mp",
        agent_devices=["cuda:0", "cuda:1"],
        critic_devices="cuda:2",
        reference_kl_enabled=True,
        reference_devices=["cpu", "cpu"],
    )
    IACConfig(parallel_training="mp", agent_devices="cuda:0", use_separate_critic=False)
    MAACConfig(parallel_training="mp", agent_devices="cuda:0", critic_devices=["cpu"])


def test_all_problems_of_all_sections_are_listed_at_once(tmp_path: Path) -> None:
    problems = problems_of(
        tmp_path,
        "algorithm: iac\nagent_model: m\nargs: {num_generations: 2, top_p: k}\nengine: {bakend: vllm}\nlr: 1\n",
        "args.agent_devices=gpu",
    )
    starts = [problem.split(":")[0] for problem in problems]
    assert sorted(starts) == [
        "args.agent_devices",
        "args.top_p",
        "engine.bakend",
        "lr",
        "reward_func",
        "train_dataset",
    ]
    assert "'k' is not accepted" in problems[starts.index("args.top_p")]
    assert "number, greater than 0, at most 1" in problems[starts.index("args.top_p")]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("discount=0.9", "discount: unknown key; did you mean `args.discount`?"),
        ("args.discont=0.9", "args.discont: unknown key; did you mean `args.discount`?"),
        ("num_turn=1", "num_turn: unknown key; did you mean `args.num_turns`?"),
        ("args.seed=1", "args.seed: unknown key; did you mean `seed`?"),
        ("engine.dtyp=x", "engine.dtyp: unknown key; did you mean `engine.dtype`?"),
        ("model_options.dtype=float32", "model_options: unknown key; did you mean `model_config`?"),
        ("args.value_clip_range=1", "args.value_clip_range: unknown key; only IAC has it"),
        ("zzz=1", "zzz: unknown key; known here are: algorithm, agent_model,"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_known_one(
    tmp_path: Path, override: str, words: str
) -> None:
    (problem,) = problems_of(tmp_path, MINIMAL, override)
    assert problem.startswith(words)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("args.num_turns=2.5", "args.num_turns: 2.5 is not accepted. Accepted: whole number, at least 1."),
        ("args.critic_type=x", "args.critic_type: 'x' is not accepted. Accepted: `v` or `q`."),
        ("args=7", "args: 7 is not accepted. Accepted: section of settings."),
        ("engine=[1]", "engine: [1] is not accepted. Accepted: section of settings."),
        (
            "train_dataset.limit=0",
            "train_dataset.limit: 0 is not accepted. Accepted: whole number, at least 1, or null.",
        ),
        ("agents=m", "agents: 'm' is not accepted. Accepted: list of folders or hub names, or null."),
        ("critics=[a,{}]", "critics[1]: {} is not accepted."),
        ("run_name=a/b", "run_name: 'a/b' is not accepted. Accepted: text without slashes"),
        (
            "engine.start_timeout_s=0",
            "engine.start_timeout_s: 0 is not accepted. Accepted: number, greater than 0.",
        ),
        ("placement.timeout_s=-1", "placement.timeout_s: -1 is not accepted."),
        ("algorithm=ppo", "algorithm: 'ppo' is not accepted. Accepted: `maac` or `iac`; `smarl`"),
        ("args.num_generations=3", "args.num_generations: 3 does not go with num_turns=2"),
        ("seed=${nope}", "seed: Interpolation key 'nope' not found"),
        ("seed", "override 'seed': write key=value"),
        ("x=[1", "override 'x=[1':"),
        ("agents[3]=x", "agents: {'3': 'x'} is not accepted."),
    ],
)
def test_a_bad_value_is_answered_with_key_value_and_what_is_accepted(
    tmp_path: Path, override: str, words: str
) -> None:
    (problem,) = problems_of(tmp_path, MINIMAL, override)
    assert problem.startswith(words)


def test_a_head_size_given_twice_must_agree(tmp_path: Path) -> None:
    head = "critic_value_head_hidden_dim"
    (problem,) = problems_of(tmp_path, MINIMAL, f"args.{head}=8", f"model_config.{head}=16")
    assert problem.startswith("model_config: ")
    assert f"args.{head}=8" in problem
    load_config(write(tmp_path, MINIMAL), [f"args.{head}=8", f"model_config.{head}=8"])


def test_overrides_reach_sections_lists_and_interpolations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GREENROOM_TEST_FOLDER", "out")
    config = load_config(
        write(tmp_path, MINIMAL + "engine:\n"),
        [
            "train_dataset.limit=3",
            "eval_dataset=e.csv",
            "eval_dataset.split=test[:2]",
            "wandb_config.mode=offline",
            "args.agent_learning_rate=1e-5",
            "args={num_turns: 1, top_p: '0.5'}",
            "agents=[a, b]",
            "agents[1]=c",
            "critic_model=",
            "seed=${args.num_turns}",
            "output_dir=${oc.env:GREENROOM_TEST_FOLDER}/x=y",
            "run_name=20260101",
        ],
    )
    assert (config.train_dataset.path, config.train_dataset.limit) == ("d.jsonl", 3)
    assert config.eval_dataset is not None
    assert (config.eval_dataset.path, config.eval_dataset.split) == ("e.csv", "test[:2]")
    assert config.wandb_config is not None
    assert config.wandb_config.mode == "offline"
    assert isinstance(config.args, MAACConfig)
    assert (config.args.agent_learning_rate, config.args.num_turns, config.args.top_p) == (1e-5, 1, 0.5)
    assert config.agents == ["a", "c"]
    assert config.critic_model is None
    assert (config.seed, config.output_dir, config.run_name) == (1, "out/x=y", "20260101")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1\nb: 2", "line 2, column 2: not valid YAML"),
        (MINIMAL + "seed: 1\nseed: 2\n", "found duplicate key seed"),
        (MINIMAL + "seed: 1\n\tx: 2\n", "line 6, column 1: not valid YAML"),
        ("- 1\n", "holds a list"),
        (MINIMAL + "7: 3\n", "7: unknown key"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (problem,) = problems_of(tmp_path, text)
    assert words in problem


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.yaml cannot be used:\n  - there is no such file"):
        load_config(tmp_path / "nope.yaml")
    with pytest.raises(ConfigError, match="it is a folder"):
        load_config(tmp_path)


def test_args_may_be_a_config_object_of_the_right_algorithm() -> None:
    values = {"algorithm": "iac", "reward_func": "a:b", "train_dataset": "d", "args": IACConfig(num_turns=1)}
    config = parse_config(values)
    assert isinstance(config.args, IACConfig)
    assert config.args.num_turns == 1
    with pytest.raises(ConfigError, match=r"args: .*MAACConfig is given, but the algorithm needs IACConfig"):
        parse_config(values | {"args": MAACConfig()})


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_the_printed_config_loads_unchanged_and_holds_the_defaults(tmp_path: Path, algorithm: str) -> None:
    text = commented_config(algorithm)
    config = load_config(write(tmp_path, text))
    assert config.algorithm == algorithm
    assert config.args == ALGORITHMS[algorithm]()
    language = {"agent_model", "critic_model", "reward_func", "external_transition", "train_dataset"}
    examples = {"algorithm", *({"environment"} if algorithm == "smarl" else language)}
    bare = type(config)(**{key: getattr(config, key) for key in examples})
    assert config == bare
    for key, setting in walk(algorithm):
        assert f"{key.rpartition('.')[2]}:" in text, key
        assert setting.accepts


def test_the_printed_optional_sections_load_when_uncommented(tmp_path: Path) -> None:
    text = (
        commented_config("maac")
        .replace("\nwandb_config: null\n", "\n")
        .replace("\neval_dataset: null\n", "\n")
        .replace("\nlora: null\n", "\n")
    )
    starts = ("# wandb_config:", "# eval_dataset:", "# lora:", "#   ")
    lines = [line.removeprefix("# ") if line.startswith(starts) else line for line in text.splitlines()]
    # The second line of a long note starts like a setting that is commented out.
    lines = [line for line in lines if not line.lstrip().startswith("Default:")]
    config = load_config(write(tmp_path, "\n".join(lines)))
    assert config.wandb_config is not None
    assert config.wandb_config.project == "greenroom"
    assert config.eval_dataset is not None


def test_an_unknown_algorithm_to_print_is_refused() -> None:
    with pytest.raises(ConfigError, match="'mac' is unknown; did you mean 'maac'"):
        commented_config("mac")


def test_a_run_s_own_settings_are_written_whole_and_read_back_equal(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, MINIMAL),
        [
            "model_config.dtype=bfloat16",
            "args.agent_learning_rate=1e-7",
            r"run_name='\${x}'",
            "wandb_config={}",
        ],
    )
    assert config.run_name == "${x}"
    text = dump_config(config)
    assert load_config(write(tmp_path, text)) == config
    plain = yaml.safe_load(text)
    assert plain["args"]["agent_learning_rate"] == 1e-7
    assert set(plain) == {key for key, _ in walk("maac") if "." not in key}


def test_the_reference_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "config-reference.md"
    assert page.read_text() == config_reference(), "run `make docs`"


def test_the_error_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ConfigError(["a", "b"], "head")))
    assert (error.problems, str(error)) == (["a", "b"], "head:\n  - a\n  - b")
