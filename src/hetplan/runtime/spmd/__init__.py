"""hetplan's own engine for SPMD programs, which runs one rank's shards of a program with torch, and
its collectives with torch.distributed."""
