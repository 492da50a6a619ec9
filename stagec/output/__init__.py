"""How people and scripts are told: streams, tables, errors, pages."""
