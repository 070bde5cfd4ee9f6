"""A planning problem of one's own: where to put the experts of a mixture-of-experts layer.

docs/howto-family.md explains the files of this folder one by one.
"""
