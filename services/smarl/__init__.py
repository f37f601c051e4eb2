"""SMARL as a service: from configuration to running actors, the training loop, its trainer."""
