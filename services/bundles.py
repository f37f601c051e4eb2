"""Bundles of resources and the nodes that may hold them: sums, and whether there can be room.  Arithmetic alone.

A bundle is what must lie on one node.  Amounts are named as Ray names them ("CPU", "GPU", custom labels).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

Resources = dict[str, float]

_LEAST = 0.0001
"""Ray counts resources in ten-thousandths."""


class PlacementError(RuntimeError):
    """The cluster can never satisfy what the run asks for."""


def asked(options: dict[str, Any]) -> Resources:
    """What an actor with these Ray options takes."""
    amounts = {"CPU": options.get("num_cpus", 0), "GPU": options.get("num_gpus", 0)}
    return {label: amount for label, amount in {**amounts, **options.get("resources", {})}.items() if amount}


def total(parts: Iterable[Resources]) -> Resources:
    """The sum of all `parts`."""
    summed: Resources = {}
    for part in parts:
        for label, amount in part.items():
            summed[label] = round(summed.get(label, 0) + amount, 4)
    return summed


def bundle_of(actors: Iterable[Resources]) -> Resources:
    """The bundle that holds `actors`.  Ray takes no empty bundle, and of several GPUs whole ones only."""
    bundle = total(actors)
    if bundle.get("GPU", 0) > 1:
        bundle["GPU"] = math.ceil(bundle["GPU"])
    return bundle or {"CPU": _LEAST}


def in_words(resources: Resources) -> str:
    """Such as "2 CPU, 0.5 GPU"."""
    return ", ".join(f"{amount:g} {label}" for label, amount in resources.items()) or "nothing"


def what_is_missing(bundles: Sequence[Resources], nodes: Sequence[Resources], *, one_node: bool) -> list[str]:
    """Why `bundles` can never find room on `nodes`, one sentence per resource; empty where nothing speaks against it.

    Args:
        nodes: what each node has when nothing runs on it.
        one_node: all bundles have to lie on the same node.
    """
    together = [total(bundles)] if one_node else bundles
    found = []
    for label, needed in total(bundles).items():
        amounts = [bundle[label] for bundle in together if bundle.get(label)]
        have = [node.get(label, 0.0) for node in nodes]
        text = _missing(label, needed, amounts, have)
        if text is not None:
            found.append(text)
    return found


def _missing(label: str, needed: float, amounts: Sequence[float], have: Sequence[float]) -> str | None:
    """`amounts` are each needed on one node; `have` is what the nodes have."""
    largest = max(have, default=0.0)
    if needed > sum(have) + 1e-6:
        return f"{needed:g} {label} needed in all, {sum(have):g} there"
    if max(amounts) > largest + 1e-6:
        return f"{max(amounts):g} {label} needed on one node, the largest node has {largest:g}"
    for size in sorted(set(amounts)):
        places = sum(amount >= size for amount in amounts)
        room = sum(_room(label, amount, size) for amount in have)
        if places > room:
            nodes = ", ".join(f"{amount:g}" for amount in have)
            return f"{places} places with {size:g} {label} each needed, the nodes (with {nodes}) have {room}"
    return None


def _room(label: str, amount: float, size: float) -> int:
    """How many bundles of `size` a node with `amount` can hold; no part of a GPU is made of two GPUs."""
    if label == "GPU" and size <= 1:
        return int(amount) * math.floor(1 / size + 1e-6)
    return math.floor(amount / size + 1e-6)


def pack_greedily(bundles: Sequence[Resources], nodes: Sequence[Resources]) -> bool:
    """Whether the bundles find room when each, the largest first, takes the first node that has room for it."""
    left = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda b: -sum(b.values())):
        for node in left:
            if all(node.get(label, 0) + 1e-6 >= amount for label, amount in bundle.items()):
                for label, amount in bundle.items():
                    node[label] -= amount
                break
        else:
            return False
    return True
