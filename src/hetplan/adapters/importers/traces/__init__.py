"""Readers of traces of training runs.

`operations`  tables of operations, as of ByteDance's StragglerAnalysis (Parquet or CSV)
`chrome`      traces in the Trace Event Format: those of torch.profiler (Kineto), one file for each
              rank, and hetplan's own
`reading`     tells which of them a file is
"""
