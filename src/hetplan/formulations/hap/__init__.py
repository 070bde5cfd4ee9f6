"""HAP: a distributed program and the sharding ratios of its tensors, decided together."""
