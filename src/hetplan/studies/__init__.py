"""Gap studies: many methods on many instances, each run a row that is kept. Figures of papers and
runs that others measured stand beside hetplan's."""
