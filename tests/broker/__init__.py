"""The rules of delivery, without a server: see rig.py."""
