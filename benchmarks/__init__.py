"""Measurements of the broker; see README.md here for what each one does and how to run it."""
