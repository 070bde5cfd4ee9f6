"""Launchers: what starts `node.sh` on all nodes. ssh, Slurm, Kubernetes and Ray."""
