"""Published figures and measured steps beside ours. What is published stands in distributions of
their own; here it is read, computed and compared."""
