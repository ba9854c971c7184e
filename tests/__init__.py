"""What must stay true, in folders named for the rooms they test."""

PATIENCE = 600.0
"""Seconds after which a process counts as hung; far more than a busy machine makes one take."""
