"""One event-driven simulator of training schedules: what a plan takes, device by device, second by
second.

`schedules` orders the work of a stage, `pipeline` turns replicas and collectives into tasks,
`tasks` runs them, `timeline` tells what came of it.
"""
