"""Spark sessions: finding Java and Spark, setting them up, checking them."""
