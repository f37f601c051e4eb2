"""Fixtures shared by all tests: one small model with its tokenizer, made once and never downloaded."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how long recoveries took: those that the run logged, and those that a test recorded as `recovery`."""
    lines = []
    for report in terminalreporter.getreports("passed"):
        found = re.findall(r"(\S.* is back after .* s)$", report.caplog, re.MULTILINE)
        found += [value for name, value in report.user_properties if name == "recovery"]
        lines += [f"{report.nodeid}: {re.sub('^.*[.]py:[0-9]+ ', '', each)}" for each in found]
    if lines:
        terminalreporter.section("recoveries")
        terminalreporter.write_line("\n".join(lines))


_TEXT = "def add(a, b):\n    return a + b\n\nthe quick brown fox jumps over the lazy dog; is this a prompt?\n"


def make_tokenizer(pad: str | None = "<pad>", vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with `vocab_size` entries; without `pad` it has no padding token."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        [_TEXT],
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<pad>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=pad,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def make_model(folder: Path, *, seed: int, vocab_size: int = 320, context: int = 256) -> Path:
    """A random Qwen2 with its tokenizer in Hugging Face layout; weights wide enough that tokens are not uniform."""
    tokenizer = make_tokenizer(vocab_size=vocab_size)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,  # head size 32: vLLM's CPU kernels refuse 16
        num_key_value_heads=1,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model most tests use."""
    return make_model(tmp_path_factory.mktemp("models") / "small", seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with another vocabulary."""
    return make_model(tmp_path_factory.mktemp("models") / "other", seed=1, vocab_size=300)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One real Ray on this machine, with more logical CPUs than cores so that tests need not wait for one another."""
    import ray

    ray.init(
        "local",  # never a cluster that something else has left behind
        num_cpus=8,
        include_dashboard=False,
        logging_level="WARNING",
        object_store_memory=500 * 2**20,
    )
    yield
    ray.shutdown()
