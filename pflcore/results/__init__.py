"""What runs leave: records, tables, pictures."""
