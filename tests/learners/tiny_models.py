"""Tiny random models of several architectures, and plain one-at-a-time forwards to compare against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
)

from learners.samples import IntArray, TokenBatch

VOCABULARY = 61


def config_of(architecture: str, *, tied: bool = True) -> PretrainedConfig:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied}
    if architecture == "gpt2":
        # Dropout stays at its default of 0.1, so that a learner that leaves it on is noticed.
        return GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, **sizes)
    sizes |= {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    return (Qwen2Config if architecture == "qwen2" else LlamaConfig)(**sizes)


def causal_lm(
    architecture: str = "qwen2", *, dtype: torch.dtype = torch.float64, seed: int = 0, tied: bool = True
) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config_of(architecture, tied=tied), dtype=dtype).eval()


def ids(rng: np.random.Generator, length: int) -> IntArray:
    return rng.integers(3, VOCABULARY, size=length).astype(np.int32)


def batch_of(prompt_lengths: Sequence[int], completion_lengths: Sequence[int], seed: int = 0) -> TokenBatch:
    rng = np.random.default_rng(seed)
    return TokenBatch([ids(rng, n) for n in prompt_lengths], [ids(rng, n) for n in completion_lengths])


def mixed_batch(seed: int = 0) -> TokenBatch:
    """Seven samples of unlike lengths, one with an empty completion."""
    return batch_of([3, 9, 1, 6, 4, 12, 5], [4, 2, 7, 0, 1, 3, 5], seed)


def plain_forward(model: Any, prompt: IntArray, completion: IntArray) -> tuple[Tensor, Tensor]:
    """Full log-softmax [completion, V] at the completion's positions and last hidden states [all, hidden]."""
    tokens = torch.tensor(np.concatenate([prompt, completion]).astype(np.int64))
    output = model(tokens[None], output_hidden_states=True)
    first = len(prompt) - 1
    logprobs = output.logits[0, first : first + len(completion)].log_softmax(dim=-1)
    return logprobs, output.hidden_states[-1][0]


def plain_token_logprobs(model: Any, prompt: IntArray, completion: IntArray) -> Tensor:
    logprobs, _ = plain_forward(model, prompt, completion)
    return logprobs[torch.arange(len(completion)), torch.tensor(completion.astype(np.int64))]


def bits_of(state: Any) -> Any:
    """A nested state with every tensor replaced by its bytes, so that equality means equality of bits, NaN included."""
    if isinstance(state, Tensor):
        flat = state.detach().cpu().contiguous().reshape(-1)
        return str(state.dtype), tuple(state.shape), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(state, dict):
        return {key: bits_of(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [bits_of(value) for value in state]
    return state
