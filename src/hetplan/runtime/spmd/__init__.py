"""SPMD programs on ranks: local computation as on simulated devices, collectives by
torch.distributed."""
