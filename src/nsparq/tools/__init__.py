"""The `nsparq` command and what it offers: one module per sub-command, each with main(arguments)."""
