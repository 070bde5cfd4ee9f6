"""Gap studies: many methods on many instances, each run a row that is kept."""
