"""Traces of torch modules, which allocate no memory and compute nothing: their operators are
counted, split into layers, or turned into a single-device program. These modules import torch."""
