"""Acts: generation engines, rollout collection, rewards. Knows nothing of optimisers."""
