"""The rules of delivery, tested without a server: see rig.py."""
