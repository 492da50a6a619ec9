"""From a request to a job: built, written, described."""
