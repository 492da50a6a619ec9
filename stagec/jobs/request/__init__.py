"""What a user asks for: the options of a job, and which of them go together."""
