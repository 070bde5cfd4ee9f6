"""Poplar (Zhang et al., AAAI 2025): integer batch allocation to unequal devices under ZeRO stages 0
to 3."""
