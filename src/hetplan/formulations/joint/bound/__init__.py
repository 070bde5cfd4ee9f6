"""A lower bound on the replayed seconds of every plan of an instance (driver.py has the whole)."""
