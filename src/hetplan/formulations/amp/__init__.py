"""AMP (Li et al., NeurIPS 2022): parallelism degrees, device placement, micro-batch and stage
assignment."""
