"""The definition of the STG language: grammar, reference, phases and ops."""
