"""Runs the show: configuration, command line, training loop, run folder, checkpoints."""
