"""Sweeps: many trials of one run with different settings, on Ray Tune."""
