"""Plans: which device runs what, for every family. The plan file, its parts and its rules."""
