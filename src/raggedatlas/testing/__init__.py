"""For tests of this project and of projects that build on it: makers, strategies, suites for sources and sinks."""
