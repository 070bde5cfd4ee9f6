"""Instance files: their format, the library of instances that comes with hetplan, generators of
random instances, and answer documents."""
