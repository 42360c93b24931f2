"""The `nsparq` command: one module per sub-command, each with main(arguments)."""
