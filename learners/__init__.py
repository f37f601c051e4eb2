"""Learns: actor-critic mathematics, policies, critics and their learner actors. Knows nothing of prompts or rewards."""
