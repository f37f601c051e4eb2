"""Runs on a cluster as Ray jobs: what travels there, and the commands that submit, follow and stop them."""
