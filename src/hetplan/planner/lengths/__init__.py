"""Samples of unequal length: plans for the mean and for a quantile of their tokens, and what
padding, packing and balance take on drawn lengths when these plans are replayed."""
