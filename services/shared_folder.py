"""Whether all nodes of a run see its folder: learners write their checkpoints into it, each on its own node."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from services.config import ConfigError

_LIMIT_S = 60.0
"""For a node to answer at all."""
_DELAY_S = 10.0
"""For a file to appear elsewhere: network file systems remember for a while what was not there."""


def check_shared(folder: Path, nodes: Sequence[str], *, limit_s: float = _LIMIT_S) -> None:
    """Leave a file in `folder` and have it read on each of `nodes`; one node alone needs no shared folder.

    Raises:
        ConfigError: a node does not see the file, or does not answer within `limit_s` seconds.
    """
    here = ray.get_runtime_context().get_node_id()
    elsewhere = [node for node in nodes if node != here]
    if not elsewhere:
        return
    probe = folder / f".probe-{uuid.uuid4().hex}"
    probe.touch()
    try:
        blind = _blind(probe, elsewhere, limit_s)
    finally:
        probe.unlink()
    if blind:
        raise ConfigError(
            f"output_dir: {folder} is not the same folder on every node of the run; {'; '.join(blind)}. With several "
            "nodes it has to be on a file system that they share, such as NFS"
        )


def _blind(probe: Path, nodes: Sequence[str], limit_s: float) -> list[str]:
    """What is wrong on which node."""
    asked = {
        node: _sees.options(scheduling_strategy=_on(node)).remote(str(probe), _DELAY_S) for node in nodes
    }
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit_s)
    names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    found = []
    for node, ref in asked.items():
        name = f"node {names.get(node, '?')} ({node[:8]})"
        try:
            if not ray.get(ref, timeout=0):
                found.append(f"{name} does not see what is written into it here")
        except TimeoutError:
            ray.cancel(ref, force=True)
            found.append(f"{name} did not answer within {limit_s:g} s")
        except RayError as error:
            found.append(f"{name} could not be asked: {str(error).splitlines()[0]}")
    return found


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)


@ray.remote(num_cpus=0, max_retries=0)  # type: ignore[untyped-decorator]
def _sees(path: str, patience_s: float) -> bool:
    end = time.monotonic() + patience_s
    while not Path(path).is_file():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
