"""Running pipelines: queries, steps, progress, status."""
