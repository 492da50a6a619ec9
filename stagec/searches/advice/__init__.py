"""What would make a job hold less."""
