"""`stagec search`: spaces, bounds, exact evaluation, the answer."""
