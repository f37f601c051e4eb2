"""Environments of teams: E copies side by side, N agents each. Know nothing of learning, of Ray or of configs."""
