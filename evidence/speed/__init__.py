"""How soon hetplan's methods end, how good their answers are, and what writes the packaged
instances: one script for each question."""
