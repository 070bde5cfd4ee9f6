"""The engines that execute plans, as the rest of hetplan sees them: `protocol` says what an engine
offers, `stages`, `programs` and `stock` are the engines, `choice` chooses one for a plan."""
