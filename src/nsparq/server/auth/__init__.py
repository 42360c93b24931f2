"""Permissions, and the auth servers and policy file that grant them."""
