"""Pictures of a plan: the timeline of an iteration, the memory and the placement of devices, and
the other candidates. They are drawn on the terminal, as an HTML page, and as a PNG or SVG file."""
