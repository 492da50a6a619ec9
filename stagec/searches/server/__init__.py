"""`stagec search --serve server`: which server gives most tokens, or the cheapest ones."""
