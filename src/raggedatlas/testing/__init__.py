"""Tests for formats of other packages (`conformance`); test data, Hypothesis strategies and fault injection for those of this project."""
