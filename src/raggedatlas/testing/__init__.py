"""Test data, Hypothesis strategies, fault injection and campaigns for the tests of this project."""
