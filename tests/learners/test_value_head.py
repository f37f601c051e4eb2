"""The value head's shape, initialisation, precision and file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import bits_of

from learners.value_head import FILE_NAME, ValueHead


def test_without_a_hidden_layer_the_head_is_linear() -> None:
    head = ValueHead(4).double()
    hidden = torch.randn(2, 3, 4, dtype=torch.float64)
    layer = head.value_projection
    torch.testing.assert_close(head(hidden), (hidden @ layer.weight[0]) + layer.bias[0])


def test_with_a_hidden_layer_the_head_is_linear_tanh_linear() -> None:
    head = ValueHead(4, 5).double()
    hidden = torch.randn(3, 4, dtype=torch.float64)
    first, second = head.hidden_projection, head.value_projection
    assert first is not None
    expected = torch.tanh(hidden @ first.weight.T + first.bias) @ second.weight[0] + second.bias[0]
    torch.testing.assert_close(head(hidden), expected)


def test_initial_weights_depend_on_the_seed_and_on_nothing_else() -> None:
    torch.manual_seed(1)
    first = ValueHead(4, 5, seed=3)
    torch.manual_seed(2)
    second = ValueHead(4, 5, seed=3)
    assert bits_of(first.state_dict()) == bits_of(second.state_dict())
    assert bits_of(first.state_dict()) != bits_of(ValueHead(4, 5, seed=4).state_dict())
    assert first.hidden_projection is not None
    assert first.hidden_projection.weight.abs().max() <= 0.5  # 1 / sqrt(4)


def test_half_precision_hidden_states_are_read_in_float32() -> None:
    head = ValueHead(4)
    hidden = torch.randn(2, 4).bfloat16()
    assert head(hidden).dtype == torch.float32
    torch.testing.assert_close(head(hidden), head(hidden.float()), rtol=0, atol=0)


@pytest.mark.parametrize("head_hidden", [None, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_saved_head_is_loaded_with_its_shape_and_precision(
    tmp_path: Path, head_hidden: int | None, dtype: torch.dtype
) -> None:
    head = ValueHead(4, head_hidden, seed=1).to(dtype)
    head.save(tmp_path)
    assert (tmp_path / FILE_NAME).is_file()
    assert bits_of(ValueHead.load(tmp_path).state_dict()) == bits_of(head.state_dict())


def test_a_folder_without_a_head_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ValueHead.load(tmp_path)
