"""hetplan's own engine, which executes plans of stages with torch.distributed. These modules import
torch: import them where a plan is run, not before."""
