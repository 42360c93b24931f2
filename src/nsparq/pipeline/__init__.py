"""Pipelines that are declared, not coded: topics are read, decoded, transformed by SQL and written elsewhere.

A TOML file says what (`spec`), the runner makes streaming queries of it. Only the modules that touch Spark
import it, so that a file can be checked without.
"""
