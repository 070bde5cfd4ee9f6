"""Drivers, results and options that every family's solvers share. Importing this package loads no
solver."""
