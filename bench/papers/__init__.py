"""What a table of a paper takes, and its runs: `pflcore reproduce NAME`."""
