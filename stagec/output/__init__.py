"""What people and scripts read: streams, tables, errors, pages."""
