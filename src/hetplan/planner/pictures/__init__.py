"""Pictures of a plan: what each device does when, what it holds, where everything is, and what else
there was."""
