"""From a request to a job: built, written, told what it is made of."""
