"""Reproductions of the papers' tables: `pflcore reproduce NAME`."""
