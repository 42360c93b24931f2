"""Long runs under load and kills. Not collected by pytest: each is a program, see its --help."""
