"""The cost model of tables of strategies: one row a strategy, arrays of seconds and bytes."""
