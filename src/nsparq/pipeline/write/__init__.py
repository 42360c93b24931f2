"""Sinks: files, Delta tables, databases."""
