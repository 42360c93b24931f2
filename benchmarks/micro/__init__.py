"""Measurements of single modules, inside one process."""
