"""From gradients to a step taken or skipped: the stages, and what holds them together."""
