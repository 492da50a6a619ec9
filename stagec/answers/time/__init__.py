"""The answers of `stagec time`: tables, pages, timelines."""
