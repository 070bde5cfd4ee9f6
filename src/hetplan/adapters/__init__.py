"""Other frameworks: plans in their words, and their measurements as our files."""
