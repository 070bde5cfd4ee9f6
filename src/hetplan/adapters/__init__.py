"""Adapters to other frameworks: exporters write plans as their configurations and scripts,
importers read their measurements into hetplan's files."""
