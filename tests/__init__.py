"""Tests of nsparq, laid out as the package is."""
