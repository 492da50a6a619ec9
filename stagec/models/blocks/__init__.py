"""Strategy texts of published runs."""
