"""What the STG language is: grammar, reference, phases and ops."""
