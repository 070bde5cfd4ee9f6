"""The plan file, which says what each device runs: its schema, its rules, and its text for people."""
