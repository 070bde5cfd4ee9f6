"""Plans executed with torch.distributed. These modules import torch: import them where a plan is
run, not before."""
