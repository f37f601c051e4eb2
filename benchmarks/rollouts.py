"""Joint samples per second of rollouts, by how many items are collected side by side.

Uses the real engines of a configuration.  Run `python examples/prepare.py` first, then
`python benchmarks/rollouts.py [CONFIG.yaml] [key=value ...]`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from actors.rollout import ItemRef, RolloutCollector
from services.callables import resolve
from services.composition import formatters_of
from services.config import RunConfig, load_config
from services.data import load_rows
from services.launch import engines_alone, sampling_of
from services.rollouts import collector_of
from services.room import Sources


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", default="examples/length_ratio_maac.yaml")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--items", type=int, default=32, help="items of every measurement")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        config = load_config(arguments.config, [*arguments.overrides, f"output_dir={folder}"])
        assert isinstance(config, RunConfig)
        measure(config, arguments.items)


def measure(config: RunConfig, count: int) -> None:
    agents = config.agents or [str(config.agent_model)] * config.args.num_agents
    rows = load_rows(config.train_dataset)
    collector = _collector(config)
    items = [ItemRef(k % len(rows), 0, dict(rows[k % len(rows)])) for k in range(count)]
    sampling = sampling_of(config.args)
    with engines_alone(config, Sources(agents, agents, [], [])) as generation:

        def rate(width: int) -> float:
            started = time.perf_counter()
            samples = 0
            for start in range(0, count, width):
                rollouts, _ = collector.collect(
                    items[start : start + width],
                    lambda prompts, seeds: generation.generate(prompts, seeds, sampling),
                )
                samples += sum(len(rollout.samples[0]) for rollout in rollouts)
            return samples / (time.perf_counter() - started)

        rate(count)  # kernels compile on their first use
        print(
            f"{Path(agents[0]).name}, {config.engine.backend}, num_generations {config.args.num_generations}"
        )
        print("| items side by side | joint samples/s | times one at a time |\n|---|---|---|")
        alone = rate(1)
        for width in (1, 2, 4, 8, 16, 32):
            measured = alone if width == 1 else rate(width)
            print(f"| {width} | {measured:.1f} | {measured / alone:.2f} |", flush=True)


def _collector(config: RunConfig) -> RolloutCollector:
    def function(reference: str | None) -> object:
        return None if reference is None else resolve(reference)

    return collector_of(
        config,
        num_generations=config.args.num_generations,
        reward_func=resolve(config.reward_func),
        reward_processor=function(config.reward_processor),  # type: ignore[arg-type]
        formatters=formatters_of(config.args.num_agents, config.formatters),
        external_transition=function(config.external_transition),  # type: ignore[arg-type]
    )


if __name__ == "__main__":
    main()
