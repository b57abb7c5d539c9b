"""Validator of geometry stores: numbered rules and their checks."""
