"""Exports for launchers that start a plan on all its nodes: ssh, Slurm, Kubernetes and Ray."""
