"""What a number format would do to a training run."""
