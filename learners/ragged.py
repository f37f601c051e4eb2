"""Arrays of different lengths, kept as one: a batch then costs one copy on its way between processes, not one each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Ragged(Sequence[NDArray[Any]]):
    """A sequence of one-dimensional arrays, which are views of one flat array.

    Args:
        flat: all of them, one after another.
        bounds: where each begins, and at last where the last one ends; one more than there are arrays.
    """

    __slots__ = ("_bounds", "_flat")

    def __init__(self, flat: NDArray[Any], bounds: NDArray[np.int64]) -> None:
        self._flat, self._bounds = flat, bounds

    @classmethod
    def of(cls, arrays: Sequence[NDArray[Any]], dtype: DTypeLike) -> Ragged:
        """A copy of `arrays` as `dtype`."""
        bounds = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(array) for array in arrays], out=bounds[1:])
        flat = np.concatenate(arrays, dtype=dtype) if arrays else np.zeros(0, dtype)
        return cls(flat, bounds)

    def __reduce__(self) -> tuple[type[Ragged], tuple[NDArray[Any], NDArray[np.int64]]]:
        return Ragged, (self._flat, self._bounds)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, index: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        return self._flat[self._bounds[position] : self._bounds[position + 1]]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        flat = self._flat
        return (flat[start:stop] for start, stop in pairwise(self._bounds.tolist()))
