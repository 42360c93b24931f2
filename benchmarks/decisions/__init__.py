"""Measurements that settled a design; each file begins with its conclusion."""
