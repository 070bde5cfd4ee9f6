"""Modules run on fake tensors, their operators counted: no memory, no arithmetic. These modules
import torch."""
