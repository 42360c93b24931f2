"""Adapters for other projects. Each module needs the extra of its own name."""
