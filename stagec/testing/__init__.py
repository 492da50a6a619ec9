"""Lit and golden tests of passes and ops: `stagec test FOLDER`, for this project and for others."""
