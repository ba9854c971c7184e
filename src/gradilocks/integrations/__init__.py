"""Adapters for training frameworks and experiment trackers. Each imports its framework and the training path only."""
