"""Astra: segments of a heterogeneous pipeline, and the whole strategy search around them."""
