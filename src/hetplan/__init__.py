"""hetplan: plan the training of one model on mixed GPUs, with a proven bound on every plan."""

__version__ = "0.1.0"
