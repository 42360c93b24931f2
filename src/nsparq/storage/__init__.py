"""The topic log and the state beside it. `files` is the only module that touches the disk."""
