"""What to run on which device, for every family: the plan file, its parts and its rules."""
