"""The plan file, which says what each device runs: its schema, its rules, its text for people."""
