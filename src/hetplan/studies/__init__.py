"""Gap studies: they run many methods on many instances, keep a row for each run, and report how far
the methods are from the best known objectives."""
