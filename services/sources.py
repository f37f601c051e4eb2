"""Where models and tokenizers come from: identifiers stay what they are, built objects are written into the run folder.

Engines and learners are built in their own processes from folders, so an object handed to a trainer is saved once at
the start.  Must not know what the models are for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.composition import Models
from services.room import Sources


def resolve_sources(
    models: Models,
    num_agents: int,
    folder: Path,
) -> Sources:
    """Folders or identifiers of everything; built objects are saved below `folder`.

    One critic object given to several agents is one critic whose parameters they share; one identifier given to several
    agents is loaded for each.
    """
    agent_sources = [_saved(model, folder / f"agent_{i}") for i, model in enumerate(models.agents)]
    tokenizer_sources = [
        _saved(tokenizer, folder / f"agent_{i}") for i, tokenizer in enumerate(models.tokenizers)
    ]
    distinct: list[str] = []
    index_of_object: dict[int, int] = {}
    critic_of_agent: list[int] = []
    for critic in models.critics:
        known = None if isinstance(critic, str) else index_of_object.get(id(critic))
        if known is None:
            known = len(distinct)
            distinct.append(_saved(critic, folder / f"critic_{known}"))
            index_of_object[id(critic)] = known
        critic_of_agent.append(known)
    if len(models.critics) == 1:
        critic_of_agent *= num_agents
    return Sources(agent_sources, tokenizer_sources, distinct, critic_of_agent)


def _saved(source: Any, folder: Path) -> str:
    if isinstance(source, str | Path):
        return str(source)
    folder.mkdir(parents=True, exist_ok=True)
    source.save_pretrained(str(folder))
    return str(folder)
