"""What Sailor (SOSP 2025) publishes: measured profiles, link fits, and plans that were run; and
predictions of those.

`data` reads the profiles, `links` the fits of bandwidths, `plans` the plans, `layers` cleans layer
times, `schedule` is the order of work of DeepSpeed's pipeline engine, `predict` puts seconds
together and `memory` bytes.
"""
