"""Whole runs: the loop over rounds, what it keeps, and what comes out."""
