"""Predictions held against measurements that others published."""
