"""What produces the figures that hetplan's pages state: published runs (`truth`), the five papers'
tables and figures (`papers`), times and instances (`speed`).

It belongs to the checkout, not to the installed package. hetplan never imports it.
"""
