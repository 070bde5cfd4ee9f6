"""Plans: the one representation of what to run, for every family. Executing them needs torch."""
