"""Replays the recorded DDPG runs, gradient step by gradient step, through the pure functions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from recorded_ddpg import CASES, TOLERANCE, batch_of, row, rows, shapes

from learners.smarl.ddpg import DDPGRules, DDPGStack
from learners.smarl.soft_sync import sync_with_centre


def stack_of(case: dict[str, Any], agents: slice) -> DDPGStack:
    networks, initial = shapes(case), case["initial"]
    return DDPGStack(
        networks,
        DDPGRules(case["gamma"], case["lr"], case["lr"]),
        rows(networks.actor, initial["actor"][agents]),
        rows(networks.critic, initial["critic"][agents]),
        actor_target=rows(networks.actor, initial["actor_target"][agents]),
        critic_target=rows(networks.critic, initial["critic_target"][agents]),
    )


def test_there_are_recorded_runs() -> None:
    assert len(CASES) == 3


@pytest.mark.parametrize("stacked", [True, False], ids=["one stack", "one at a time"])
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_number_of_the_recorded_run_is_reproduced(path: Any, stacked: bool) -> None:
    case = json.loads(path.read_text())
    count, networks = case["agents"], shapes(case)
    spans = [slice(0, count)] if stacked else [slice(i, i + 1) for i in range(count)]
    stacks = [stack_of(case, span) for span in spans]
    centre = {
        "actor": torch.from_numpy(row(networks.actor, case["initial"]["central_actor"])),
        "critic": torch.from_numpy(row(networks.critic, case["initial"]["central_critic"])),
    }
    for step in case["steps"]:
        for stack, span in zip(stacks, spans, strict=True):
            recorded = step["agents"][span]
            stats = stack.update(batch_of(recorded))
            for name, ours in {
                "td_target": stats.td_targets,
                "critic_loss": stats.critic_loss,
                "actor_loss": stats.actor_loss,
                "actor_gradient_l2": stats.actor_gradient_norm,
            }.items():
                theirs = np.array([agent[name] for agent in recorded])
                np.testing.assert_allclose(ours.numpy(), theirs, atol=TOLERANCE, err_msg=name)
        if step["step"] % case["sync_every"] == 0:
            for stack in stacks:
                stack.update_targets(case["tau"])
                for name, vector in centre.items():
                    sync_with_centre(vector, getattr(stack, name), case["tau"])
    for name in ("actor", "critic", "actor_target", "critic_target"):
        shape = networks.actor if name.startswith("actor") else networks.critic
        ours = torch.cat([getattr(stack, name) for stack in stacks])
        np.testing.assert_allclose(ours, rows(shape, case["final"][name]), atol=TOLERANCE, err_msg=name)
    for name, vector in centre.items():
        theirs = row(getattr(networks, name), case["final"][f"central_{name}"])
        np.testing.assert_allclose(vector, theirs, atol=TOLERANCE, err_msg=f"central {name}")
