"""Reference models whose layers are those of a plan. These modules import torch."""
