"""One file per verb of the `llmsys` command: its arguments, and the function it calls."""
