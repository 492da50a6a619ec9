"""The model library: STG files shipped as package data."""
