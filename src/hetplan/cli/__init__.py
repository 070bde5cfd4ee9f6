"""The command line. Importing this package loads neither solvers nor schemas."""
