"""The search: candidates for a step, stage by stage, and what each came to."""
