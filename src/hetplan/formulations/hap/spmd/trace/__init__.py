"""From a PyTorch module to a single-device program; torch is imported only when a module is
traced."""
