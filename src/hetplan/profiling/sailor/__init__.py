"""What Sailor (SOSP 2025) publishes: measured profiles, link fits, and plans that were run; and
predictions of those.

`data` reads all of it, `schedule` is the order of work of DeepSpeed's pipeline engine, `predict`
puts seconds and bytes together, `validation` compares them with what was measured.
"""
