"""Single-device programs, and the SPMD programs that run them on many devices."""
