"""The stages of one step: gradients, measure, decide, update."""
