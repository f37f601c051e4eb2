"""Soft updates between agents, their targets and the centre, on flat parameter rows.  Pure arithmetic, in place."""

from __future__ import annotations

from torch import Tensor


def soft_update(towards: Tensor, moved: Tensor, tau: float) -> None:
    """`moved <- tau * towards + (1 - tau) * moved`, in place; any shape."""
    moved.mul_(1 - tau).add_(towards, alpha=tau)


def sync_with_centre(centre: Tensor, agents: Tensor, tau: float) -> None:
    """One round of soft updates between the centre [P] and all agents' rows [N, P], in place.

    Agent after agent, in the order of their numbers: `centre <- tau agent_i + (1 - tau) centre`, then
    `agent_i <- tau centre + (1 - tau) agent_i`, so that agent 1 meets a centre that agent 0 has already moved (the
    seed's pseudocode, inside its loop over i).
    """
    for agent in agents:
        soft_update(agent, centre, tau)
        soft_update(centre, agent, tau)
