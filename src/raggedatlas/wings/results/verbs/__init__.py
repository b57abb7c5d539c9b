"""Complete tasks over an atlas or results: run a model, score it, reduce its output, look up neighbours."""
