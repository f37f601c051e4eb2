"""Collaborative coding on HumanEval: one agent writes a helper function, the other the function that is asked for."""
