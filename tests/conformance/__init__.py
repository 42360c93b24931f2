"""The rules of NSQ as black-box tests, over the wire; see README.md."""
