"""Several ranks that train one model: how its tensors lie on them, what they tell each other."""
